"""The ranks of an executor beside its first: processes that the first one starts, watches and takes with it.

The first is ``alto.cluster.worker``; each other is ``python -m alto.cluster.crew``, in the session of the first. One
that dies leaves the others waiting for it in the middle of a pass, so the executor ends, within `GRACE_S` of that; one
that hangs lets the heartbeat of the first stop, which whoever watches the executor sees.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from alto.cluster.attempt import AttemptDir, Ending
from alto.cluster.base import Outcome
from alto.cluster.entry import ending_of, load_entry
from alto.cluster.processes import HELD_SIGNALS

__all__ = ["GRACE_S", "Crew"]

GRACE_S = 5.0
"""How long the first rank may take to find out by itself what ended another: mostly it meets the same."""

WATCH_INTERVAL_S = 0.2


class Crew:
    """Ranks 1 to ``size - 1``.

    Args:
        entry: ``module:function`` that each of them calls.
        on_death: Is called, on a thread, once a rank has died before its work was done and `GRACE_S` have gone by.
    """

    def __init__(self, attempt: AttemptDir, entry: str, size: int, on_death: Callable[[Ending], None]) -> None:
        self._attempt = attempt
        self._on_death = on_death
        self._processes = {rank: self._start(rank, entry) for rank in range(1, size)}
        if self._processes:
            threading.Thread(target=self._watch, daemon=True).start()

    def verdict(self, own: Ending) -> Ending:
        """How the executor ended, where its first rank says ``own``: what another rank knows better, if it does.

        An error that ALTO did not raise may only be that the others have gone.
        """
        if own.outcome is not Outcome.LOST or not self._processes:
            return own
        gives_up_at = time.monotonic() + GRACE_S
        while (found := self._first_death()) is None and time.monotonic() < gives_up_at:
            time.sleep(WATCH_INTERVAL_S)
        return found or own

    def _start(self, rank: int, entry: str) -> subprocess.Popen[bytes]:
        with self._attempt.rank_log(rank).open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "alto.cluster.crew", str(self._attempt.root), "--entry", entry],
                env={**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def _watch(self) -> None:
        while (found := self._first_death()) is None:
            time.sleep(WATCH_INTERVAL_S)
        time.sleep(GRACE_S)
        self._on_death(found)

    def _first_death(self) -> Ending | None:
        """How the first rank that did not end well ended; None while all live or have done their work."""
        for rank, process in self._processes.items():
            code = process.poll()
            if code:
                said = self._attempt.ending(rank)
                how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
                reason = f"rank {rank} {how} and did not say why; see {self._attempt.rank_log(rank)}"
                return said or Ending(outcome=Outcome.LOST, reason=reason)
        return None


def main() -> None:
    """Work as one rank; ends this process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("attempt_dir", type=Path)
    parser.add_argument("--entry", required=True, help="module:function")
    arguments = parser.parse_args()
    rank, first = int(os.environ["RANK"]), os.getppid()
    for number in HELD_SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # the first rank is asked, and asks the others
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD_SIGNALS)
    threading.Thread(target=_die_with, args=(first,), daemon=True).start()
    attempt = AttemptDir(arguments.attempt_dir)
    ending = ending_of(lambda: load_entry(arguments.entry)(str(attempt.run_dir), lambda: False))
    is_well = ending.outcome in (Outcome.FINISHED, Outcome.INTERRUPTED)
    if not is_well:
        attempt.tell_ending(ending, rank)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(not is_well)


def _die_with(first: int) -> None:
    while os.getppid() == first:
        time.sleep(WATCH_INTERVAL_S)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
