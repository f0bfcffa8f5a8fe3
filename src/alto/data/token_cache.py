"""The token cache: tokenised data of tasks on disk, made once, and read by every process that needs the same tokens.

Every data set has a folder, named by a digest of everything that its tokens depend on: the content of its files, the
keys of the task, the tokenizer with its template, the model's limits, and ALTO's own code. The folder is written under
another name and renamed when complete, so it exists as a whole or not at all. While one process writes it, others that
need it wait.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TypeAlias

from pydantic import TypeAdapter

from alto.data.dataset import EncodedDataset, EncodedRows, RowCounts, RowWriter, Unread
from alto.data.faults import BadRows
from alto.data.lazy import Chain
from alto.data.row_store import writing_cache
from alto.data.task_data import SPLITS, TaskData
from alto.data.token_files import TokenWriter, check_files, open_rows
from alto.errors import RunWriteError
from alto.runs import LockFile, replace_file, sync_folder

__all__ = ["Encode", "TokenCache"]

Encode: TypeAlias = Callable[[Callable[[str], RowWriter]], TaskData]
"""Function that tokenises the data of a task; takes a function that makes the writer for the split of a given name."""

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

    def data(self, name: str, encode: Encode) -> TaskData:
        """Return the tokenised data called ``name``; if it is missing or damaged, make it with ``encode``.

        Args:
            name: A digest of everything that the tokens depend on.

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
                        stored, data = _open(entry)
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
            f"expected the token cache {entry} to hold what was written, found that {damage}; check the disk, or write "
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
    return _StoredData(splits=splits, num_shared=data.num_shared, num_bad=data.num_bad, notes=tuple(data.notes))


def _open(entry: Path) -> tuple[_StoredData, TaskData]:
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
        num_shared=stored.num_shared,
        num_bad=stored.num_bad,
        notes=(*stored.notes, note),
    )


def _dataset(entry: Path, split: _StoredSplit) -> EncodedDataset:
    parts = [open_rows(entry / part.folder) for part in split.parts]
    rows = parts[0] if len(parts) == 1 else _chained(parts)
    return EncodedDataset.of(rows, is_labelled=split.is_labelled, **{fact: getattr(split, fact) for fact in _OWN_FACTS})


def _chained(parts: Sequence[EncodedRows]) -> EncodedRows:
    counts = [part.counts for part in parts if part.counts is not None]
    return EncodedRows(
        input_ids=Chain([part.input_ids for part in parts]),
        targets=Chain([part.targets for part in parts]),
        spans=Chain([part.spans for part in parts]),
        is_desirable=Chain([part.is_desirable for part in parts]),
        counts=RowCounts(*map(Chain, zip(*counts, strict=True))),
    )


def _remove(path: Path) -> None:
    """Remove a file, or a folder with its content; a folder is renamed first, so that nobody reads a part of it."""
    if not path.is_dir():
        path.unlink(missing_ok=True)
        return
    doomed = path if path.name.startswith(".") else path.with_name(f".{path.name}.{uuid.uuid4().hex}.new")
    if doomed != path:
        path.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)
