"""Converts between the lines of a journal and typed events.

Writing is strict: only events with values of strict JSON are accepted. Reading is tolerant: an unknown event is kept
whole, an unknown field is kept beside the event, and both are written back unchanged. A field that version 0.1 did not
write has a default, which the docstring of its class states.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from alto.errors import RunError
from alto.runs.events import job_events as job
from alto.runs.events import queue_events as queue
from alto.runs.events import run_events as run
from alto.runs.events.facts import QueueEvent, RunEvent
from alto.runs.events.run_events import TaskStarted
from alto.runs.events.values import Path, WrongValueError, from_wire, pointer, to_wire

WIRE_NAMES: Mapping[type, str] = {
    run.TaskStarted: "task_started",
    run.TaskResumed: "task_resumed",
    run.ProfileMeasured: "profile",
    run.KernelsCompiled: "kernels_compiled",
    run.BaseEvaluated: "base_evaluated",
    job.JobAdmitted: "job_admitted",
    job.JobResumed: "job_resumed",
    job.TrainSteps: "train",
    job.JobEvaluated: "eval",
    job.BestMeasured: "best_measured",
    job.MeasurementFailed: "measurement_failed",
    job.JobParked: "job_parked",
    run.RungScored: "rung_scored",
    run.WarmupEnded: "warmup_ended",
    job.JobExited: "job_exited",
    job.JobCompleted: "job_completed",
    job.JobAdded: "job_added",
    job.JobReopened: "job_reopened",
    run.CommandRefused: "command_refused",
    run.OutOfMemory: "oom",
    run.GpusOffered: "gpus_offered",
    run.CheckpointSaved: "checkpoint",
    run.ShareReceived: "share_received",
    run.TaskInterrupted: "task_interrupted",
    run.FinalistsJudged: "finalists_judged",
    run.SamplesGenerated: "samples_generated",
    run.AdapterChecked: "adapter_checked",
    run.TaskCompleted: "task_completed",
    queue.QueueStarted: "queue_started",
    queue.QueueResumed: "queue_resumed",
    queue.TaskSubmitted: "task_submitted",
    queue.TaskCancelled: "task_cancelled",
    queue.SchedulePlanned: "planned",
    queue.AttemptStarted: "executor_started",
    queue.AttemptEnded: "executor_ended",
    queue.TaskGivenUp: "task_given_up",
    queue.GpuLost: "gpu_lost",
    queue.GpuAdded: "gpu_added",
    queue.QueueInterrupted: "queue_interrupted",
    queue.QueueCompleted: "queue_completed",
    queue.MeasuringBegun: "measuring",
    queue.TaskMeasured: "measured",
}
"""Name in journals by class."""

RELAYED = "relayed"
"""Name of the event that holds an event of another journal; only observers see it."""

CLASSES: Mapping[str, type] = {name: event for event, name in WIRE_NAMES.items()}
"""Class by name in journals."""


NO_SEQ = -1
"""Sequence number of an event that is not in a journal."""

_ENVELOPE = ("seq", "time", "event", "replayed")


@dataclass(frozen=True, slots=True, kw_only=True)
class UnknownEvent:
    """An unknown event, written by a later version.

    Attributes:
        name: Its name in the journal.
        fields: All its fields, as JSON values.
    """

    name: str
    fields: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRelayed:
    """An event of a task's run, relayed by the queue. Only observers receive it; it is not in the queue's journal.

    Attributes:
        task: Name of the task in the queue.
        entry: The line of the run's journal.
    """

    task: str
    entry: JournalEntry


Event: TypeAlias = RunEvent | QueueEvent | TaskRelayed | UnknownEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalEntry:
    """One line of a journal.

    Attributes:
        seq: Number of the line, from 0; ``NO_SEQ`` if the event is in no journal.
        time: When it was written, in unix seconds.
        event: The event.
        is_replayed: Whether it is shown to an observer again because the run was resumed.
        unknown: Fields of later versions, by name, or by JSON pointer if they are inside another field.
    """

    seq: int
    time: float
    event: Event
    is_replayed: bool = False
    unknown: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name of the event in the journal."""
        return name_of(self.event)

    def to_dict(self) -> dict[str, Any]:
        """Return the line of a journal, as plain values; ``replayed`` is added if the entry is shown again."""
        return encode(self) | ({"replayed": True} if self.is_replayed else {})


def name_of(event: Event) -> str:
    """Return the name of the event in journals."""
    match event:
        case UnknownEvent(name=name):
            return name
        case TaskRelayed():
            return RELAYED
    return WIRE_NAMES[type(event)]


def is_line(line: Mapping[str, Any]) -> bool:
    """Return whether a JSON object has the keys of every journal line: a time, and the name of an event."""
    return "time" in line and isinstance(line.get("event"), str)


