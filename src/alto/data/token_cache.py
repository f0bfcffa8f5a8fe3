"""The token cache: tokenised data of tasks on disk, made once, and read by every process that needs the same tokens.

Every data set has a folder, named by a digest of everything that its tokens depend on: the content of its files, the
keys of the task, the tokenizer with its template, the model's limits, and ALTO's own code. The folder is written under
another name and renamed when complete, so it exists as a whole or not at all. While one process writes it, others that
need it wait.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import shutil
import time
import uuid
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeAlias

import numpy as np
import torch
from pydantic import TypeAdapter
from torch import Tensor

from alto.base import LockFile, replace_file, sync_folder
from alto.data.dataset import (
    IGNORED,
    VIEWS,
    EncodedDataset,
    RowCounts,
    RowWriter,
    Span,
    Unread,
    chained,
    close_abandoned,
    writing_cache,
)
from alto.data.formats import Layout
from alto.data.rows import BadRows, Item, LazySequence
from alto.data.task_data import SPLITS, TaskData
from alto.errors import RunWriteError
from alto.records import RowLabel

_IDS, _TRAINED, _ROWS = "ids.bin", "trained.bin", "rows.bin"
_COLUMNS = "columns.bin"
"""The file of the rows' other columns, one text after the other; there is none if they are not kept."""
_ID_TYPE, _MASK_TYPE, _ROW_TYPE = np.dtype("<u4"), np.dtype("u1"), np.dtype("<i8")

_BUFFER_BYTES = 2**20
_BLOCK_ROWS = 4096
_RESIDENT_BYTES = 2**25
"""Number of bytes of one file that are read before its pages are released to the operating system."""

_FAULT_BYTES = 2**16
"""Number of bytes that the kernel may map when a single page is read."""

FileFacts = Mapping[str, tuple[int, str]]
"""Size in bytes and SHA-256 of each file, by its name."""


class _Row(NamedTuple):
    """The numbers of one row.

    Attributes:
        start: Number of tokens of all rows before it.
        first_length, second_length: Number of tokens of its spans; 0 if there is no second span.
        prefix: Number of tokens of the first span that the second one continues.
        num_trained, num_chosen: See :class:`alto.data.dataset.EncodedDataset`.
        is_desirable: Label of the reply.
        text_start, text_length: Position and size of its other columns, in bytes.
    """

    start: int
    first_length: int
    second_length: int
    prefix: int
    num_trained: int
    num_chosen: int
    is_desirable: int
    text_start: int
    text_length: int

    @property
    def num_tokens(self) -> int:
        return self.first_length + self.second_length

    @property
    def spans(self) -> tuple[Span, ...]:
        first = Span(self.first_length)
        return (first, Span(self.second_length, self.prefix)) if self.second_length else (first,)


_NUM_COLUMNS = len(_Row._fields)


class TokenWriter(RowWriter):
    """A writer of the rows of a split into files of a new ``folder``.

    Raises:
        RunWriteError: The files cannot be written; :class:`DiskFullError` if the disk is full.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._num_rows = self._num_tokens = self._num_text_bytes = 0
        self.facts: FileFacts = {}
        with writing_cache(folder):
            folder.mkdir()
            self._files = {name: _HashedFile(folder / name) for name in (_IDS, _TRAINED, _ROWS)}

    def __len__(self) -> int:
        return self._num_rows

    def add(
        self,
        input_ids: Tensor,
        targets: Tensor,
        spans: tuple[Span, ...],
        *,
        label: RowLabel | None = None,
        columns: str = "",
    ) -> None:
        """Add one row; see :meth:`RowWriter.add`. The label says whether the reply is desirable."""
        is_trained, text = targets != IGNORED, columns.encode()
        assert torch.equal(targets[:-1], input_ids[1:].where(is_trained[:-1], IGNORED)), "a target is the next token"
        assert not is_trained[-1], "the last token predicts nothing"
        first, second = spans[0], spans[1] if len(spans) > 1 else Span(0)
        row = _Row(
            start=self._num_tokens,
            first_length=first.length,
            second_length=second.length,
            prefix=second.prefix,
            num_trained=int(is_trained.sum()),
            num_chosen=int(is_trained[: first.length].sum()),
            is_desirable=int(label is not False),
            text_start=self._num_text_bytes,
            text_length=len(text),
        )
        assert row.num_tokens == input_ids.numel(), "spans cover the row"
        self._num_rows += 1
        self._num_tokens += row.num_tokens
        self._num_text_bytes += len(text)
        with writing_cache(self._folder):
            if text and _COLUMNS not in self._files:
                self._files[_COLUMNS] = _HashedFile(self._folder / _COLUMNS)
            if text:
                self._files[_COLUMNS].write(text)
            self._files[_IDS].write(input_ids.numpy().astype(_ID_TYPE).tobytes())
            self._files[_TRAINED].write(is_trained.numpy().astype(_MASK_TYPE).tobytes())
            self._files[_ROWS].write(np.array(row, _ROW_TYPE).tobytes())

    def dataset(self, *, is_labelled: bool = False, **facts: Any) -> EncodedDataset:
        """Return the added rows, after writing them to the disk; see :meth:`RowWriter.dataset`."""
        with writing_cache(self._folder):
            self.facts = {name: file.finish() for name, file in self._files.items()}
        return open_rows(self._folder, is_labelled=is_labelled, **facts)


class _HashedFile:
    """A new file, and the digest of the data written to it."""

    def __init__(self, path: Path) -> None:
        self._file: IO[bytes] = path.open("xb", buffering=_BUFFER_BYTES)
        weakref.finalize(self, close_abandoned, self._file)
        self._digest = hashlib.sha256()
        self._num_bytes = 0

    def write(self, data: bytes) -> None:
        self._file.write(data)
        self._digest.update(data)
        self._num_bytes += len(data)

    def finish(self) -> tuple[int, str]:
        """Write the file to the disk, and return its size and digest."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return self._num_bytes, self._digest.hexdigest()


