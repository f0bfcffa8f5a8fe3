"""Reads loss curves, evaluations before the first step, and exits from the entries of a run's journal."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from alto.errors import RunError
from alto.records import SplitLoss, StartValue, exit_reason
from alto.runs.events import (
    WIRE_NAMES,
    BaseEvaluated,
    JobAdded,
    JobEvaluated,
    JobExited,
    JobReopened,
    JournalEntry,
    StartMeasurement,
    TaskStarted,
    TrainSteps,
)
from alto.spec.metric import score_of

__all__ = ["Curves", "curves_of", "exits_of", "loss_of", "start_of", "start_values"]


@dataclass(slots=True)
class Curves:
    """The losses, scores and metrics of one job by step, and its evaluation before the first step.

    Attributes:
        start: Evaluation before the first step; None if unknown.
        scores: Value of the task's metric at every evaluation.
        score_rows: Value of the task's metric on every validation row.
        metrics: Metrics of the method beside the loss, by name.
        loss_rows: Loss of every validation row; step 0 is the evaluation before the first step.
        tests: Loss on the test rows; step 0 is the evaluation before the first step.
    """

    start: StartValue | None = None
    train: dict[int, float] = field(default_factory=dict)
    validation: dict[int, float] = field(default_factory=dict)
    scores: dict[int, float] = field(default_factory=dict)
    score_rows: dict[int, tuple[float, ...]] = field(default_factory=dict)
    metrics: dict[int, Mapping[str, float]] = field(default_factory=dict)
    loss_rows: dict[int, tuple[float, ...]] = field(default_factory=dict)
    tests: dict[int, SplitLoss] = field(default_factory=dict)

    def _add_rows(self, step: int, event: JobEvaluated | StartMeasurement) -> None:
        if event.loss_rows:
            self.loss_rows[step] = event.loss_rows
        if event.test_loss is not None:
            self.tests[step] = SplitLoss(loss=event.test_loss, rows=event.test_rows)


def start_of(entries: Sequence[JournalEntry]) -> TaskStarted:
    """Return the event that names the jobs.

    Raises:
        RunError: There is none.
    """
    for entry in entries:
        if isinstance(entry.event, TaskStarted):
            return entry.event
    raise RunError(
        f"Expected a journal that begins with {WIRE_NAMES[TaskStarted]}, found {len(entries)} events without it."
        " Give the whole journal of a run."
    )


def start_values(event: BaseEvaluated, metric: str, *, has_order: bool = False) -> dict[str, StartValue]:
    """Return the evaluation before the first step of every job; with losses of rows if the task has an evaluation
    order."""
    starts = {}
    for value in event.values:
        score = score_of(metric, value.metrics)
        start = StartValue(
            validation_loss=value.validation_loss,
            score=score,
            score_rows=value.metric_rows,
            loss_rows=value.loss_rows if has_order else (),
        )
        starts.update(dict.fromkeys(value.jobs, start))
    return starts


def curves_of(entries: Sequence[JournalEntry]) -> dict[str, Curves]:
    """Return the loss curves of all jobs."""
    started = start_of(entries)
    curves = {description.job: Curves() for description in started.jobs}
    for entry in entries:
        match entry.event:
            case JobAdded(job=job):
                curves[job] = Curves()
            case BaseEvaluated() as event:
                for job, start in start_values(event, started.metric).items():
                    curves[job].start = start
                for value in event.values:
                    for job in value.jobs:
                        curves[job]._add_rows(0, value)
            case TrainSteps(job=job, first_step=first_step, losses=losses):
                curves[job].train.update(enumerate(losses, start=first_step))
            case JobEvaluated(job=job, step=step) as event:
                curves[job].validation[step] = event.validation_loss
                curves[job].scores[step] = score_of(started.metric, event.metrics)
                curves[job].score_rows[step] = event.metric_rows
                curves[job].metrics[step] = event.metrics
                curves[job]._add_rows(step, event)
    return curves


def exits_of(entries: Iterable[JournalEntry]) -> dict[str, tuple[str, int]]:
    """Return reason and step of every early exit in the journal, by job id, without jobs that were reopened."""
    exits: dict[str, tuple[str, int]] = {}
    for entry in entries:
        match entry.event:
            case JobExited(job=job, reason=reason, step=step):
                exits[job] = (exit_reason(reason), step or 0)
            case JobReopened(job=job):
                exits.pop(job, None)
    return exits


def loss_of(value: float | str | None) -> float:
    """Convert a loss in a recording: a number, or a string if it is not finite, or null for NaN."""
    return math.nan if value is None else float(value)
