"""Rows that a user gives as Python objects: they are written to a file, and the task names that file.

So a task always consists of plain values: it can be written to a file, sent to another process and resumed. The file is
named by the digest of its content, so equal rows share one file.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import date, time
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO

from alto.base import cache_home, quoted
from alto.errors import DataError, SpecError
from alto.spec.data_keys import ROW_COLUMNS

_KEYS = {"train": "dataset", "validation": "validation_dataset", "test": "test_dataset"}
"""The key of the task that names the rows of each split."""

_MISNAMED = ("val", "valid", "dev", "eval")
"""Other names of the split ``validation``; rows under these names would be silently ignored."""

_SOURCE_KEYS = frozenset({"path", "dataset", "weight"})
"""Keys by which the sources of a mixture are recognised."""

_NAME = "task"


def with_rows_in_files(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a task. Rows that are Python objects are written to a file, and replaced with its path.

    Rows may be a ``datasets.Dataset``, a pandas ``DataFrame``, or any iterable of mappings of columns to values, such
    as a list or a generator; or a function that returns one of these. ``dataset`` may be a mapping of splits to rows,
    such as a ``datasets.DatasetDict``: ``train`` (or the split that ``dataset_train_split`` names), ``validation``,
    ``test`` (or the split that ``dataset_test_split`` names). Missing cells of a frame become null.

    Raises:
        SpecError: There are no rows, a row is not a mapping or cannot be written as JSON, or a split is missing.
        DataError: The file cannot be written.
    """
    found = dict(values)
    dataset = found.get("dataset")
    if isinstance(dataset, Mapping):
        found |= _splits(dataset, found)
    for key in _KEYS.values():
        if isinstance(found.get(key), list | tuple) and not found[key]:
            raise SpecError(f"{key} should have rows, found an empty list. Give at least two.")
        if _are_rows(found.get(key)):
            found.setdefault("name", _NAME)
            found[key] = str(_write_rows(found[key], key))
    if isinstance(found.get("dataset"), list | tuple):
        found["dataset"] = [_source(item, index) for index, item in enumerate(found["dataset"])]
    return found


def first_row(values: Mapping[str, Any]) -> Mapping[Any, Any] | None:
    """Return the first training row if rows are Python objects that can be read twice, else None.

    Args:
        values: The keys of a task, by canonical names.
    """
    rows: Any = values.get("dataset")
    if isinstance(rows, Mapping):
        rows = rows.get(values.get("dataset_train_split") or "train")
    if not _are_rows(rows) or callable(rows) or not hasattr(rows, "__len__"):
        return None
    is_frame = type(rows).__module__.partition(".")[0] == "pandas" and hasattr(rows, "itertuples")
    row = next(iter(_frame_rows(rows.head(1), "dataset") if is_frame else rows), None)
    return row if isinstance(row, Mapping) else None


