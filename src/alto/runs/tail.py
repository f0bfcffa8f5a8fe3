"""Follows a journal that another process writes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

from alto.runs.events import JournalEntry, decode
from alto.runs.journal import parse_line
from alto.spec.outside import open_regular

__all__ = ["JournalTail"]


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
                self._go_back(file)
            file.seek(self._offset)
            data = file.read()
        *lines, torn = data.split(b"\n")
        self._offset += len(data) - len(torn)
        self._digests += map(hash, lines)
        return [decode(event, self._path) for event in map(parse_line, lines) if event is not None]

    def _go_back(self, file: BinaryIO) -> None:
        """Go back to the first line that differs from what was read before."""
        known, self._digests, self._offset = self._digests, [], 0
        for line, digest in zip(file, known, strict=False):
            if not line.endswith(b"\n") or hash(line[:-1]) != digest:
                return
            self._digests.append(digest)
            self._offset += len(line)
