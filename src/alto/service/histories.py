"""Histories of runs, folded again only where their journals have changed."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

from alto.runs import RunHistory, read_history

__all__ = ["Histories"]

_MOST = 64


@dataclass(frozen=True, slots=True)
class _Known:
    state: tuple[int, int, int]
    history: RunHistory


class Histories:
    """The histories of runs that were asked for lately; none of them may be changed. Used by any thread."""

    def __init__(self) -> None:
        self._known: OrderedDict[Path, _Known] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, run: Path) -> RunHistory:
        """The history of a run; an empty one where it has no journal yet.

        Raises:
            RunError: Its journal is damaged.
        """
        try:
            found = (run / "journal.jsonl").stat()
        except FileNotFoundError:
            return RunHistory()
        state = (found.st_ino, found.st_size, found.st_mtime_ns)
        with self._lock:
            known = self._known.get(run)
        if known is None or known.state != state:
            known = _Known(state, read_history(run))
            with self._lock:
                self._known[run] = known
                self._known.move_to_end(run)
                while len(self._known) > _MOST:
                    self._known.popitem(last=False)
        return known.history
