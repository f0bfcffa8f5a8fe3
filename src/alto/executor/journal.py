"""The append-only event log of a run. Everything shown or resumed is derived from it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["Journal", "Observer"]

Observer = Callable[[Mapping[str, Any]], None]
"""Is shown every event after it has been written."""


class Journal:
    """Writes one JSON object a line: ``seq``, ``time`` (Unix seconds), ``event``, and what the event says."""

    def __init__(self, path: Path, observers: Sequence[Observer] = ()) -> None:
        self._file = path.open("a", encoding="utf-8")
        self._observers = tuple(observers)
        self._seq = 0

    def append(self, event: str, **facts: Any) -> None:
        """Write an event; the line is with the operating system when this returns."""
        line = {"seq": self._seq, "time": round(time.time(), 3), "event": event, **facts}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        self._seq += 1
        for observer in self._observers:
            observer(line)

    def close(self) -> None:
        self._file.close()