def open_rows(folder: Path, *, is_labelled: bool = False, **facts: Any) -> EncodedDataset:
    """Open the rows that a :class:`TokenWriter` has written into ``folder``; each row is read when it is used.

    Args:
        is_labelled: Whether the rows have labels that say whether a reply is desirable.
        facts: Other attributes of the split.

    Raises:
        OSError, ValueError: The files are missing or empty.
    """
    tokens = _StoredTokens(folder)
    return EncodedDataset(
        input_ids=_OfRows(tokens, tokens.input_ids),
        targets=_OfRows(tokens, tokens.targets),
        spans=_OfRows(tokens, lambda row: row.spans),
        labels=_OfRows(tokens, lambda row: bool(row.is_desirable)) if is_labelled else None,
        columns=_OfRows(tokens, tokens.columns) if tokens.has_columns else None,
        counts=RowCounts(
            num_row_tokens=_OfRows(tokens, lambda row: row.num_tokens),
            num_trained=_OfRows(tokens, lambda row: row.num_trained),
            num_chosen=_OfRows(tokens, lambda row: row.num_chosen),
        ),
        **facts,
    )


def check_files(folder: Path, facts: FileFacts) -> None:
    """Check the files of ``folder`` against their sizes and digests.

    Raises:
        OSError: A file cannot be read.
        ValueError: A file differs from what was written.
    """
    for name, (num_bytes, digest) in facts.items():
        with (folder / name).open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
            if (os.fstat(file.fileno()).st_size, found) != (num_bytes, digest):
                raise ValueError(f"{name} differs from what was written")


class _MappedFile:
    """Numbers in a memory-mapped file. Pages that were read are released regularly, so that only a part of the file is
    in memory even after the whole file was read."""

    def __init__(self, path: Path, dtype: np.dtype[Any]) -> None:
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._values: np.ndarray[Any, Any] = np.frombuffer(self._map, dtype)
        self._num_read_bytes = 0

    def __len__(self) -> int:
        return len(self._values)

    def read(self, start: int, stop: int) -> np.ndarray[Any, Any]:
        """Return a copy of the numbers from ``start`` to ``stop - 1``, ``[stop - start]`` int64."""
        copied = self._values[start:stop].astype(np.int64)
        self._num_read_bytes += (stop - start) * self._values.itemsize + _FAULT_BYTES
        if self._num_read_bytes > _RESIDENT_BYTES:
            self._map.madvise(mmap.MADV_DONTNEED)
            self._num_read_bytes = 0
        return copied


