"""Runs trackers on their own threads, so that they cannot delay or break training, or fill its memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from alto.runs import FLUSH_TIMEOUT_S, BackgroundObserver, Observer, ending_in_time
from alto.trackers.base import Tracker
from alto.trackers.feed import Feed

__all__ = ["MAX_WAITING_EVENTS", "BackgroundTracker", "tracking"]

MAX_WAITING_EVENTS = 20_000
"""Largest number of events kept for a slow tracker; a run of 200 jobs, each evaluated 40 times, writes fewer."""


class BackgroundTracker(BackgroundObserver):
    """Feeds one tracker from a daemon thread; events beyond ``max_waiting`` are dropped and counted.

    Args:
        name: Name of the tracker, for warnings.
        max_waiting: Largest number of events kept for a slow tracker.
    """

    def __init__(self, name: str, tracker: Tracker, run_dir: Path, *, max_waiting: int = MAX_WAITING_EVENTS) -> None:
        feed = Feed(tracker, run_dir)
        super().__init__(f"tracker {name}", feed.apply, finish=feed.finish, max_waiting=max_waiting)


@contextlib.contextmanager
def tracking(
    trackers: Mapping[str, Tracker], run_dir: Path, *, flush_timeout_s: float = FLUSH_TIMEOUT_S
) -> Iterator[tuple[Observer, ...]]:
    """Yield observers for the journal of the run in ``run_dir``; on exit, wait for the trackers up to a timeout.

    Args:
        trackers: Trackers by their name in warnings; each is used for this run only.
        flush_timeout_s: Longest wait on exit for all trackers together, in seconds.
    """
    workers = [BackgroundTracker(name, tracker, run_dir) for name, tracker in trackers.items()]
    with ending_in_time(workers, flush_timeout_s):
        yield tuple(worker.observe for worker in workers)
