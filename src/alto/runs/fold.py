"""The base of all folds of journals: it takes one entry at a time, and keeps a clock."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Self

from alto.errors import RunError
from alto.runs.events import Event, JournalEntry
from alto.runs.journal import read_entries

__all__ = ["NOT_FOLDABLE", "JournalFold"]

NOT_FOLDABLE = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)
"""Errors raised when an entry with invalid values is applied."""


class JournalFold(ABC):
    """State derived from the entries of a journal, one at a time.

    Attributes:
        started_at: Unix time of the first entry, None before it.
        last_seen_at: Unix time of the latest entry.
        interruptions: Spans, in unix seconds, in which no process worked although there was work to do.
        rests: Spans, in unix seconds, from the end of all work until more work came.
    """

    def __init__(self) -> None:
        self.started_at: float | None = None
        self.last_seen_at: float | None = None
        self.interruptions: list[tuple[float, float]] = []
        self.rests: list[tuple[float, float]] = []

    @classmethod
    def of(cls, entries: Iterable[JournalEntry]) -> Self:
        """Return the state after all of ``entries``."""
        history = cls()
        for entry in entries:
            history.apply(entry)
        return history

    @classmethod
    def read(cls, path: Path) -> Self:
        """Return the state after all entries of the journal at ``path``.

        Raises:
            RunNotFoundError: There is no journal.
            RunError: The journal is damaged.
        """
        history = cls()
        for entry in read_entries(path):
            try:
                history.apply(entry)
            except NOT_FOLDABLE as error:
                raise RunError(
                    f"Expected a journal as ALTO writes it, found an invalid event in {path} ({entry!r:.100}: "
                    f"{error!r}). Restore the original file."
                ) from error
        return history

    def apply(self, entry: JournalEntry) -> None:
        """Fold in one entry; an unknown event only advances the clock."""
        self._fold(entry.event, entry.time)
        self.started_at = entry.time if self.started_at is None else self.started_at
        self.last_seen_at = entry.time

    @abstractmethod
    def _fold(self, event: Event, time: float) -> None:
        """Update the state by ``event``, written at ``time`` (unix seconds)."""

    @property
    def duration_s(self) -> float:
        """Seconds from the first to the latest entry, without interruptions and rests."""
        return 0.0 if self.last_seen_at is None else self.worked_s(self.last_seen_at)

    def worked_s(self, time: float) -> float:
        """Return the seconds from the first entry to ``time`` (unix seconds), without interruptions and rests."""
        if self.started_at is None:
            return 0.0
        idle_s = sum(max(0.0, min(time, end) - start) for start, end in (*self.interruptions, *self.rests))
        return max(0.0, time - self.started_at - idle_s)

    def _note_interruption(self, time: float, *, is_rest: bool = False) -> None:
        """Record an interruption, or a rest, from the previous entry to ``time``, when a process resumes."""
        if self.last_seen_at is not None:
            (self.rests if is_rest else self.interruptions).append((self.last_seen_at, max(self.last_seen_at, time)))
