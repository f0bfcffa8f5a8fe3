"""Observers on threads of their own: whoever reports events never waits, fails or grows because of them."""

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

__all__ = ["FLUSH_TIMEOUT_S", "BackgroundObserver", "ending_in_time", "in_background"]

FLUSH_TIMEOUT_S = 30.0
"""How long the end of the work waits at most, for all its observers together."""

_logger = logging.getLogger(__name__)


class BackgroundObserver:
    """Shows journal entries to one observer, from a daemon thread.

    An observer that raises, whatever it raises, is told nothing more, and one warning says so.

    Args:
        name: What warnings call it.
        show: Called with every entry, in order.
        finish: Called after the last one.
        max_waiting: So many entries are kept for an observer that lags behind; those beyond are dropped and counted.
            None keeps all.
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
        # Unbounded, so that None, the end, always fits in; `observe` holds the bound.
        self._waiting: queue.SimpleQueue[JournalEntry | None] = queue.SimpleQueue()
        self._max_waiting = max_waiting
        self._num_dropped = 0
        self._has_failed = False
        self._thread = threading.Thread(target=self._work, name=f"alto-{name}", daemon=True)
        self._thread.start()

    def observe(self, entry: JournalEntry) -> None:
        """Take an entry; never blocks."""
        if self._has_failed:
            return
        if self._max_waiting is None or self._waiting.qsize() < self._max_waiting:
            self._waiting.put(entry)
        else:
            self._num_dropped += 1

    def end(self) -> None:
        """Say that no event follows; never blocks."""
        self._waiting.put(None)

    def join(self, timeout_s: float) -> None:
        """Wait until what was taken was shown, at most ``timeout_s``; warn of what was not."""
        self._thread.join(timeout_s)
        if self._has_failed:
            return
        if self._thread.is_alive():
            self._has_failed = True
            self._warn("did not finish in time; what it shows may lack the end. The journal has everything")
        elif self._num_dropped:
            self._warn(f"could not keep up and was not told of {self._num_dropped} events. The journal has them all")

    def _work(self) -> None:
        while (entry := self._waiting.get()) is not None:
            self._guarded(self._show, entry)
        self._guarded(self._finish)

    def _guarded(self, call: Callable[..., None], *entries: JournalEntry) -> None:
        if self._has_failed:
            return
        try:
            call(*entries)
        except BaseException as error:  # an observer that calls sys.exit is no reason to lose the warning
            if self._has_failed:  # meanwhile given up
                return
            self._has_failed = True
            said = " ".join("".join(traceback.format_exception_only(error)).split())
            self._warn(f"failed and is told nothing more, training goes on without it. {said}")

    def _warn(self, what: str) -> None:
        _logger.warning("%s %s", self._name, what)


@contextlib.contextmanager
def in_background(
    observers: Sequence[Observer], *, flush_timeout_s: float = FLUSH_TIMEOUT_S
) -> Iterator[tuple[Observer, ...]]:
    """``observers``, each on a thread of its own; leaving waits for them, but not for ever.

    Args:
        flush_timeout_s: Longest wait at the end, for all of them together.
    """
    workers = [BackgroundObserver(f"observer {_name_of(observer)}", observer) for observer in observers]
    with ending_in_time(workers, flush_timeout_s):
        yield tuple(worker.observe for worker in workers)


@contextlib.contextmanager
def ending_in_time(workers: Sequence[BackgroundObserver], timeout_s: float) -> Iterator[None]:
    """Leaving ends ``workers`` and waits for all of them together, at most ``timeout_s``."""
    try:
        yield
    finally:
        deadline = time.monotonic() + timeout_s
        for worker in workers:
            worker.end()
        for worker in workers:
            worker.join(max(0.0, deadline - time.monotonic()))


def _name_of(observer: Observer) -> str:
    return getattr(observer, "__qualname__", type(observer).__qualname__)
