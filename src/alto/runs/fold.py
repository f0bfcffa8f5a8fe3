"""What the folds of all journals have in common: a handler for each event, and a clock."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Self

from alto.errors import RunError
from alto.runs.journal import Event, read_events

__all__ = ["JournalFold"]


class JournalFold:
    """State derived from the events of a journal, one at a time; a subclass says in ``_handlers`` what each does.

    Attributes:
        started_at: Unix time of the first event, None before it.
        last_seen_at: Unix time of the latest event.
        interruptions: Spans of unix seconds in which nobody worked.
    """

    def __init__(self) -> None:
        self.started_at: float | None = None
        self.last_seen_at: float | None = None
        self.interruptions: list[tuple[float, float]] = []
        self._handlers: dict[str, Callable[[Event], None]] = {}

    @classmethod
    def of(cls, events: Iterable[Event]) -> Self:
        """The state after all of ``events``."""
        history = cls()
        for event in events:
            history.apply(event)
        return history

    @classmethod
    def read(cls, path: Path) -> Self:
        """The state after all events of the journal at ``path``.

        Raises:
            RunNotFoundError: There is no journal.
            RunError: The journal is damaged, or says what no ALTO writes.
        """
        history = cls()
        for event in read_events(path):
            try:
                history.apply(event)
            except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
                raise RunError(
                    f"Expected a journal as ALTO writes it, found another event in {path} ({event!r:.100}: {error!r}). "
                    "Put the file back as it was."
                ) from error
        return history

    def apply(self, event: Event) -> None:
        """Fold in one event; one that this version does not know only moves the clock."""
        handler = self._handlers.get(str(event.get("event")))
        if handler is not None:
            handler(event)
        if (time := event.get("time")) is not None:
            self.started_at = time if self.started_at is None else self.started_at
            self.last_seen_at = time

    @property
    def duration_s(self) -> float:
        """Seconds from the first to the latest event, without those in which nobody worked."""
        if self.started_at is None or self.last_seen_at is None:
            return 0.0
        idle_s = sum(end - start for start, end in self.interruptions)
        return max(0.0, self.last_seen_at - self.started_at - idle_s)

    def _note_interruption(self, event: Event) -> None:
        """The time since the event before ``event``, with which somebody goes on, was nobody's."""
        if self.last_seen_at is not None and event.get("time") is not None:
            self.interruptions.append((self.last_seen_at, max(self.last_seen_at, float(event["time"]))))
