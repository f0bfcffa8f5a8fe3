"""Checks that a live run ended its jobs as its policy decides when it is applied to the journal again."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from alto.early_exit.journal import exits_of, start_of, start_values
from alto.early_exit.policy import policy_from
from alto.early_exit.selection import Selection
from alto.errors import RunError
from alto.records import ExitDecision, ExitReason, exit_reason
from alto.runs.events import (
    BaseEvaluated,
    BestMeasured,
    Event,
    JobAdded,
    JobCompleted,
    JobEvaluated,
    JobExited,
    JobReopened,
    JournalEntry,
    RungScored,
    TaskStarted,
    TrainSteps,
    WarmupEnded,
)
from alto.spec.early_exit import EarlyExit
from alto.spec.metric import loss_scale, score_of

__all__ = ["Disagreement", "audit", "selection_of"]

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


def audit(entries: Iterable[JournalEntry]) -> tuple[Disagreement, ...]:
    """Derive every exit again from the losses of a journal and return the differences; empty if they agree.

    Raises:
        RunError: See `selection_of`.
    """
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


def selection_of(entries: Iterable[JournalEntry]) -> Selection:
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


def _feed(selection: Selection, event: Event, started: TaskStarted) -> None:
    metric, has_order = started.metric, bool(started.evaluation_order)
    match event:
        case TrainSteps(job=job) if selection.is_training(job):
            selection.observe_losses(job, event.first_step, event.losses)
        case JobEvaluated(job=job) if selection.is_training(job):
            score = score_of(metric, event.metrics)
            rows = event.loss_rows if has_order else ()
            selection.observe(job, event.step, event.validation_loss, score, event.metric_rows, rows)
        case BaseEvaluated():
            for job, start in start_values(event, metric, has_order=has_order).items():
                selection.observe_base(job, start)
        case BestMeasured(job=job):
            selection.observe_measured(job, event.validation_loss, event.loss_rows)
        case RungScored(scores=scores):
            selection.observe_scores(scores)
        case WarmupEnded():
            selection.select()
        case JobExited(job=job) if selection.is_training(job) and event.reason in EXITS_FROM_OUTSIDE:
            evidence = {key: float(value) for key, value in event.evidence.items()}
            reason = exit_reason(event.reason)
            selection.end(ExitDecision(job=job, step=event.step or 0, reason=reason, evidence=evidence))
        case JobCompleted(job=job) if selection.is_training(job) and not selection.history(job):
            selection.finish(job)
        case JobAdded(job=job, origin=str(origin), forked_at=steps) if steps:
            selection.fork(job, origin)
        case JobAdded(job=job, origin=origin):
            selection.add(job, event.total_steps, loss_scale(event.config), catches_up=origin is None)
        case JobReopened(job=job):
            selection.reopen(job)
