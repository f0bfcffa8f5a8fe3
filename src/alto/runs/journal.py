"""The append-only event log of a run. Everything shown or resumed is derived from it."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from alto.errors import RunError, RunNotFoundError
from alto.runs.files import sync_folder, writing

__all__ = [
    "Event",
    "Journal",
    "Observer",
    "SilentJournal",
    "cut_journal",
    "parse_line",
    "read_events",
    "read_intact_events",
]

Event = Mapping[str, Any]

Observer = Callable[[Event], None]
"""Is shown every event after it has been written."""


class Journal:
    """Writes one JSON object a line: ``seq``, ``time`` (Unix seconds), ``event``, and what the event says.

    Strict JSON has no NaN and no infinity: they are written as the strings ``nan``, ``inf`` and ``-inf``. ``time``
    never runs backwards, whatever is done to the machine's clock meanwhile.

    Args:
        past: The events that the file holds already; the next one follows them.
    """

    def __init__(self, path: Path, observers: Sequence[Observer] = (), *, past: Sequence[Event] = ()) -> None:
        self._path = path
        with writing(path.parent, path):
            # Unbuffered, so that a line that could not be written is not tried again when the file is closed.
            self._file = path.open("ab", buffering=0)
        self._observers = tuple(observers)
        self._seq = len(past)
        self._started_at = max(time.time(), past[-1]["time"] if past else 0.0)
        self._started_on = time.monotonic()

    def append(self, event: str, **facts: Any) -> None:
        """Write an event; the line is with the operating system when this returns.

        Raises:
            RunWriteError: The disk is full or cannot be written.
        """
        now = self._started_at + time.monotonic() - self._started_on
        line = {"seq": self._seq, "time": round(now, 3), "event": event, **facts}
        data = (json.dumps(_strict(line), allow_nan=False) + "\n").encode()
        with writing(self._path.parent, self._path):
            while data:
                data = data[self._file.write(data) :]
        self._seq += 1
        for observer in self._observers:
            observer(line)

    def sync(self) -> None:
        """Make everything written so far survive a loss of power."""
        with writing(self._path.parent, self._path):
            os.fsync(self._file.fileno())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


class SilentJournal(Journal):
    """Writes nothing: for a rank whose events another one tells."""

    def __init__(self) -> None:
        pass

    def append(self, event: str, **facts: Any) -> None:
        """Nothing."""

    def sync(self) -> None:
        """Nothing."""

    def __exit__(self, *_: object) -> None:
        pass


def read_events(path: str | Path) -> list[dict[str, Any]]:
    """Read the events of a journal, oldest first.

    A last line that is not whole is what an interrupted write leaves behind; it is dropped.

    Raises:
        RunNotFoundError: There is no such file.
        RunError: A line before the last one is not a JSON object.
    """
    path = Path(path)
    lines = _lines(path)
    events: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        event = parse_line(line)
        if event is not None:
            events.append(event)
        elif number < len(lines):
            raise RunError(
                f"Expected one JSON object per line in {path}, but line {number} of {len(lines)} is not one. "
                f"Go back to the last checkpoint before it with: alto resume {path.parent}"
            )
    return events


def read_intact_events(path: Path) -> list[dict[str, Any]]:
    """The events before the first line that is damaged or missing: what can still be relied on.

    Raises:
        RunNotFoundError: There is no such file.
    """
    events: list[dict[str, Any]] = []
    for line in _lines(path):
        event = parse_line(line)
        if event is None or event.get("seq") != len(events) or not _is_told(event):
            break
        events.append(event)
    return events


def cut_journal(path: Path, num_events: int) -> None:
    """Keep the first ``num_events`` events of a journal, all at once."""
    kept = b"".join(line + b"\n" for line in _lines(path)[:num_events])
    fresh = path.with_name(path.name + ".new")
    with writing(path.parent, path):
        with fresh.open("wb") as file:
            file.write(kept)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
        sync_folder(path.parent)


def _lines(path: Path) -> list[bytes]:
    try:
        return path.read_bytes().splitlines()
    except (FileNotFoundError, NotADirectoryError):
        raise RunNotFoundError(
            f"Expected the journal of a run at {path}, but there is no such file. "
            f"Give the folder of a run, for example runs/<name>-<id>; it must hold journal.jsonl."
        ) from None
    except OSError as error:
        raise RunError(
            f"Expected the journal of a run at {path}, found what cannot be read ({error.strerror}). "
            "Make it readable, or give the folder of another run."
        ) from error


def _is_told(event: Event) -> bool:
    return isinstance(event.get("time"), int | float) and isinstance(event.get("event"), str)


def parse_line(line: bytes) -> dict[str, Any] | None:
    """The event of a line; None where it is not a JSON object."""
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) else None


def _strict(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    return value
