"""Lines of a journal and the events that they stand for.

Writing is strict: what is no event, or no value that strict JSON can hold, is refused. Reading is tolerant: an event
that this version does not know is kept whole, a field that it does not know is kept beside the event, and both are
written back unchanged; a field that version 0.1 did not write has a default, which the docstring of its class says.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from alto.errors import RunError
from alto.runs.events.names import CLASSES, RELAYED, WIRE_NAMES
from alto.runs.events.queue_events import QueueEvent
from alto.runs.events.run_events import RunEvent, TaskStarted
from alto.runs.events.values import Path, WrongValueError, from_wire, pointer, to_wire

__all__ = [
    "NO_SEQ",
    "Event",
    "JournalEntry",
    "TaskRelayed",
    "UnknownEvent",
    "decode",
    "encode",
    "event_from",
    "is_line",
    "name_of",
    "settings_of",
]

NO_SEQ = -1
"""The sequence number of an event that is in no journal."""

_ENVELOPE = ("seq", "time", "event", "replayed")


@dataclass(frozen=True, slots=True, kw_only=True)
class UnknownEvent:
    """An event of a version that has more of them.

    Attributes:
        name: As the journal spells it.
        fields: All its fields, as JSON has them.
    """

    name: str
    fields: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRelayed:
    """An event of the run of a task, passed on by the queue. Observers see it; no journal of a queue holds it.

    Attributes:
        task: Name of the task in the queue.
        entry: The line of that run's journal.
    """

    task: str
    entry: JournalEntry


Event: TypeAlias = RunEvent | QueueEvent | TaskRelayed | UnknownEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalEntry:
    """One line of a journal.

    Attributes:
        seq: Counts the lines from 0; ``NO_SEQ`` where the event is in no journal.
        time: When it was written, in unix seconds.
        event: What happened.
        is_replayed: An observer is shown it again, because the run was resumed.
        unknown: Fields of later versions: by name, or by JSON pointer where they are inside another field.
    """

    seq: int
    time: float
    event: Event
    is_replayed: bool = False
    unknown: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """What the journal calls the event."""
        return name_of(self.event)

    def to_dict(self) -> dict[str, Any]:
        """The line in plain values, as a journal holds it; ``replayed`` is added where it is shown again."""
        return encode(self) | ({"replayed": True} if self.is_replayed else {})


def name_of(event: Event) -> str:
    """What journals call the event."""
    match event:
        case UnknownEvent(name=name):
            return name
        case TaskRelayed():
            return RELAYED
    return WIRE_NAMES[type(event)]


def is_line(line: Mapping[str, Any]) -> bool:
    """Whether a JSON object has what every line of a journal has: a time, and the name of an event."""
    return "time" in line and isinstance(line.get("event"), str)


def encode(entry: JournalEntry) -> dict[str, Any]:
    """The line of an entry, in values that strict JSON can hold.

    Raises:
        TypeError: A field holds something that is none.
    """
    line = {"seq": entry.seq, "time": to_wire(entry.time), "event": entry.name, **_facts(entry.event)}
    for path, value in entry.unknown.items():
        _put(line, path, to_wire(value))
    return line


def decode(line: Mapping[str, Any], source: object = "the journal") -> JournalEntry:
    """The entry that a line of a journal stands for.

    Args:
        line: As JSON has it; one of version 0.1, too.
        source: The file that it is from, for the message.

    Raises:
        RunError: A known field of a known event is missing or holds another type.
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


def event_from(name: str, facts: Mapping[str, Any]) -> Event:
    """The event of that name with these fields, all of which it must know.

    Raises:
        TypeError: It has no such field, or a field is missing or holds another type.
    """
    try:
        event, unknown = _event(name, facts)
    except WrongValueError as error:
        what = "is missing" if error.is_missing else f"expected {error.expected}, found {error.found!r:.100}"
        raise TypeError(f"{name}, {pointer(error.path)}: {what}") from error
    if unknown:
        raise TypeError(f"{name}: expected its own fields, found {', '.join(map(pointer, unknown))} besides")
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
    """What holds for the whole task, in plain values by the journal's names; without jobs, notes and the format."""
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
    """Put an unknown field back to where it was."""
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
        f"Expected a journal as ALTO writes it, found another event in {source}: {where} {what}. "
        "Put the file back as it was."
    )
