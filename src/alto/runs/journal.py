"""The append-only event log of a run. Everything shown or resumed is derived from it."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from alto.errors import RunError, RunNotFoundError

__all__ = ["Event", "Journal", "Observer", "read_events"]

Event = Mapping[str, Any]

Observer = Callable[[Event], None]
"""Is shown every event after it has been written."""


class Journal:
    """Writes one JSON object a line: ``seq``, ``time`` (Unix seconds), ``event``, and what the event says.

    Strict JSON has no NaN and no infinity: they are written as the strings ``nan``, ``inf`` and ``-inf``.
    """

    def __init__(self, path: Path, observers: Sequence[Observer] = ()) -> None:
        self._file = path.open("a", encoding="utf-8")
        self._observers = tuple(observers)
        self._seq = 0

    def append(self, event: str, **facts: Any) -> None:
        """Write an event; the line is with the operating system when this returns."""
        line = {"seq": self._seq, "time": round(time.time(), 3), "event": event, **facts}
        self._file.write(json.dumps(_strict(line), allow_nan=False) + "\n")
        self._file.flush()
        self._seq += 1
        for observer in self._observers:
            observer(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def read_events(path: str | Path) -> list[dict[str, Any]]:
    """Read the events of a journal, oldest first.

    A last line that is not whole is what an interrupted write leaves behind; it is dropped.

    Raises:
        RunNotFoundError: There is no such file.
        RunError: A line before the last one is not a JSON object.
    """
    path = Path(path)
    try:
        lines = path.read_bytes().splitlines()
    except (FileNotFoundError, NotADirectoryError):
        raise RunNotFoundError(
            f"Expected the journal of a run at {path}, but there is no such file. "
            f"Give the folder of a run, for example runs/<name>-<id>; it must hold journal.jsonl."
        ) from None
    events: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        event = _parse(line)
        if event is not None:
            events.append(event)
        elif number < len(lines):
            raise RunError(
                f"Expected one JSON object per line in {path}, but line {number} of {len(lines)} is not one. "
                "Only the last line may be incomplete; remove or repair that line."
            )
    return events


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except ValueError:
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