def encode(entry: JournalEntry) -> dict[str, Any]:
    """Return the line of an entry, as values of strict JSON.

    Raises:
        TypeError: A field holds a value that is not allowed in events.
    """
    line = {"seq": entry.seq, "time": to_wire(entry.time), "event": entry.name, **_facts(entry.event)}
    for path, value in entry.unknown.items():
        _put(line, path, to_wire(value))
    return line


def decode(line: Mapping[str, Any], source: object = "the journal") -> JournalEntry:
    """Return the entry of a journal line.

    Args:
        line: The line as a JSON object; version 0.1 is accepted too.
        source: Its file, for the error message.

    Raises:
        RunError: A known field of a known event is missing or has another type.
    """
    try:
        envelope, _ = from_wire(_Envelope, {key: line[key] for key in _ENVELOPE if key in line})
        event, unknown = _event(envelope.event, {key: line[key] for key in line if key not in _ENVELOPE})
    except WrongValueError as error:
        raise RunError(_refusal(error, line, source)) from error
    if isinstance(event, _Relayed):
        event = TaskRelayed(task=event.task, entry=decode(event.entry, source))
    return JournalEntry(
        seq=envelope.seq,
        time=envelope.time,
        event=event,
        is_replayed=envelope.replayed,
        unknown={pointer(path): value for path, value in unknown.items()},
    )


def decode_only(
    lines: Iterable[Mapping[str, Any]], kinds: Collection[type], source: object = "the journal"
) -> list[JournalEntry]:
    """Return the entries of the journal lines whose events are of ``kinds``; the other lines are not decoded.

    Args:
        source: Their file, for the error message.

    Raises:
        RunError: A known field of a decoded event is missing or has another type.
    """
    names = {WIRE_NAMES[kind] for kind in kinds}
    return [decode(line, source) for line in lines if str(line.get("event")) in names]


def event_from(name: str, facts: Mapping[str, Any]) -> Event:
    """Return the event of that name with these fields; unknown fields are an error.

    Raises:
        TypeError: The event has no such field, or a field is missing or has another type.
    """
    try:
        event, unknown = _event(name, facts)
    except WrongValueError as error:
        what = "is missing" if error.is_missing else f"expected {error.expected}, found {error.found!r:.100}"
        raise TypeError(f"{name}, {pointer(error.path)}: {what}") from error
    if unknown:
        raise TypeError(f"{name}: expected only known fields, found also {', '.join(map(pointer, unknown))}")
    assert not isinstance(event, _Relayed)
    built: Event = event
    return built


@dataclass(frozen=True, slots=True, kw_only=True)
class _Envelope:
    event: str
    time: float
    seq: int = NO_SEQ
    replayed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Relayed:
    task: str
    entry: Mapping[str, Any]


def _event(name: str, facts: Mapping[str, Any]) -> tuple[Any, dict[Path, Any]]:
    if name == RELAYED:
        return from_wire(_Relayed, facts)
    if name in CLASSES:
        return from_wire(CLASSES[name], facts)
    return UnknownEvent(name=name, fields=dict(facts)), {}


def settings_of(started: TaskStarted) -> dict[str, Any]:
    """Return the settings of the whole task, as plain values by their journal names; without jobs, notes and the
    format."""
    return {key: value for key, value in _facts(started).items() if key not in ("jobs", "notes", "format")}


def _facts(event: Event) -> dict[str, Any]:
    match event:
        case UnknownEvent(fields=fields):
            return {key: to_wire(value) for key, value in fields.items()}
        case TaskRelayed(task=task, entry=entry):
            return {"task": task, "entry": entry.to_dict()}
    assert dataclasses.is_dataclass(event)
    written: dict[str, Any] = to_wire(event)
    return written


def _put(line: dict[str, Any], path: str, value: Any) -> None:
    """Put an unknown field back in its place."""
    if not path.startswith("/"):
        line[path] = value
        return
    *outer, name = (part.replace("~1", "/").replace("~0", "~") for part in path[1:].split("/"))
    held: Any = line
    for part in outer:
        held = held[int(part)] if isinstance(held, list) else held[part]
    held[name] = value


def _refusal(error: WrongValueError, line: Mapping[str, Any], source: object) -> str:
    where = f"event {line.get('seq', '')} ({line.get('event')})"
    if error.is_missing:
        what = f"has no {pointer(error.path)}"
    else:
        what = f"has {error.found!r:.100} for {pointer(error.path)}, expected {error.expected}"
    return (
        f"Expected a journal as ALTO writes it, found an invalid event in {source}: {where} {what}. "
        "Restore the original file."
    )
