"""The ranks of an executor beside its first: processes that the first one starts, watches and ends.

The first is ``alto.cluster.worker``; each other is ``python -m alto.cluster.rank_processes``, in the session of the
first. If one dies, the others wait for it in a collective, so the executor ends within `GRACE_S`; if one hangs, the
heartbeat of the first stops, and the cluster ends the executor.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from alto.cluster.attempt import AttemptDir, Ending, exit_code_of, unwritten_ending
from alto.cluster.base import Outcome
from alto.cluster.entry import ending_of, error_class, load_entry
from alto.cluster.processes import HELD_SIGNALS
from alto.errors import RunWriteError
from alto.runs import writing

__all__ = ["GRACE_S", "RankProcesses"]

GRACE_S = 5.0
"""How long the ranks may take to report the cause of one rank's end: usually they fail with the same error."""

WATCH_INTERVAL_S = 0.2


class RankProcesses:
    """Ranks 1 to ``size - 1``.

    Args:
        attempt: Folder of the attempt, for logs and ends.
        entry: ``module:function`` that each of them calls.
        on_death: Is called, on a thread, once a rank has died before its work was done and `GRACE_S` have gone by.
    """

    def __init__(self, attempt: AttemptDir, entry: str, size: int, on_death: Callable[[Ending], None]) -> None:
        self._attempt = attempt
        self._entry = entry
        self._size = size
        self._on_death = on_death
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        """Start them, and watch them from then on.

        Raises:
            RunWriteError: The log of one cannot be written.
            OSError: The machine cannot start another process.
        """
        for rank in range(1, self._size):
            self._processes[rank] = self._start(rank)
        if self._processes:
            threading.Thread(target=self._watch, daemon=True).start()

    def verdict(self, own: Ending) -> Ending:
        """How the executor ended, where its first rank reports ``own``: the end of another rank, if that is the cause.

        An error that ALTO did not raise may only be that the others have gone; it takes them a moment to be gone.
        """
        if not self._processes or own.outcome is not Outcome.LOST or error_class(own.error) is not None:
            return own
        gives_up_at = time.monotonic() + GRACE_S
        while not any(map(_is_cause, deaths := self._deaths())) and time.monotonic() < gives_up_at:
            time.sleep(WATCH_INTERVAL_S)
        return _best_explained(deaths) if deaths else own

    def _start(self, rank: int) -> subprocess.Popen[bytes]:
        path = self._attempt.rank_log(rank)
        with writing(self._attempt.run_dir, path):
            log = path.open("ab")
        with log:
            return subprocess.Popen(
                [
                    *(sys.executable, "-m", "alto.cluster.rank_processes", str(self._attempt.root)),
                    *("--entry", self._entry),
                    *("--first", str(os.getpid())),
                ],
                env={**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def _watch(self) -> None:
        while not self._deaths():
            time.sleep(WATCH_INTERVAL_S)
        time.sleep(GRACE_S)
        self._on_death(_best_explained(self._deaths()))

    def _deaths(self) -> list[Ending]:
        """How the ranks ended that did not end well, by rank."""
        codes = {rank: process.poll() for rank, process in self._processes.items()}
        return [self._ending(rank, code) for rank, code in codes.items() if code]

    def _ending(self, rank: int, code: int) -> Ending:
        said = self._attempt.ending(rank)
        said = said or unwritten_ending(code, self._attempt, rank)
        if said is not None:
            return said
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        reason = f"rank {rank} {how} and reported no reason; see {self._attempt.rank_log(rank)}"
        return Ending(outcome=Outcome.LOST, reason=reason)


def _is_cause(death: Ending) -> bool:
    """Whether it is a cause and not a consequence: an error of ALTO's, or a death without a reported end."""
    return not death.error or error_class(death.error) is not None


def _best_explained(deaths: list[Ending]) -> Ending:
    """The end that most likely caused the others."""
    return min(deaths, key=lambda death: (not _is_cause(death), not death.error))


def main() -> None:
    """Work as one rank; ends this process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("attempt_dir", type=Path)
    parser.add_argument("--entry", required=True, help="module:function")
    parser.add_argument("--first", type=int, required=True, help="the process of the first rank")
    arguments = parser.parse_args()
    rank = int(os.environ["RANK"])
    for number in HELD_SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # only the first rank is stopped; it stops the others
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD_SIGNALS)
    threading.Thread(target=_die_with, args=(arguments.first,), daemon=True).start()
    attempt = AttemptDir(arguments.attempt_dir)
    ending = ending_of(lambda: load_entry(arguments.entry)(str(attempt.run_dir), lambda: False))
    is_well = ending.outcome in (Outcome.FINISHED, Outcome.INTERRUPTED)
    is_written = is_well
    if not is_well:
        with contextlib.suppress(RunWriteError):
            attempt.write_ending(ending, rank)
            is_written = True
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(exit_code_of(ending, is_written=is_written))


def _die_with(first: int) -> None:
    while os.getppid() == first:
        time.sleep(WATCH_INTERVAL_S)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