class _StoredTokens:
    """The files of a split."""

    def __init__(self, folder: Path) -> None:
        self._rows = _MappedFile(folder / _ROWS, _ROW_TYPE)
        self._ids = _MappedFile(folder / _IDS, _ID_TYPE)
        self._is_trained = _MappedFile(folder / _TRAINED, _MASK_TYPE)
        self.has_columns = (folder / _COLUMNS).exists()
        self._columns = _MappedFile(folder / _COLUMNS, np.dtype("u1")) if self.has_columns else None

    def __len__(self) -> int:
        return len(self._rows) // _NUM_COLUMNS

    def rows(self, start: int, stop: int) -> Iterator[_Row]:
        """Yield the numbers of the rows from ``start`` to ``stop - 1``."""
        numbers = self._rows.read(start * _NUM_COLUMNS, stop * _NUM_COLUMNS)
        return map(_Row._make, numbers.reshape(-1, _NUM_COLUMNS).tolist())

    def input_ids(self, row: _Row) -> Tensor:
        return torch.from_numpy(self._ids.read(row.start, row.start + row.num_tokens))

    def targets(self, row: _Row) -> Tensor:
        is_trained = torch.from_numpy(self._is_trained.read(row.start, row.start + row.num_tokens)) != 0
        targets = torch.full((row.num_tokens,), IGNORED)
        targets[:-1] = self.input_ids(row)[1:].where(is_trained[:-1], IGNORED)
        return targets

    def columns(self, row: _Row) -> str:
        assert self._columns is not None
        found = self._columns.read(row.text_start, row.text_start + row.text_length)
        return found.astype(np.uint8).tobytes().decode()


class _OfRows(LazySequence[Item]):
    """The value of ``of_row`` for every row."""

    def __init__(self, tokens: _StoredTokens, of_row: Callable[[_Row], Item]) -> None:
        self._tokens = tokens
        self._of_row = of_row

    def __len__(self) -> int:
        return len(self._tokens)

    def _item(self, index: int) -> Item:
        (row,) = self._tokens.rows(index, index + 1)
        return self._of_row(row)

    def __iter__(self) -> Iterator[Item]:
        for start in range(0, len(self), _BLOCK_ROWS):
            yield from map(self._of_row, self._tokens.rows(start, min(start + _BLOCK_ROWS, len(self))))


Encode: TypeAlias = Callable[[Callable[[str], RowWriter]], TaskData]
"""Function that tokenises the data of a task. Its argument is a function from the name of a split to its writer."""

