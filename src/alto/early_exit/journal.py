"""Reading the journal of a run: what this room needs of its events."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from alto.errors import RunError
from alto.records import StartValue, exit_reason
from alto.spec.metric import LOSS, score_of

__all__ = ["Curves", "Event", "curves_of", "exits_of", "loss_of", "metric_of", "start_values", "task_started"]

Event = Mapping[str, Any]


@dataclass(slots=True)
class Curves:
    """The losses of one job by step, the scores of its evaluations by the task's metric, and those of the base."""

    start: StartValue | None = None
    train: dict[int, float] = field(default_factory=dict)
    validation: dict[int, float] = field(default_factory=dict)
    scores: dict[int, float] = field(default_factory=dict)
    score_rows: dict[int, tuple[float, ...]] = field(default_factory=dict)


def task_started(events: Sequence[Event]) -> Event:
    """The event that names the jobs.

    Raises:
        RunError: There is none.
    """
    for event in events:
        if event["event"] == "task_started":
            return event
    raise RunError(
        f"Expected a journal that begins with task_started, found {len(events)} events without it."
        " Give the whole journal of a run."
    )


def metric_of(started: Event) -> str:
    """What the task of a ``task_started`` event chooses by; journals that do not say knew the loss alone."""
    return str(started.get("metric", LOSS))


def start_values(event: Event, metric: str) -> dict[str, StartValue]:
    """What a ``base_evaluated`` event says of every job."""
    starts = {}
    for value in event["values"]:
        score = score_of(metric, value.get("metrics", {}))
        rows = tuple(map(loss_of, value.get("metric_rows", ())))
        start = StartValue(validation_loss=loss_of(value["validation_loss"]), score=score, score_rows=rows)
        starts.update(dict.fromkeys(value["jobs"], start))
    return starts


def curves_of(events: Sequence[Event]) -> dict[str, Curves]:
    """The loss curves of all jobs."""
    started = task_started(events)
    metric = metric_of(started)
    curves = {entry["job"]: Curves() for entry in started["jobs"]}
    for event in events:
        if event["event"] == "job_added":
            curves[event["job"]] = Curves()
        elif event["event"] == "base_evaluated":
            for job, start in start_values(event, metric).items():
                curves[job].start = start
        elif event["event"] == "train":
            losses = map(loss_of, event["losses"])
            curves[event["job"]].train.update(enumerate(losses, start=event["first_step"]))
        elif event["event"] == "eval":
            curves[event["job"]].validation[event["step"]] = loss_of(event["validation_loss"])
            curves[event["job"]].scores[event["step"]] = score_of(metric, event.get("metrics", {}))
            curves[event["job"]].score_rows[event["step"]] = tuple(map(loss_of, event.get("metric_rows", ())))
    return curves


def exits_of(events: Iterable[Event]) -> dict[str, tuple[str, int]]:
    """Reason and step of every job that the journal says ended early and was not reopened, by job id."""
    exits: dict[str, tuple[str, int]] = {}
    for event in events:
        if event["event"] == "job_exited":
            exits[event["job"]] = (exit_reason(event["reason"]), event["step"])
        elif event["event"] == "job_reopened":
            exits.pop(event["job"], None)
    return exits


def loss_of(value: float | str | None) -> float:
    """A loss as journals and recordings write it: a number; where it is not finite a string, or null for NaN."""
    return math.nan if value is None else float(value)