def _splits(dataset: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the splits of ``dataset`` by the task's keys; a key that the task already has is not replaced."""
    train = values.get("dataset_train_split") or "train"
    if train not in dataset or not all(_are_rows(rows) for rows in dataset.values()):
        raise SpecError(
            f"dataset should be rows, or a mapping of splits to rows with {train!r} among them, found a mapping with "
            f"{quoted(list(dataset))}. Give the split to train on, or name it with dataset_train_split."
        )
    test = values.get("dataset_test_split")
    if test is not None and test not in dataset:
        raise SpecError(
            f"dataset_test_split should be a split of the dataset ({', '.join(map(quoted, dataset))}), found "
            f"{quoted(test)}. Set it to one of them."
        )
    names = {"train": train, "validation": "validation", "test": test or "test"}
    found = {"dataset": dataset[train], "dataset_train_split": None, "dataset_test_split": None}
    given = {
        split: any(values.get(key) is not None for key in (f"{split}_dataset", f"{split}_split"))
        for split in ("validation", "test")
    }
    misnamed = [split for split in dataset if split in _MISNAMED and split not in names.values()]
    if misnamed and "validation" not in dataset and not given["validation"]:
        raise SpecError(
            f"dataset should have the rows to validate on in the split 'validation', found {misnamed[0]!r}. Rename it, "
            "or give its rows as validation_dataset."
        )
    for split, is_given in given.items():
        if names[split] in dataset and names[split] != train and not is_given:
            found[_KEYS[split]] = dataset[names[split]]
    return found


def _source(item: object, index: int) -> object:
    """Return a source of a mixture with rows that are objects replaced by the path of their file."""
    if not isinstance(item, Mapping):
        return item
    found = dict(item)
    for key in ("path", "dataset", "validation_dataset"):
        if _are_rows(found.get(key)):
            found[key] = str(_write_rows(found[key], f"dataset[{index}].{key}"))
            found.setdefault("name", f"source-{index}")
    return found


def _are_rows(value: object) -> bool:
    """Return whether ``value`` is rows, and not a path, a name or the sources of a mixture."""
    if value is None or isinstance(value, str | bytes | os.PathLike | Mapping | int | float):
        return False
    if isinstance(value, list | tuple):
        return bool(value) and all(isinstance(item, Mapping) and not _is_source(item) for item in value)
    return callable(value) or isinstance(value, Iterable) or hasattr(value, "__getitem__")


def _is_source(item: Mapping[Any, Any]) -> bool:
    """Return whether ``item`` is a source of a mixture; a row may also have a column such as ``dataset``."""
    return bool(_SOURCE_KEYS & item.keys()) and not ROW_COLUMNS & item.keys()


def _write_rows(rows: Any, key: str) -> Path:
    """Write ``rows`` to a file and return its path."""
    rows = rows() if callable(rows) else rows
    kind = type(rows).__module__.partition(".")[0]
    if kind == "datasets" and hasattr(rows, "to_parquet") and not _is_transformed(rows):
        return _written(lambda file: rows.to_parquet(file), ".parquet", key)
    if kind == "pandas" and hasattr(rows, "itertuples"):
        rows = _frame_rows(rows, key)
    return _written(lambda file: file.writelines(_lines(rows, key)), ".jsonl", key)


def _is_transformed(rows: Any) -> bool:
    """Return whether a ``datasets.Dataset`` computes its rows by a function when they are read (``set_transform``)."""
    shown: Any = getattr(rows, "format", None)
    return isinstance(shown, Mapping) and shown.get("type") == "custom"


def _frame_rows(frame: Any, key: str) -> Iterator[dict[Any, Any]]:
    """Yield the rows of a frame with missing cells as None. The frame's own JSON export would round numbers."""
    columns = list(frame.columns)
    twice = next((column for column, count in Counter(columns).items() if count > 1), None)
    if twice is not None:
        raise SpecError(
            f"{key} should be a data frame with unique column names, found {quoted(twice)} twice. Rename one."
        )
    cells = frame.itertuples(index=False, name=None)
    missing = frame.isna().itertuples(index=False, name=None)
    return (
        {column: None if is_missing else cell for column, cell, is_missing in zip(columns, row, gaps, strict=True)}
        for row, gaps in zip(cells, missing, strict=True)
    )


def _lines(rows: Any, key: str) -> Iterator[bytes]:
    try:
        iterator = iter(rows)
    except TypeError:
        raise SpecError(
            f"{key} should be a path, a name, or rows as mappings of columns to values, found {quoted(rows)}."
        ) from None
    for number, row in enumerate(_drawn(iterator), start=1):
        if not isinstance(row, Mapping):
            raise SpecError(
                f"{key} should yield rows as mappings of columns to values, found {quoted(row)} "
                f"({type(row).__name__}) as row {number}. For example: "
                "{'prompt': '2 + 3 =', 'completion': ' 5'}."
            )
        try:
            yield (json.dumps(dict(row), ensure_ascii=False, allow_nan=False, default=_plain) + "\n").encode()
        except (TypeError, ValueError, UnicodeEncodeError, RecursionError) as error:
            raise SpecError(
                f"{key} should have text, numbers, lists and mappings as values, found others in row {number}: "
                f"{error}. Convert them, or remove the column."
            ) from None


class _RowsFailedError(Exception):
    """Internal signal: ``error`` was raised by the user's rows, not by writing the file."""

    def __init__(self, error: OSError) -> None:
        super().__init__(str(error))
        self.error = error


def _drawn(rows: Iterator[Any]) -> Iterator[Any]:
    try:
        yield from rows
    except OSError as error:
        raise _RowsFailedError(error) from error


def _plain(value: Any) -> Any:
    """Convert NumPy numbers and arrays to Python's, and dates to text."""
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, date | time):
        return value.isoformat()
    raise TypeError(f"{quoted(value)} is of type {type(value).__name__}")


def _written(write: Callable[[BinaryIO], object], ending: str, key: str) -> Path:
    """Create a file with ``write``, name it by the digest of its content, and return its path."""
    folder = cache_home() / "rows"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(prefix=".", suffix=ending, dir=folder)
    except OSError as error:
        raise _unwritable(folder, error) from error
    fresh = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        if not fresh.stat().st_size:
            raise SpecError(f"{key} should have rows, found none. Give at least two.")
        with fresh.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()[:32]
        path = folder / f"{digest}{ending}"
        fresh.chmod(0o644)
        fresh.replace(path)
    except _RowsFailedError as failed:
        raise failed.error from failed.error.__cause__
    except OSError as error:
        raise _unwritable(folder, error) from error
    finally:
        fresh.unlink(missing_ok=True)
    return path


def _unwritable(folder: Path, error: OSError) -> DataError:
    return DataError(
        f"expected to keep the rows of the task in {folder}, found: {error.strerror or error}; free disk space, or "
        "name another folder with the environment variable ALTO_CACHE"
    )


CONFIG = "config"
"""An argument of :class:`alto.Task` that task files cannot have."""

_READER = "alto.importing.config_objects", "read_config_objects"
"""Module and function that read the objects of ``config``. That package imports ``alto.spec``, so it is imported only
if there are such objects."""


def with_config_objects(values: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the keys of a task including those set by ``config``, and notes on settings not adopted unchanged.

    Args:
        values: Keys as the user wrote them. ``config`` is an object or a list of objects; every other key overrides it,
            and so do the fields of the search space.

    Raises:
        SpecError: An object is not a configuration of an adapter or of a trainer, or there are two of one kind.
        UnsupportedError: Settings would change what is learned, and ALTO does not have them; the message names all.
    """
    found = dict(values)
    given = found.pop(CONFIG, None)
    if given is None:
        return found, ()
    module, name = _READER
    configs = given if isinstance(given, list | tuple) else (given,)
    read: tuple[dict[str, Any], tuple[str, ...]] = getattr(import_module(module), name)(configs, found)
    return read
