"""Observers on their own threads, so that they cannot delay, break or fill the memory of the reporting thread."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence

from alto.runs.events import JournalEntry
from alto.runs.journal import Observer

FLUSH_TIMEOUT_S = 30.0
"""Longest wait in seconds at the end of the work, for all observers together."""

MAX_WAITING = 50_000
"""Entries kept for a user's observer that lags behind or hangs, about 50 MB."""

_logger = logging.getLogger(__name__)


class BackgroundObserver:
    """Shows journal entries to one observer, from a daemon thread.

    An observer that raises any exception is not called again, and one warning reports it.

    Args:
        max_waiting: Largest number of entries kept for an observer that lags behind; further entries are dropped and
            counted. None keeps all.
    """

    def __init__(
        self,
        name: str,
        show: Observer,
        *,
        finish: Callable[[], None] = lambda: None,
        max_waiting: int | None = None,
    ) -> None:
        self._name = name
        self._show = show
        self._finish = finish
        # The queue is unbounded so that the end marker None always fits; `observe` enforces the limit.
        self._waiting: queue.SimpleQueue[JournalEntry | None] = queue.SimpleQueue()
        self._max_waiting = max_waiting
        self._num_dropped = 0
        self._has_failed = False
        self._thread = threading.Thread(target=self._work, name=f"alto-{name}", daemon=True)
        self._thread.start()

    def observe(self, entry: JournalEntry) -> None:
        """Queue an entry for the observer; never blocks."""
        if self._has_failed:
            return
        if self._max_waiting is None or self._waiting.qsize() < self._max_waiting:
            self._waiting.put(entry)
        else:
            self._num_dropped += 1

    def end(self) -> None:
        """Signal that no event follows; never blocks."""
        self._waiting.put(None)

    def join(self, timeout_s: float) -> None:
        """Wait at most ``timeout_s`` until all entries were shown; warn if some were not."""
        self._thread.join(timeout_s)
        if self._has_failed:
            return
        if self._thread.is_alive():
            self._has_failed = True
            self._warn("did not finish in time; its last events may be missing there. The journal has everything")
        elif self._num_dropped:
            self._warn(f"could not keep up and missed {self._num_dropped} events. The journal has them all")

    def _work(self) -> None:
        while (entry := self._waiting.get()) is not None:
            self._guarded(self._show, entry)
        self._guarded(self._finish)

    def _guarded(self, call: Callable[..., None], *entries: JournalEntry) -> None:
        if self._has_failed:
            return
        try:
            call(*entries)
        except BaseException as error:  # the warning is given even if the observer calls sys.exit
            if self._has_failed:  # `join` has given up meanwhile, and has warned
                return
            self._has_failed = True
            message = " ".join("".join(traceback.format_exception_only(error)).split())
            self._warn(f"failed and gets no more events; training continues without it. {message}")

    def _warn(self, what: str) -> None:
        _logger.warning("%s %s", self._name, what)


@contextlib.contextmanager
def in_background(observers: Sequence[Observer]) -> Iterator[tuple[Observer, ...]]:
    """Yield ``observers`` that each run on their own thread; on exit wait for them, up to `FLUSH_TIMEOUT_S`."""
    workers = [
        BackgroundObserver(
            f"observer {getattr(observer, '__qualname__', type(observer).__qualname__)}",
            observer,
            max_waiting=MAX_WAITING,
        )
        for observer in observers
    ]
    with ending_in_time(workers, FLUSH_TIMEOUT_S):
        yield tuple(worker.observe for worker in workers)


@contextlib.contextmanager
def ending_in_time(workers: Sequence[BackgroundObserver], timeout_s: float) -> Iterator[None]:
    """End ``workers`` on exit, and wait at most ``timeout_s`` for all of them together."""
    try:
        yield
    finally:
        deadline = time.monotonic() + timeout_s
        for worker in workers:
            worker.end()
        for worker in workers:
            worker.join(max(0.0, deadline - time.monotonic()))
