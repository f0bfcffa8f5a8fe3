"""The interface of every tracker, in terms of a run and not of any tool."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

__all__ = ["JobOutcome", "Point", "TrackedRun", "Tracker", "plain_value"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """The measurements of a job after one of its steps.

    Attributes:
        step: Optimizer steps done, from 1.
        time: Unix seconds.
        metrics: ``train/loss``, ``eval/loss`` and ``eval/train_ema``, and what the method measures beside them, under
            TRL's name where it has one (``eval/rewards/accuracies``); may be NaN or infinite.
    """

    step: int
    time: float
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOutcome:
    """How a job ended.

    Attributes:
        reason: ``completed``, or why it exited early.
        step: Steps it did.
        time: Unix seconds.
        best_step: Step of its best evaluation, 0 if it never had one with a finite loss.
        best_loss: The validation loss there, None if there is none.
    """

    reason: str
    step: int
    time: float
    best_step: int
    best_loss: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """The description of a run at its start.

    Attributes:
        name: Name of the run's folder.
        run_dir: The folder.
        settings: Settings of the whole task (model, dataset, early exit, ...); nested keys are joined by dots.
        jobs: Configuration by job; a job that is added later appears here before anything else is reported of it.
    """

    name: str
    run_dir: Path
    settings: Mapping[str, Any]
    jobs: Mapping[str, Mapping[str, Any]]

    @property
    def fixed(self) -> dict[str, Any]:
        """The part of the configuration that all jobs share."""
        first, *others = self.jobs.values()
        return {key: value for key, value in first.items() if all(job.get(key) == value for job in others)}

    def varying(self, job: str) -> dict[str, Any]:
        """The settings of a job that differ between jobs."""
        fixed = self.fixed
        return {key: value for key, value in self.jobs[job].items() if key not in fixed}


class Tracker(Protocol):
    """One tool. Called by one thread, in the order of the run; after an exception it is not called again.

    The tool is imported by :meth:`start`. Where a run is resumed, everything since its beginning is reported again: a
    tracker starts a new record, or continues the old one and skips what it holds already.
    """

    def start(self, run: TrackedRun) -> None:
        """The task starts."""

    def log(self, job: str, points: Sequence[Point]) -> None:
        """A job has advanced; ``points`` are in the order of their steps."""

    def end_job(self, job: str, outcome: JobOutcome) -> None:
        """A job has ended; it may be reopened, and then ends again."""

    def finish(self, best_job: str | None) -> None:
        """The run has ended. ``best_job`` is None where the task was interrupted or has no result."""


def plain_value(value: Any) -> str | bool | int | float:
    """A setting in a form that every tool accepts: numbers and booleans unchanged, all else as text."""
    if isinstance(value, str | bool | int | float):
        return value
    return json.dumps(value, sort_keys=True)
