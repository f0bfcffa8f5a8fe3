"""Whether a live run ended its jobs as its policy, asked again, would have."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from alto.early_exit.journal import Event, exits_of, loss_of, metric_of, start_values, task_started
from alto.early_exit.policy import policy_from
from alto.early_exit.selection import Selection
from alto.errors import RunError
from alto.records import ExitDecision, ExitReason, exit_reason
from alto.spec.early_exit import EarlyExit
from alto.spec.metric import loss_scale, score_of

__all__ = ["Disagreement", "audit", "selection_of"]

EXITS_FROM_OUTSIDE = (ExitReason.STOPPED, ExitReason.FAILED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Disagreement:
    """A job whose exit in the journal is not the one its losses lead to; each a reason and step, None for no exit."""

    job: str
    journalled: tuple[str, int] | None
    derived: tuple[str, int] | None


def audit(events: Iterable[Event]) -> tuple[Disagreement, ...]:
    """Derive every exit again from the losses of a journal and compare; empty if they agree.

    Raises:
        RunError: As `selection_of`.
    """
    events = list(events)
    journalled = exits_of(events)
    selection = selection_of(events)
    decisions = {job: selection.decision_on(job) for job in selection.jobs}
    derived = {job: (decision.reason, decision.step) for job, decision in decisions.items() if decision is not None}
    return tuple(
        Disagreement(job=job, journalled=journalled.get(job), derived=derived.get(job))
        for job in selection.jobs
        if journalled.get(job) != derived.get(job)
    )


def selection_of(events: Iterable[Event]) -> Selection:
    """The selection as it stands after ``events``: the same code decides again from the same losses.

    Exits of the journal are not believed but derived again; only those from outside (stopped, failed) are taken over.
    What the journal tells of a job after the selection has ended it is not looked at.

    Raises:
        RunError: No task was started, or the order of events is none that the selection allows: steps missing, a job
            trained past its rung, a rung held before every job was there.
    """
    events = list(events)
    started = task_started(events)
    settings = EarlyExit.of_run(started["early_exit"])
    total_steps = {entry["job"]: entry["total_steps"] for entry in started["jobs"]}
    scales = {entry["job"]: loss_scale(entry.get("config") or {}) for entry in started["jobs"]}
    selection = Selection(
        policy_from(settings), ema_alpha=settings.ema_alpha, total_steps=total_steps, loss_scales=scales
    )
    for event in events:
        try:
            _feed(selection, event, metric_of(started))
        except (RunError, KeyError, TypeError, ValueError) as error:
            raise RunError(
                f"Journal, event {event.get('seq')} ({event['event']}): {error}"
                " If the journal is whole, another version of ALTO wrote it."
            ) from error
    return selection


def _feed(selection: Selection, event: Event, metric: str) -> None:
    match event["event"]:
        case "train" if selection.is_training(event["job"]):
            selection.observe_losses(event["job"], event["first_step"], [loss_of(loss) for loss in event["losses"]])
        case "eval" if selection.is_training(event["job"]):
            score = score_of(metric, event.get("metrics", {}))
            rows = tuple(map(loss_of, event.get("metric_rows", ())))
            selection.observe(event["job"], event["step"], loss_of(event["validation_loss"]), score, rows)
        case "base_evaluated":
            for job, start in start_values(event, metric).items():
                selection.observe_base(job, start)
        case "warmup_ended":
            selection.select()
        case "job_exited" if selection.is_training(event["job"]):
            reason = exit_reason(event["reason"])
            if reason in EXITS_FROM_OUTSIDE:
                evidence = {key: loss_of(value) for key, value in event["evidence"].items()}
                selection.end(ExitDecision(job=event["job"], step=event["step"], reason=reason, evidence=evidence))
        case "job_added":
            selection.add(event["job"], event["total_steps"], loss_scale(event.get("config") or {}))
        case "job_reopened":
            selection.reopen(event["job"])
