"""From journal events to what a tracker is told."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from alto.runs import Event
from alto.trackers.base import JobOutcome, Point, TrackedRun, Tracker

__all__ = ["Feed"]

_NOT_SETTINGS = ("seq", "time", "event", "jobs", "base", "replayed")

# As TRL's trainers name them.
_TRL_NAMES = {
    "reward_accuracy": "rewards/accuracies",
    "reward_margin": "rewards/margins",
    "chosen_reward": "rewards/chosen",
    "rejected_reward": "rewards/rejected",
}


class Feed:
    """Tells a tracker what the events of a run say; events that concern no tracker are passed over."""

    def __init__(self, tracker: Tracker, run_dir: Path) -> None:
        self._tracker = tracker
        self._run_dir = run_dir
        self._jobs: dict[str, Mapping[str, Any]] = {}
        self._best_job: str | None = None

    def apply(self, event: Event) -> None:
        """Tell the tracker of one event."""
        match event["event"]:
            case "task_started":
                self._start(event)
            case "job_added":
                self._jobs[event["job"]] = event["config"]
            case "train":
                self._tracker.log(event["job"], _train_points(event))
            case "eval":
                self._tracker.log(event["job"], [_eval_point(event)])
            case "job_exited" | "job_completed":
                self._tracker.end_job(event["job"], _outcome(event))
            case "task_completed":
                self._best_job = event["best_job"]

    def finish(self) -> None:
        """Tell the tracker that no event will follow; nothing is told of a run that never started."""
        if self._jobs:
            self._tracker.finish(self._best_job)

    def _start(self, event: Event) -> None:
        self._jobs.update({entry["job"]: entry["config"] for entry in event["jobs"]})
        settings = {key: value for key, value in event.items() if key not in _NOT_SETTINGS}
        self._tracker.start(
            TrackedRun(name=self._run_dir.name, run_dir=self._run_dir, settings=_flat(settings), jobs=self._jobs)
        )


def _train_points(event: Event) -> list[Point]:
    return [
        Point(step=step, time=event["time"], metrics={"train/loss": float(loss)})
        for step, loss in enumerate(event["losses"], start=event["first_step"])
    ]


def _eval_point(event: Event) -> Point:
    # Read back from a journal, numbers that are not finite are text; float takes both.
    metrics = {
        "eval/loss": float(event["validation_loss"]),
        "eval/train_ema": float(event["train_ema"]),
        **{f"eval/{_TRL_NAMES.get(name, name)}": float(value) for name, value in event.get("metrics", {}).items()},
    }
    return Point(step=event["step"], time=event["time"], metrics=metrics)


def _outcome(event: Event) -> JobOutcome:
    best = event["best_validation_loss"]
    return JobOutcome(
        reason=str(event.get("reason", "completed")),
        step=event["step"],
        time=event["time"],
        best_step=event["best_step"],
        best_loss=float(best) if best is not None and math.isfinite(float(best)) else None,
    )


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            flat.update(_flat(value, f"{prefix}{key}."))
        else:
            flat[prefix + key] = value
    return flat