_FACTS = "data.json"
_FOREVER_S = 10.0**9
_KEPT_S = 30 * 24 * 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _StoredPart:
    """The files of the rows of a split, or of one of its sources: ``files`` has size and SHA-256 by file name."""

    folder: str
    files: Mapping[str, tuple[int, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _StoredSplit:
    """A split: its parts, whether its rows have labels, and the other facts of its :class:`EncodedDataset`."""

    parts: tuple[_StoredPart, ...]
    is_labelled: bool
    num_truncated: int
    num_skipped: int
    num_masked: int
    num_unrolled: int
    num_alike: int
    num_shortened: int
    refused: tuple[BadRows, ...]
    unread: tuple[Unread, ...]
    sources: tuple[tuple[str, int], ...]
    max_length: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _StoredData:
    splits: tuple[_StoredSplit, ...]
    num_shared: int
    num_known_test: int
    num_bad: int
    notes: tuple[str, ...]

    @property
    def num_bytes(self) -> int:
        """Size of all files."""
        return sum(size for split in self.splits for part in split.parts for size, _ in part.files.values())


_CODEC = TypeAdapter(_StoredData)
_OWN_FACTS = tuple(field.name for field in fields(_StoredSplit) if field.name not in ("parts", "is_labelled"))


class _DamageError(Exception):
    """Data in the cache that differs from what was written."""


@contextlib.contextmanager
def _noticing_damage() -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        raise _DamageError(str(error)) from error


class TokenCache:
    """The cache in ``folder``, which is created if missing."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with writing_cache(folder):
            folder.mkdir(parents=True, exist_ok=True)

    def data(self, name: str, encode: Encode, *, layout: Layout, max_length: int) -> TaskData:
        """Return the tokenised data called ``name``; if it is missing or damaged, make it with ``encode``.

        Args:
            name: A digest of everything that the tokens depend on.
            layout, max_length: Attributes of the data, which are stored with the rows that were read.

        Raises:
            RunWriteError: The cache cannot be written (:class:`DiskFullError` if the disk is full), or does not hold
                what was written.
            DataError: ``encode`` raises it.
        """
        entry = self.folder / name
        damage: _DamageError | None = None
        for _ in range(2):
            try:
                with self.locked(name):
                    if damage is not None:
                        _remove(entry)
                    if not entry.is_dir():
                        self._write(entry, encode)
                        self._remove_unused()
                    with _noticing_damage():
                        stored, data = _open(entry, layout, max_length)
                with _noticing_damage():
                    for part in (part for split in stored.splits for part in split.parts):
                        check_files(entry / part.folder, part.files)
                with contextlib.suppress(OSError):  # another user's entry
                    os.utime(entry)
                return data
            except _DamageError as error:
                damage = error
                warnings.warn(f"{entry} is damaged ({error!s:.200}); its rows are tokenised again", stacklevel=2)
        raise RunWriteError(
            f"expected the token cache {entry} to hold what was written, found that {damage}; check the disk, or set "
            "token_cache: memory"
        )

    @contextlib.contextmanager
    def locked(self, name: str) -> Iterator[None]:
        """Wait until no other process holds the lock ``name``, and hold it inside the ``with`` block."""
        lock = LockFile(self.folder / f"{name}.lock")
        with writing_cache(self.folder):
            lock.acquire(_FOREVER_S)
        try:
            yield
        finally:
            lock.release()

    def _write(self, entry: Path, encode: Encode) -> None:
        for abandoned in self.folder.glob(f".{entry.name}.*.new"):
            _remove(abandoned)
        fresh = self.folder / f".{entry.name}.{uuid.uuid4().hex}.new"
        parts: dict[str, list[tuple[str, TokenWriter]]] = {split: [] for split in SPLITS}

        def new_writer(split: str) -> RowWriter:
            folder = f"{split}-{len(parts[split])}"
            writer = TokenWriter(fresh / folder)
            parts[split].append((folder, writer))
            return writer

        try:
            with writing_cache(fresh):
                fresh.mkdir()
            data = encode(new_writer)
            stored = _stored(data, [parts[split] for split in SPLITS])
            with writing_cache(fresh):
                replace_file(fresh / _FACTS, _CODEC.dump_json(stored, indent=1))
                for folder in (part.folder for split in stored.splits for part in split.parts):
                    sync_folder(fresh / folder)
                sync_folder(fresh)
                fresh.rename(entry)
                sync_folder(self.folder)
        except BaseException:
            _remove(fresh)
            raise

    def _remove_unused(self) -> None:
        """Remove data that no task has used for a month."""
        for found in self.folder.iterdir():
            with contextlib.suppress(OSError):  # another process removes it, or another user owns it
                if found.suffix != ".lock" and time.time() - found.stat().st_mtime > _KEPT_S:
                    _remove(found)


def _stored(data: TaskData, parts: Sequence[Sequence[tuple[str, TokenWriter]]]) -> _StoredData:
    splits = tuple(
        _StoredSplit(
            parts=tuple(_StoredPart(folder=folder, files=writer.facts) for folder, writer in of_split),
            is_labelled=split.labels is not None,
            **{fact: getattr(split, fact) for fact in _OWN_FACTS},
        )
        for split, of_split in zip(data.splits, parts, strict=False)
    )
    return _StoredData(
        splits=splits,
        num_shared=data.num_repeated,
        num_known_test=data.num_known_test,
        num_bad=data.num_bad,
        notes=tuple(data.notes),
    )


def _open(entry: Path, layout: Layout, max_length: int) -> tuple[_StoredData, TaskData]:
    """Return the facts stored in the folder ``entry``, and its data; the content of its files is not checked.

    Raises:
        OSError, ValueError: The folder is damaged.
    """
    stored = _CODEC.validate_json((entry / _FACTS).read_bytes())
    train, validation, *test = (_dataset(entry, split) for split in stored.splits)
    note = (
        f"The tokens of the data are read from disk ({stored.num_bytes / 1e6:,.0f} MB in {entry}), not held in memory "
        "(token_cache)."
    )
    return stored, TaskData(
        train=train,
        validation=validation,
        test=test[0] if test else None,
        num_repeated=stored.num_shared,
        num_known_test=stored.num_known_test,
        num_bad=stored.num_bad,
        notes=(*stored.notes, note),
        layout=layout,
        max_length=max_length,
    )


def _dataset(entry: Path, split: _StoredSplit) -> EncodedDataset:
    parts = [open_rows(entry / part.folder, is_labelled=split.is_labelled) for part in split.parts]
    return EncodedDataset(**chained(parts, VIEWS), **{fact: getattr(split, fact) for fact in _OWN_FACTS})


def _remove(path: Path) -> None:
    """Remove a file, or a folder with its content; a folder is renamed first, so that nobody reads a part of it."""
    if not path.is_dir():
        path.unlink(missing_ok=True)
        return
    doomed = path if path.name.startswith(".") else path.with_name(f".{path.name}.{uuid.uuid4().hex}.new")
    if doomed != path:
        path.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)
