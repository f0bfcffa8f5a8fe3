"""Trackers on threads of their own: training hands events over and never waits, fails or grows because of them."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from alto.runs import JournalEntry, Observer
from alto.runs.events import as_entry
from alto.trackers.base import Tracker
from alto.trackers.feed import Feed

__all__ = ["FLUSH_TIMEOUT_S", "MAX_WAITING_EVENTS", "BackgroundTracker", "tracking"]

FLUSH_TIMEOUT_S = 30.0
"""How long the end of a task waits at most, for all its trackers together."""

MAX_WAITING_EVENTS = 20_000
"""Events kept for a tracker that lags behind; a run of 200 jobs, each evaluated 40 times, writes fewer."""

_logger = logging.getLogger(__name__)


class BackgroundTracker:
    """Feeds one tracker from a daemon thread.

    A tracker that raises, whatever it raises, is not called again, and one warning says so. Events beyond
    ``max_waiting`` are dropped and counted.
    """

    def __init__(self, name: str, tracker: Tracker, run_dir: Path, *, max_waiting: int = MAX_WAITING_EVENTS) -> None:
        self._name = name
        self._feed = Feed(tracker, run_dir)
        # Unbounded, so that None, the end, always fits in; `observe` holds the bound.
        self._waiting: queue.SimpleQueue[JournalEntry | None] = queue.SimpleQueue()
        self._max_waiting = max_waiting
        self._num_dropped = 0
        self._has_failed = False
        self._thread = threading.Thread(target=self._work, name=f"alto-tracker-{name}", daemon=True)
        self._thread.start()

    def observe(self, entry: JournalEntry) -> None:
        """Take an entry; never blocks."""
        if self._waiting.qsize() < self._max_waiting:
            self._waiting.put(as_entry(entry))
        else:
            self._num_dropped += 1

    def end(self) -> None:
        """Say that no event follows; never blocks."""
        self._waiting.put(None)

    def join(self, timeout_s: float) -> None:
        """Wait until all that was taken is passed on, at most ``timeout_s``; warn of what was not."""
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
            self._guarded(self._feed.apply, entry)
        self._guarded(self._feed.finish)

    def _guarded(self, call: Callable[..., None], *entries: JournalEntry) -> None:
        if self._has_failed:
            return
        try:
            call(*entries)
        except BaseException as error:  # a tool that calls sys.exit is no reason to lose the warning
            if self._has_failed:  # meanwhile given up
                return
            self._has_failed = True
            said = " ".join("".join(traceback.format_exception_only(error)).split())
            self._warn(f"failed and is told nothing more, training goes on without it. {said}")

    def _warn(self, what: str) -> None:
        _logger.warning("tracker %s %s", self._name, what)


@contextlib.contextmanager
def tracking(
    trackers: Mapping[str, Tracker], run_dir: Path, *, flush_timeout_s: float = FLUSH_TIMEOUT_S
) -> Iterator[tuple[Observer, ...]]:
    """Observers for the journal of the run in ``run_dir``; leaving waits for the trackers, but not for ever.

    Args:
        trackers: By the name that warnings use; each is used for this run alone.
        flush_timeout_s: Longest wait at the end, for all of them together.
    """
    workers = [BackgroundTracker(name, tracker, run_dir) for name, tracker in trackers.items()]
    try:
        yield tuple(worker.observe for worker in workers)
    finally:
        deadline = time.monotonic() + flush_timeout_s
        for worker in workers:
            worker.end()
        for worker in workers:
            worker.join(max(0.0, deadline - time.monotonic()))
