"""Whether a live run ended its jobs as its policy, asked again, would have."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from alto.early_exit.journal import Event, exits_of, loss_of, metric_of, start_values, task_started
from alto.early_exit.policy import policy_from
from alto.early_exit.race import Race
from alto.errors import RunError
from alto.records import ExitDecision, ExitReason
from alto.spec.early_exit import EarlyExit
from alto.spec.metric import gain_of, loss_scale

__all__ = ["Disagreement", "audit", "race_of"]

EXITS_FROM_OUTSIDE = (ExitReason.STOPPED, ExitReason.FAILED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Disagreement:
    """A job whose exit in the journal is not the one its losses lead to; each a reason and step, None for no exit."""

    job: str
    journalled: tuple[ExitReason, int] | None
    derived: tuple[ExitReason, int] | None


def audit(events: Iterable[Event]) -> tuple[Disagreement, ...]:
    """Derive every exit again from the losses of a journal and compare; empty if they agree.

    Raises:
        RunError: As `race_of`.
    """
    events = list(events)
    journalled = exits_of(events)
    race = race_of(events)
    decisions = {job: race.decision_on(job) for job in race.jobs}
    derived = {job: (decision.reason, decision.step) for job, decision in decisions.items() if decision is not None}
    return tuple(
        Disagreement(job=job, journalled=journalled.get(job), derived=derived.get(job))
        for job in race.jobs
        if journalled.get(job) != derived.get(job)
    )


def race_of(events: Iterable[Event]) -> Race:
    """The race as it stands after ``events``: the same code decides again from the same losses.

    Exits of the journal are not believed but derived again; only those from outside (stopped, failed) are taken over.
    What the journal tells of a job after the race has ended it is not looked at.

    Raises:
        RunError: No task was started, or the order of events is none that the race allows: steps missing, a job
            trained past its rung, a rung held before every job was there.
    """
    events = list(events)
    started = task_started(events)
    settings = EarlyExit.of_run(started["early_exit"])
    total_steps = {entry["job"]: entry["total_steps"] for entry in started["jobs"]}
    scales = {entry["job"]: loss_scale(entry.get("config") or {}) for entry in started["jobs"]}
    race = Race(policy_from(settings), ema_alpha=settings.ema_alpha, total_steps=total_steps, loss_scales=scales)
    for event in events:
        try:
            _feed(race, event, metric_of(started))
        except (RunError, KeyError, TypeError, ValueError) as error:
            raise RunError(
                f"Journal, event {event.get('seq')} ({event['event']}): {error}"
                " If the journal is whole, another version of ALTO wrote it."
            ) from error
    return race


def _feed(race: Race, event: Event, metric: str) -> None:
    match event["event"]:
        case "train" if race.is_training(event["job"]):
            race.observe_losses(event["job"], event["first_step"], [loss_of(loss) for loss in event["losses"]])
        case "eval" if race.is_training(event["job"]):
            gain = gain_of(metric, event.get("metrics", {}))
            rows = tuple(map(loss_of, event.get("metric_rows", ())))
            race.observe(event["job"], event["step"], loss_of(event["validation_loss"]), gain, rows)
        case "base_evaluated":
            for job, start in start_values(event, metric).items():
                race.observe_base(job, start)
        case "warmup_ended":
            race.select()
        case "job_exited" if race.is_training(event["job"]):
            reason = ExitReason(event["reason"])
            if reason in EXITS_FROM_OUTSIDE:
                evidence = {key: loss_of(value) for key, value in event["evidence"].items()}
                race.end(ExitDecision(job=event["job"], step=event["step"], reason=reason, evidence=evidence))
        case "job_added":
            race.add(event["job"], event["total_steps"], loss_scale(event.get("config") or {}))
        case "job_reopened":
            race.reopen(event["job"])
