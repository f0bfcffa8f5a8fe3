"""The ranks of an executor after the first: processes that the first rank starts, watches and ends.

The first rank is ``alto.cluster.worker``. It forks the others, in its own session, before it has touched a GPU. A rank
that dies leaves the others waiting for it in the middle of a micro-batch, so the executor ends within `GRACE_S` of the
death. A rank that hangs stops the heartbeat of the first rank, which the cluster sees.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import NoReturn

from alto.base import writing
from alto.cluster.attempt import AttemptDir, ending_of_exit, exit_code_of
from alto.cluster.base import Ending, Outcome, TaskTicket
from alto.cluster.host import error_class, work_alone
from alto.cluster.processes import HELD_SIGNALS

GRACE_S = 5.0
"""Time for other ranks to report the cause of one rank's end; usually they fail with the same error."""


RANK_WATCH_INTERVAL_S = 0.2


_FORK = multiprocessing.get_context("fork")


class RankProcesses:
    """Ranks 1 to ``size - 1``.

    Args:
        on_death: Called on a thread `GRACE_S` after a rank has died before its work was done.
    """

    def __init__(self, attempt: AttemptDir, ticket: TaskTicket, size: int, on_death: Callable[[Ending], None]) -> None:
        self._attempt = attempt
        self._ticket = ticket
        self._size = size
        self._on_death = on_death
        self._processes: dict[int, ForkProcess] = {}

    def start(self) -> None:
        """Start the ranks, and watch them from then on.

        Raises:
            RunWriteError: A rank's log cannot be written.
            OSError: The machine cannot start another process.
        """
        for rank in range(1, self._size):
            self._processes[rank] = self._start(rank)
        if self._processes:
            threading.Thread(target=self._watch, daemon=True).start()

    def verdict(self, own: Ending) -> Ending:
        """Return how the executor ended if its first rank reports ``own``: the end of another rank if it is the cause.

        An error that ALTO did not raise may be only a consequence of another rank's death, which can take a moment to
        show.
        """
        if not self._processes or own.outcome is not Outcome.LOST or error_class(own.error) is not None:
            return own
        gives_up_at = time.monotonic() + GRACE_S
        while not any(map(_is_cause, deaths := self._deaths())) and time.monotonic() < gives_up_at:
            time.sleep(RANK_WATCH_INTERVAL_S)
        return _best_explained(deaths) if deaths else own

    def _start(self, rank: int) -> ForkProcess:
        path = self._attempt.rank_log(rank)
        with writing(self._attempt.run_dir, path):
            log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            process = _FORK.Process(target=_work_as, args=(rank, self._attempt, self._ticket, os.getpid(), log))
            process.start()
        finally:
            os.close(log)
        return process

    def _watch(self) -> None:
        while not self._deaths():
            time.sleep(RANK_WATCH_INTERVAL_S)
        time.sleep(GRACE_S)
        self._on_death(_best_explained(self._deaths()))

    def _deaths(self) -> list[Ending]:
        """Return the ends of the ranks that failed, in order of rank."""
        codes = {rank: process.exitcode for rank, process in self._processes.items()}
        attempt = self._attempt
        return [attempt.ending(rank) or ending_of_exit(code, attempt, rank) for rank, code in codes.items() if code]


def _is_cause(death: Ending) -> bool:
    """Return whether a death is a cause, not a consequence: an error of ALTO, or a death without an end report."""
    return not death.error or error_class(death.error) is not None


def _best_explained(deaths: list[Ending]) -> Ending:
    """Return the end that most likely caused the others."""
    return min(deaths, key=lambda death: (not _is_cause(death), not death.error))


def _work_as(rank: int, attempt: AttemptDir, ticket: TaskTicket, first: int, log: int) -> NoReturn:
    """Work as one rank, then end this process.

    Args:
        first: Process id of the first rank.
        log: File descriptor of the rank's log.
    """
    Path("/proc/self/comm").write_text(f"alto-rank-{rank}")
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    for number in HELD_SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # only the first rank gets stop signals; it stops the others
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD_SIGNALS)
    threading.Thread(target=_exit_with_parent, args=(first,), daemon=True).start()
    ending = work_alone(ticket, lambda: False)
    is_well = ending.outcome in (Outcome.FINISHED, Outcome.INTERRUPTED)
    is_written = is_well or attempt.write_ending(ending, rank)
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(exit_code_of(ending, is_written=is_written))


def _exit_with_parent(first: int) -> None:
    while os.getppid() == first:
        time.sleep(RANK_WATCH_INTERVAL_S)
    os.kill(os.getpid(), signal.SIGKILL)
