"""The base of all folds of journals: entries one at a time, and a clock."""

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
"""Errors of applying an entry with invalid values."""


class JournalFold(ABC):
    """State derived from the entries of a journal, one at a time.

    Attributes:
        started_at: Unix time of the first entry, None before it.
        last_seen_at: Unix time of the latest entry.
        interruptions: Spans of unix seconds in which no process worked, though something was left to do.
        rests: Spans of unix seconds from the end until further work came.
    """

    def __init__(self) -> None:
        self.started_at: float | None = None
        self.last_seen_at: float | None = None
        self.interruptions: list[tuple[float, float]] = []
        self.rests: list[tuple[float, float]] = []

    @classmethod
    def of(cls, entries: Iterable[JournalEntry]) -> Self:
        """The state after all of ``entries``."""
        history = cls()
        for entry in entries:
            history.apply(entry)
        return history

    @classmethod
    def read(cls, path: Path) -> Self:
        """The state after all entries of the journal at ``path``.

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
                    f"Expected a journal as ALTO writes it, found another event in {path} ({entry!r:.100}: {error!r}). "
                    "Put the file back as it was."
                ) from error
        return history

    def apply(self, entry: JournalEntry) -> None:
        """Fold in one entry; an unknown event only moves the clock."""
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
        """Seconds from the first entry to ``time`` (unix seconds), without interruptions and rests."""
        if self.started_at is None:
            return 0.0
        idle_s = sum(max(0.0, min(time, end) - start) for start, end in (*self.interruptions, *self.rests))
        return max(0.0, time - self.started_at - idle_s)

    def _note_interruption(self, time: float, *, is_rest: bool = False) -> None:
        """Note an interruption, or a rest, between the previous entry and that of ``time``, with which a process
        resumes."""
        if self.last_seen_at is not None:
            (self.rests if is_rest else self.interruptions).append((self.last_seen_at, max(self.last_seen_at, time)))
