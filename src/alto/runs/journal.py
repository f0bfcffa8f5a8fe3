"""The append-only event log of a run. Everything shown or resumed is derived from it."""

from __future__ import annotations

import contextlib
import json
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Self, TypeAlias

from alto.base import is_number, open_regular, read_bytes, replace_file, resume_command, writing
from alto.errors import RunBusyError, RunError, RunNotFoundError
from alto.runs.events import NO_SEQ, Event, JournalEntry, decode, encode, is_line

_MAX_BYTES = 4 * 1024**3
"""Largest size of a journal that is read; a long run has some megabytes."""

_MAX_TIME = 253402300799.0
"""The last second of the year 9999: no calendar goes further."""

Observer = Callable[[JournalEntry], None]
"""Called with every entry after it has been written."""

_Piece: TypeAlias = tuple[bytes, "dict[str, Any] | None"]
"""One appended entry, without its line end, and its JSON object; None if it cannot be parsed."""

_BEGINNING = b'{"seq": '
"""The first bytes of every line."""


class Journal:
    """Writes one JSON object per line: ``seq``, ``time`` (unix seconds), ``event``, and the fields of the event.

    ``time`` never decreases, even if the machine's clock is set back.

    Before the first event is appended, everything in the file after ``past`` is cut: a torn line of an interrupted
    write, or events after the checkpoint from which a run resumes. The remains of an event that could not be written
    are cut too.

    Args:
        path: The file; made if absent.
        observers: Called with every entry after it was written.
        past: The first entries of the file, after which the next one is appended; None keeps all intact entries.
        check: Called before the file is cut and before every event; if it raises, the file is not changed.

    Attributes:
        past: The entries that were kept.
        num_lines_cut: Lines that were cut off when the journal was opened.

    Raises:
        RunError: A field of an entry in the file has another type.
        RunWriteError: The disk is full or cannot be written.
    """

    def __init__(
        self,
        path: Path,
        observers: Sequence[Observer] = (),
        *,
        past: Sequence[JournalEntry] | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        check()  # loading the model may have taken long since the lock was taken
        self._path = path
        self._check = check
        self.past = tuple(read_intact_entries(path) if past is None and path.exists() else past or ())
        self.num_lines_cut = cut_journal(path, len(self.past)) if path.exists() else 0
        with writing(path.parent, path):
            # Unbuffered: otherwise closing the file would retry a line that could not be written.
            self._file = path.open("ab", buffering=0)
            self._num_bytes = os.fstat(self._file.fileno()).st_size
        self._observers = tuple(observers)
        self._is_torn = False
        self._seq = len(self.past)
        self._started_at = max(time.time(), self.past[-1].time if self.past else 0.0)
        self._started_on = time.monotonic()

    @property
    def path(self) -> Path:
        return self._path

    def append(self, event: Event) -> JournalEntry:
        """Write an event; the operating system has the line when this returns.

        Raises:
            RunBusyError: The file was removed or replaced, so another process may write the journal.
            RunWriteError: The disk is full or cannot be written.
            TypeError: The event holds a value that strict JSON cannot hold.
        """
        self._check()
        self._check_file()
        now = self._started_at + time.monotonic() - self._started_on
        entry = JournalEntry(seq=self._seq, time=round(now, 3), event=event)
        self._write((json.dumps(encode(entry), allow_nan=False) + "\n").encode())
        self._seq += 1
        for observer in self._observers:
            observer(entry)
        return entry

    def _check_file(self) -> None:
        held = os.fstat(self._file.fileno())
        try:
            named = os.stat(self._path)
        except FileNotFoundError:
            named = None
        if named is None or (held.st_dev, held.st_ino) != (named.st_dev, named.st_ino):
            raise RunBusyError(
                f"expected {self._path} as this process opened it, found it removed or replaced, so another process "
                "may work on the run; make sure that none does, then continue with: "
                f"{resume_command(self._path.parent)}"
            )

    def _write(self, data: bytes) -> None:
        """Write all of ``data``, or nothing."""
        with writing(self._path.parent, self._path):
            if self._is_torn:
                self._file.truncate(self._num_bytes)
            self._is_torn = True
            try:
                written = 0
                while written < len(data):
                    written += self._file.write(data[written:])
            except OSError:
                with contextlib.suppress(OSError):  # the next append tries again
                    self._file.truncate(self._num_bytes)
                    self._is_torn = False
                raise
            self._is_torn = False
            self._num_bytes += len(data)

    def sync(self) -> None:
        """Make everything written so far durable."""
        with writing(self._path.parent, self._path):
            os.fsync(self._file.fileno())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


class SilentJournal(Journal):
    """Writes nothing: for a rank whose events another rank writes."""

    def __init__(self) -> None:
        pass

    def append(self, event: Event) -> JournalEntry:
        """Return an entry without a sequence number; write nothing."""
        return JournalEntry(seq=NO_SEQ, time=time.time(), event=event)

    def sync(self) -> None:
        """Do nothing."""

    def __exit__(self, *_: object) -> None:
        pass


def read_entries(path: str | Path) -> list[JournalEntry]:
    """Read the entries of a journal, oldest first; damage is handled as in :func:`read_events`.

    Raises:
        RunNotFoundError, RunError: See :func:`read_events`; or a known field of a known event is missing or has another
            type.
    """
    return [decode(line, path) for line in read_events(path)]


def read_intact_entries(path: Path) -> list[JournalEntry]:
    """Return the entries before the first damaged or missing line.

    Raises:
        RunNotFoundError: There is no such file.
        RunError: A known field of a known event is missing or has another type.
    """
    return [decode(line, path) for line in read_intact_events(path)]


def read_events(path: str | Path) -> list[dict[str, Any]]:
    """Read the events of a journal, oldest first.

    An incomplete last line, left by an interrupted write, is dropped. If an event was appended to an incomplete line,
    the first part of the line is dropped and the event is read.

    Raises:
        RunNotFoundError: There is no such file.
        RunError: A line before the last one is not a JSON object, or its time is not a valid time.
    """
    path = Path(path)
    lines = _lines(path)
    events: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        for _, event in _pieces_of(line):
            if event is not None:
                events.append(event)
            elif number < len(lines):
                raise RunError(
                    f"Expected one JSON object per line in {path}, but line {number} of {len(lines)} is not one. "
                    "Everything before it is intact. Delete this line and everything after it, then continue "
                    f"with: {resume_command(path.parent)}"
                )
    return events


def read_intact_events(path: Path) -> list[dict[str, Any]]:
    """Return the events before the first damaged or missing line.

    Raises:
        RunNotFoundError: There is no such file.
    """
    return [event for _, event in _intact_pieces(path)]


def cut_journal(path: Path, num_events: int) -> int:
    """Keep the first ``num_events`` intact events of a journal, atomically; if there is nothing to cut, leave the file
    alone.

    Returns:
        Number of lines that were cut off.

    Raises:
        RunNotFoundError: There is no such file.
        RunWriteError: The disk is full or cannot be written.
    """
    kept = b"".join(data + b"\n" for data, _ in _intact_pieces(path)[:num_events])
    if kept != path.read_bytes():
        num_lines = len(_lines(path))
        with writing(path.parent, path):
            replace_file(path, kept)
        return max(0, num_lines - kept.count(b"\n"))
    return 0


def _intact_pieces(path: Path) -> list[tuple[bytes, dict[str, Any]]]:
    entries: list[tuple[bytes, dict[str, Any]]] = []
    for line in _lines(path):
        for data, event in _pieces_of(line):
            if event is None or event.get("seq") != len(entries) or not is_line(event):
                return entries
            entries.append((data, event))
    return entries


def _pieces_of(line: bytes) -> Iterator[_Piece]:
    """Yield the entries of a line: usually one, or two if an event was appended to a line without an end.

    Version 0.1 did so in the journals of queues. A torn first entry is left out: the intact second one has its number.
    """
    if not line.strip():
        return
    event = _parse_line(line)
    begins_at = line.rfind(_BEGINNING) if event is None else 0
    appended = _parse_line(line[begins_at:]) if begins_at > 0 else None
    if appended is None:
        yield line, event
        return
    before = _parse_line(line[:begins_at])
    if before is not None:
        yield line[:begins_at], before
    yield line[begins_at:], appended


def _lines(path: Path) -> list[bytes]:
    try:
        return read_bytes(path, _MAX_BYTES).splitlines()
    except (FileNotFoundError, NotADirectoryError):
        raise RunNotFoundError(
            f"Expected the journal of a run at {path}, but there is no such file. "
            f"Give the folder of a run, for example runs/<name>-<id>; it must hold journal.jsonl."
        ) from None
    except OSError as error:
        raise RunError(
            f"Expected the journal of a run at {path}, found a file that cannot be read ({error.strerror}). "
            "Make it readable, or give the folder of another run."
        ) from error


def _parse_line(line: bytes) -> dict[str, Any] | None:
    """Return the event of a line; None if it is not a JSON object, or its time is not a valid time."""
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    is_event = isinstance(event, dict) and is_number(event.get("time", 0), least=0, most=_MAX_TIME)
    return event if is_event else None


class JournalTail:
    """Reads the new, complete lines of a journal.

    When a run is resumed, its journal is cut back to a checkpoint and replaced by a new file. To return no line twice,
    a digest of every line that was read is kept.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._digests: list[int] = []
        self._offset = 0
        self._inode: int | None = None

    def read(self) -> list[JournalEntry]:
        """Return the entries since the last call; empty if there is no journal.

        A damaged line is skipped: resuming the run cuts it off.

        Raises:
            RunError: A known field of a known event is missing or has another type.
        """
        try:
            file = open_regular(self._path)
        except FileNotFoundError:
            return []
        with file:
            status = os.fstat(file.fileno())
            if status.st_ino != self._inode or status.st_size < self._offset:
                self._inode = status.st_ino
                self._rewind(file)
            file.seek(self._offset)
            data = file.read()
        *lines, torn = data.split(b"\n")
        self._offset += len(data) - len(torn)
        self._digests += map(hash, lines)
        return [decode(event, self._path) for event in map(_parse_line, lines) if event is not None]

    def _rewind(self, file: BinaryIO) -> None:
        """Go back to the first line that has changed since it was read."""
        known, self._digests, self._offset = self._digests, [], 0
        for line, digest in zip(file, known, strict=False):
            if not line.endswith(b"\n") or hash(line[:-1]) != digest:
                return
            self._digests.append(digest)
            self._offset += len(line)


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
