"""Stores for the rows of a task between reading and tokenising: in memory, or on disk."""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import tempfile
import weakref
from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Protocol, TypeVar

from alto.data.lazy import Chain, LazySequence, View
from alto.runs import write_error

__all__ = ["MEMORY", "VIEWS", "DiskStore", "HeadStore", "RowStore", "close_abandoned", "writing_cache"]

_REMEDY = (
    "free disk space, name a folder on another disk with the environment variable ALTO_CACHE, or keep the data in "
    "memory with token_cache: memory"
)
_CHUNK_ROWS = 64

Row = TypeVar("Row")


@contextlib.contextmanager
def writing_cache(folder: Path) -> Iterator[None]:
    """Translate a failure to write in ``folder``, a folder of the token cache.

    Raises:
        RunWriteError: An ``OSError`` was raised inside; :class:`DiskFullError` if the disk is full.
    """
    try:
        yield
    except OSError as error:
        raise write_error(folder, error, _REMEDY) from error


def close_abandoned(file: IO[bytes]) -> None:
    """Close a file that nobody reads any more; data that is not on the disk yet may be lost."""
    with contextlib.suppress(OSError):
        file.close()


class RowStore(Protocol):
    """A store that keeps rows until they are tokenised."""

    def keep(self, rows: Iterable[Row]) -> Sequence[Row]:
        """Store all ``rows``, which are read once."""
        ...

    def choose(self, rows: Sequence[Row], indices: Sequence[int]) -> Sequence[Row]:
        """Return the rows with these indices, in the order of the indices."""
        ...

    def chain(self, parts: Sequence[Sequence[Row]]) -> Sequence[Row]:
        """Return the rows of all ``parts``, one part after the other."""
        ...


class _MemoryStore:
    """A store that keeps rows in lists."""

    def keep(self, rows: Iterable[Row]) -> Sequence[Row]:
        return list(rows)

    def choose(self, rows: Sequence[Row], indices: Sequence[int]) -> Sequence[Row]:
        return [rows[index] for index in indices]

    def chain(self, parts: Sequence[Sequence[Row]]) -> Sequence[Row]:
        return [row for part in parts for row in part]


MEMORY: RowStore = _MemoryStore()
"""The store for data that fits into memory."""


class HeadStore(_MemoryStore):
    """A store that keeps the first ``num_rows`` rows of every dataset in lists, and does not read the others.

    Attributes:
        is_cut: Whether rows have been left out.
    """

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.is_cut = False

    def keep(self, rows: Iterable[Row]) -> Sequence[Row]:
        left = iter(rows)
        kept = list(itertools.islice(left, self.num_rows))
        self.is_cut |= any(True for _ in itertools.islice(left, 1))
        return kept

    def choose(self, rows: Sequence[Row], indices: Sequence[int]) -> Sequence[Row]:
        self.is_cut |= len(indices) > self.num_rows
        return super().choose(rows, indices[: self.num_rows])


class _ViewStore(_MemoryStore):
    """A store that keeps rows in lists, and refers to the parts of a chain instead of copying them."""

    def chain(self, parts: Sequence[Sequence[Row]]) -> Sequence[Row]:
        return Chain(parts)


VIEWS: RowStore = _ViewStore()
"""The store for rows that are already stored elsewhere, in memory or on disk."""


class DiskStore:
    """A store that keeps rows in unnamed files in ``folder``, which are gone when this process ends, in any way.

    Eight bytes a row, and some rows of each file, are in memory.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def keep(self, rows: Iterable[Row]) -> Sequence[Row]:
        """Store all ``rows``, which are read once.

        Raises:
            RunWriteError: They cannot be written; :class:`DiskFullError` if the disk is full.
        """
        return _StoredRows(rows, self._folder)

    def choose(self, rows: Sequence[Row], indices: Sequence[int]) -> Sequence[Row]:
        return View(rows, indices if isinstance(indices, range) else array("q", indices))

    def chain(self, parts: Sequence[Sequence[Row]]) -> Sequence[Row]:
        return Chain(parts)


class _StoredRows(LazySequence[Row]):
    """Rows in an unnamed file, in chunks; the chunk that was read last stays in memory."""

    def __init__(self, rows: Iterable[Row], folder: Path) -> None:
        left = iter(rows)
        with writing_cache(folder):
            self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 (closed when the rows are not used any more)
        weakref.finalize(self, close_abandoned, self._file)
        self._stops = array("q", [0])
        self._num_rows = 0
        while chunk := list(itertools.islice(left, _CHUNK_ROWS)):
            stored = pickle.dumps(chunk, protocol=pickle.HIGHEST_PROTOCOL)
            with writing_cache(folder):
                self._file.write(stored)
            self._stops.append(self._stops[-1] + len(stored))
            self._num_rows += len(chunk)
        with writing_cache(folder):
            self._file.flush()
        self._number, self._chunk = -1, list[Row]()

    def __len__(self) -> int:
        return self._num_rows

    def _item(self, index: int) -> Row:
        number, place = divmod(index, _CHUNK_ROWS)
        if number != self._number:
            start, stop = self._stops[number], self._stops[number + 1]
            self._number, self._chunk = number, pickle.loads(os.pread(self._file.fileno(), stop - start, start))
        return self._chunk[place]
