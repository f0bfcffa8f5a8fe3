"""Converts journal entries into calls of a tracker."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from alto.runs import FLUSH_TIMEOUT_S, BackgroundObserver, JournalEntry, Observer, ending_in_time
from alto.runs.events import (
    JobAdded,
    JobCompleted,
    JobEvaluated,
    JobExited,
    TaskCompleted,
    TaskStarted,
    TrainSteps,
    settings_of,
)
from alto.trackers.base import JobOutcome, Point, TrackedRun, Tracker

# Names of these metrics in TRL's trainers.
_TRL_NAMES = {
    "reward_accuracy": "rewards/accuracies",
    "reward_margin": "rewards/margins",
    "chosen_reward": "rewards/chosen",
    "rejected_reward": "rewards/rejected",
}


class Feed:
    """Calls a tracker for the entries of a run; events that no tracker uses are skipped."""

    def __init__(self, tracker: Tracker, run_dir: Path) -> None:
        self._tracker = tracker
        self._run_dir = run_dir
        self._jobs: dict[str, Mapping[str, Any]] = {}
        self._best_job: str | None = None

    def apply(self, entry: JournalEntry) -> None:
        """Call the tracker for one entry."""
        match entry.event:
            case TaskStarted() as event:
                self._start(event)
            case JobAdded(job=job, config=config):
                self._jobs[job] = config
            case TrainSteps() as event:
                self._tracker.log(event.job, _train_points(event, entry.time))
            case JobEvaluated() as event:
                self._tracker.log(event.job, [_eval_point(event, entry.time)])
            case JobExited() | JobCompleted() as event:
                self._tracker.end_job(event.job, _outcome(event, entry.time))
            case TaskCompleted(best_job=best_job):
                self._best_job = best_job

    def finish(self) -> None:
        """Tell the tracker that no event will follow; a run that never started is not reported."""
        if self._jobs:
            self._tracker.finish(self._best_job)

    def _start(self, event: TaskStarted) -> None:
        self._jobs.update({description.job: description.config for description in event.jobs})
        settings = {key: value for key, value in settings_of(event).items() if key != "base"}
        if event.notes:
            settings["notes"] = list(event.notes)
        self._tracker.start(
            TrackedRun(name=self._run_dir.name, run_dir=self._run_dir, settings=_flat(settings), jobs=self._jobs)
        )


def _train_points(event: TrainSteps, time: float) -> list[Point]:
    return [
        Point(step=step, time=time, metrics={"train/loss": loss})
        for step, loss in enumerate(event.losses, start=event.first_step)
    ]


def _eval_point(event: JobEvaluated, time: float) -> Point:
    metrics = {
        "eval/loss": event.validation_loss,
        "eval/train_ema": event.train_ema,
        **{f"eval/{_TRL_NAMES.get(name, name)}": value for name, value in event.metrics.items()},
    }
    return Point(step=event.step, time=time, metrics=metrics)


def _outcome(event: JobExited | JobCompleted, time: float) -> JobOutcome:
    best = event.best_validation_loss
    return JobOutcome(
        reason=str(event.reason) if isinstance(event, JobExited) else "completed",
        step=event.step or 0,
        time=time,
        best_step=event.best_step,
        best_loss=best if best is not None and math.isfinite(best) else None,
    )


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            flat.update(_flat(value, f"{prefix}{key}."))
        else:
            flat[prefix + key] = value
    return flat


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
