"""Reads loss curves, evaluations before the first step, and exits from the entries of a run's journal."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from alto.early_exit.policy import policy_from
from alto.early_exit.selection import Selection
from alto.errors import RunError
from alto.records import ExitDecision, ExitReason, SplitLoss, StartValue, exit_reason
from alto.runs import events
from alto.spec import EarlyExit, loss_scale, score_of


@dataclass(slots=True)
class Curves:
    """The losses, scores and metrics of one job by step, and its evaluation before the first step.

    Attributes:
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

    def _add_rows(self, step: int, event: events.JobEvaluated | events.StartMeasurement) -> None:
        if event.loss_rows:
            self.loss_rows[step] = event.loss_rows
        if event.test_loss is not None:
            self.tests[step] = SplitLoss(loss=event.test_loss, rows=event.test_rows)


def start_of(entries: Sequence[events.JournalEntry]) -> events.TaskStarted:
    """Return the event that names the jobs.

    Raises:
        RunError: The journal has no such event.
    """
    for entry in entries:
        if isinstance(entry.event, events.TaskStarted):
            return entry.event
    raise RunError(
        f"Expected a journal that begins with {events.WIRE_NAMES[events.TaskStarted]}, found {len(entries)} events "
        "without it. Give the whole journal of a run."
    )


def start_values(event: events.BaseEvaluated, metric: str, *, has_order: bool = False) -> dict[str, StartValue]:
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


def curves_of(entries: Sequence[events.JournalEntry]) -> dict[str, Curves]:
    """Return the loss curves of all jobs."""
    started = start_of(entries)
    curves = {description.job: Curves() for description in started.jobs}
    for entry in entries:
        match entry.event:
            case events.JobAdded(job=job):
                curves[job] = Curves()
            case events.BaseEvaluated() as event:
                for job, start in start_values(event, started.metric).items():
                    curves[job].start = start
                for value in event.values:
                    for job in value.jobs:
                        curves[job]._add_rows(0, value)
            case events.TrainSteps(job=job, first_step=first_step, losses=losses):
                curves[job].train.update(enumerate(losses, start=first_step))
            case events.JobEvaluated(job=job, step=step) as event:
                curves[job].validation[step] = event.validation_loss
                curves[job].scores[step] = score_of(started.metric, event.metrics)
                curves[job].score_rows[step] = event.metric_rows
                curves[job].metrics[step] = event.metrics
                curves[job]._add_rows(step, event)
    return curves


def exits_of(entries: Iterable[events.JournalEntry]) -> dict[str, tuple[str, int]]:
    """Return reason and step of every early exit in the journal, by job id, without jobs that were reopened."""
    exits: dict[str, tuple[str, int]] = {}
    for entry in entries:
        match entry.event:
            case events.JobExited(job=job, reason=reason, step=step):
                exits[job] = (exit_reason(reason), step or 0)
            case events.JobReopened(job=job):
                exits.pop(job, None)
    return exits


def loss_of(value: float | str | None) -> float:
    """Convert a loss in a recording: a number, or a string if it is not finite, or null for NaN."""
    return math.nan if value is None else float(value)


EXITS_FROM_OUTSIDE = (ExitReason.STOPPED, ExitReason.FAILED, ExitReason.BUDGET)


@dataclass(frozen=True, slots=True, kw_only=True)
class Disagreement:
    """A job whose exit in the journal differs from the exit derived from its losses.

    Attributes:
        journalled: Reason and step of the exit in the journal; None for no exit.
        derived: Reason and step of the exit derived from the losses; None for no exit.
    """

    job: str
    journalled: tuple[str, int] | None
    derived: tuple[str, int] | None


def audit(entries: Iterable[events.JournalEntry]) -> tuple[Disagreement, ...]:
    """Derive every exit again from the losses of a journal and return the differences; empty if they agree."""
    entries = list(entries)
    journalled = exits_of(entries)
    selection = selection_of(entries)
    decisions = {job: selection.decision_on(job) for job in selection.jobs}
    derived = {job: (decision.reason, decision.step) for job, decision in decisions.items() if decision is not None}
    return tuple(
        Disagreement(job=job, journalled=journalled.get(job), derived=derived.get(job))
        for job in selection.jobs
        if journalled.get(job) != derived.get(job)
    )


def selection_of(entries: Iterable[events.JournalEntry]) -> Selection:
    """Return the selection after ``entries``: the same code decides again from the same losses.

    Exits in the journal are derived again; only exits from outside (stopped, failed, budget) are copied. Entries of a
    job after the selection has ended it are ignored.

    Raises:
        RunError: No task was started, or the order of the entries is impossible: steps are missing, a job trained past
            its rung, or a rung was decided before every job had reached it.
    """
    entries = list(entries)
    started = start_of(entries)
    settings = EarlyExit.of_run(started.early_exit)
    total_steps = {description.job: description.total_steps for description in started.jobs}
    scales = {description.job: loss_scale(description.config) for description in started.jobs}
    selection = Selection(
        policy_from(settings),
        ema_alpha=settings.ema_alpha,
        total_steps=total_steps,
        loss_scales=scales,
        configuration_of={job.job: job.configuration for job in started.jobs if job.configuration is not None},
        row_weights=started.ordered_weights,
    )
    for entry in entries:
        try:
            _feed(selection, entry.event, started)
        except (RunError, KeyError, TypeError, ValueError) as error:
            raise RunError(
                f"Journal, event {entry.seq} ({entry.name}): {error}"
                " If the journal is intact, a different version of ALTO wrote it."
            ) from error
    return selection


def _feed(selection: Selection, event: events.Event, started: events.TaskStarted) -> None:
    metric, has_order = started.metric, bool(started.evaluation_order)
    match event:
        case events.TrainSteps(job=job) if selection.is_training(job):
            selection.observe_losses(job, event.first_step, event.losses, event.metrics)
        case events.JobEvaluated(job=job) if selection.is_training(job):
            score = score_of(metric, event.metrics)
            rows = event.loss_rows if has_order else ()
            selection.observe(job, event.step, event.validation_loss, score, event.metric_rows, rows)
        case events.BaseEvaluated():
            for job, start in start_values(event, metric, has_order=has_order).items():
                selection.observe_base(job, start)
        case events.BestMeasured(job=job):
            selection.observe_measured(job, event.validation_loss, event.loss_rows)
        case events.RungScored(scores=scores):
            selection.observe_scores(scores)
        case events.WarmupEnded():
            selection.select()
        case events.JobExited(job=job) if selection.is_training(job) and event.reason in EXITS_FROM_OUTSIDE:
            evidence = {key: float(value) for key, value in event.evidence.items()}
            reason = exit_reason(event.reason)
            selection.end(ExitDecision(job=job, step=event.step or 0, reason=reason, evidence=evidence))
        case events.JobCompleted(job=job) if selection.is_training(job) and not selection.history(job):
            selection.finish(job)
        case events.JobAdded(job=job, origin=str(origin), forked_at=steps) if steps:
            selection.fork(job, origin)
        case events.JobAdded(job=job, origin=origin):
            selection.add(job, event.total_steps, loss_scale(event.config), catches_up=origin is None)
        case events.JobReopened(job=job):
            selection.reopen(job)
