"""Reads the rows of datasets of the Hugging Face hub, and of local files by extension: JSON lines, JSON, CSV and TSV
(each also with ``.gz``), and Parquet."""

from __future__ import annotations

import csv
import gzip
import io
import json
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import IO, Any

from alto.base import first_line
from alto.data.dataset import MEMORY, RowStore
from alto.data.rows import FaultKind, LazySequence, RawRow, RowFault, broken_part, listed, quoted
from alto.errors import DataError, DataFileNotFoundError, DataFormatError, UnsupportedError
from alto.version import install_command

_BATCH_ROWS = 1024
_REACH_SECONDS = 10.0


class HubRows(LazySequence[RawRow]):
    """The rows of one split of a hub dataset, each converted when it is read; an unreadable row has a fault.

    They stay in Arrow's memory-mapped files until then, so drawing a few rows of a large dataset is cheap.

    Attributes:
        identity: Name of the split, and a fingerprint of its content.
        num_bytes: Size of the rows in Arrow's memory.
    """

    def __init__(self, rows: Any, name: str) -> None:
        self.identity = (name, rows._fingerprint)
        self.num_bytes: int = rows.data.nbytes
        self._rows = rows
        self._name = name

    def __len__(self) -> int:
        return len(self._rows)

    def _item(self, index: int) -> RawRow:
        return _raw_row(partial(self._rows.__getitem__, index), f"{self._name}: row {index + 1}")


def _raw_row(read: Callable[[], Mapping[str, Any]], where: str) -> RawRow:
    try:
        return RawRow(where, {name: _without_nulls(value) for name, value in read().items()})
    except UnicodeDecodeError as error:
        fault = RowFault(FaultKind.NOT_UTF8, f"expected UTF-8 text, found {error}; save the file as UTF-8")
    except (ValueError, OverflowError) as error:  # a date beyond the year 9999, an unknown time zone
        reason = (
            f"expected values that Python can hold, found one that it cannot hold ({quoted(str(error))}); leave its "
            "column out"
        )
        fault = RowFault(FaultKind.UNREADABLE, reason)
    return RawRow(where, {}, fault)


def _without_nulls(value: Any) -> Any:
    """Return ``value`` without keys that hold null: Arrow gives every object of a column the keys of all others."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def parquet_rows(path: Path) -> Iterator[RawRow]:
    """Yield the rows of one Parquet file; only a part of them is in memory at a time.

    Raises:
        DataFormatError: The file is not Parquet, or has two columns with the same name.
        UnsupportedError: ``pyarrow`` is not installed.
    """
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise _missing(f"{path.name}: Parquet files") from None
    number = 0
    try:
        with parquet.ParquetFile(path, pre_buffer=False) as file:
            names = file.schema_arrow.names
            if len(set(names)) < len(names):
                raise DataFormatError(f"{path}: expected every column once, found {quoted(names)}; rename one")
            for batch in file.iter_batches(_BATCH_ROWS):
                for index in range(batch.num_rows):
                    number += 1
                    yield _raw_row(partial(_values, batch, index), f"{path}: row {number}")
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise DataFormatError(
            f"{path}: expected a Parquet file, found something else ({quoted(str(error))}); create the file again"
        ) from None


def _values(batch: Any, index: int) -> dict[str, Any]:
    return {name: column[index].as_py() for name, column in zip(batch.schema.names, batch.columns, strict=True)}


def load_hub_dataset(name: str, config: str | None, key: str) -> Mapping[str, HubRows]:
    """Load all splits of a hub dataset; download it if it is not in the cache.

    Args:
        name: ``owner/name``.
        config: Configuration of the dataset; None if it has only one.
        key: The task's key that names the dataset, for messages.

    Raises:
        DataFileNotFoundError: The hub has no dataset with this name, or the user has no access to it.
        DataError: The hub cannot be reached, or the configuration is missing or unknown.
        UnsupportedError: ``datasets`` is not installed.
    """
    try:
        import datasets
    except ImportError:
        raise _missing(f"{key}: {name} is read from the hub, and hub datasets") from None
    _check_hub(name, key)
    try:
        splits = datasets.load_dataset(name, config)
    except datasets.exceptions.DatasetNotFoundError as error:
        raise _unknown(name, key, error) from None
    except (ConnectionError, TimeoutError) as error:
        raise _unreachable(name, key, error) from None
    except (ValueError, OSError, datasets.exceptions.DatasetGenerationError) as error:
        raise DataError(
            f"{key}: expected a dataset that can be loaded, found {name} ({first_line(error)}); "
            "check dataset_config and the dataset's page"
        ) from error
    return {str(split): HubRows(rows, f"{name} ({split})") for split, rows in splits.items()}


def _check_hub(name: str, key: str) -> None:
    """Look the dataset up on the hub once: without a connection, loading it would retry for half a minute."""
    import huggingface_hub
    from huggingface_hub.errors import RepositoryNotFoundError

    if huggingface_hub.constants.is_offline_mode():
        return  # the cached dataset is used
    try:
        huggingface_hub.HfApi().dataset_info(name, timeout=_REACH_SECONDS)
    except RepositoryNotFoundError as error:
        raise _unknown(name, key, error) from None
    except Exception as error:  # errors of the hub and of its HTTP client have no common base class
        raise _unreachable(name, key, error) from None


def _missing(what: str) -> UnsupportedError:
    return UnsupportedError(f"{what} need the package datasets, found none; {install_command('data')}")


def _unknown(name: str, key: str, error: Exception) -> DataFileNotFoundError:
    return DataFileNotFoundError(
        f"{key}: expected a dataset of the hub, found none under {name} ({first_line(error)}); check the spelling, "
        "and log in with `hf auth login` if it is private or gated"
    )


def _unreachable(name: str, key: str, error: Exception) -> DataError:
    return DataError(
        f"{key}: expected to reach the hub for {name}, found no connection ({first_line(error)}); go online, set "
        "HF_HUB_OFFLINE=1 to use what was downloaded before, or name a file"
    )


_MAX_GROWTH = 50
_MIN_UNPACKED_BYTES = 256 * 1024**2
_USUAL_GROWTH = 5
"""Bytes of text in a byte of a compressed file, roughly."""


def read_file(path: Path, key: str, store: RowStore = MEMORY) -> Sequence[RawRow]:
    """Read all rows of ``path``, in order; a row that cannot be read has a fault instead of values.

    Args:
        key: The task's key that names the file, for messages.

    Raises:
        DataFormatError: The extension is unknown, or the file as a whole has another format.
        DataError: There are no rows, or the file cannot be read.
        UnsupportedError: The file is Parquet, and the package that reads it is not installed.
    """
    rows = store.keep(_rows(path, key))
    if not rows:
        raise DataError(f"{key}: expected at least one row, found none in {path}; is it the right file?")
    return rows


def unpacked_bytes(path: Path) -> int:
    """Estimate the uncompressed size of ``path`` in bytes.

    Raises:
        OSError: The file cannot be read.
    """
    is_packed = path.name.lower().endswith((".gz", ".parquet"))
    return path.stat().st_size * (_USUAL_GROWTH if is_packed else 1)


def _rows(path: Path, key: str) -> Iterator[RawRow]:
    name = path.name.lower()
    ending = next((ending for ending in _READERS if name.endswith((ending, f"{ending}.gz"))), None)
    try:
        if name.endswith(".parquet"):
            yield from parquet_rows(path)
        elif ending is None:
            raise DataFormatError(
                f"{key}: expected a file ending in {', '.join(FILE_ENDINGS)} (all but the last may be followed by "
                f".gz), found {path.name}; convert or rename it"
            )
        else:
            with _open(path) as lines:
                yield from _READERS[ending](lines, str(path))
    except (OSError, EOFError, zlib.error) as error:
        if isinstance(error, gzip.BadGzipFile | EOFError | zlib.error):
            raise DataFormatError(
                f"{path}: expected UTF-8 text packed by gzip, found something else ({error}); copy the file again"
            ) from error
        raise DataError(
            f"{key}: expected a readable file, found {path} ({error.strerror or quoted(str(error))}); check it"
        ) from error


def _open(path: Path) -> IO[str]:
    # Bytes that are not UTF-8 are kept as surrogates, so that the error can name their line.
    how: Any = {"encoding": "utf-8-sig", "errors": "surrogateescape", "newline": ""}
    return io.TextIOWrapper(_Unpacked(path), **how) if path.name.lower().endswith(".gz") else path.open("r", **how)


class _Unpacked(gzip.GzipFile):
    """A decompressed file with a limit on its growth: ten megabytes can hold ten gigabytes of zeros."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._path = path
        self._max_bytes = max(_MIN_UNPACKED_BYTES, _MAX_GROWTH * path.stat().st_size)

    def read(self, size: int | None = -1) -> bytes:
        return self._checked(super().read(self._max_bytes + 1 if size is None or size < 0 else size))

    def read1(self, size: int = -1) -> bytes:
        return self._checked(super().read1(size))

    def _checked(self, data: bytes) -> bytes:
        if self.tell() > self._max_bytes:
            raise DataError(
                f"{self._path}: expected at most {_MAX_GROWTH} times the file's own size when it is unpacked, found "
                "more; unpack it with gunzip, check it, and name the unpacked file"
            )
        return data


def _text_fault(text: str) -> RowFault | None:
    """Return the fault of a text that is not UTF-8; None if it is."""
    part = broken_part(text)
    if part is None:
        return None
    return RowFault(FaultKind.NOT_UTF8, f"expected UTF-8 text, found invalid bytes in {quoted(part)}; save it as UTF-8")


def _json_lines(lines: IO[str], path: str) -> Iterator[RawRow]:
    for number, line in enumerate(lines, start=1):
        where = f"{path}:{number}"
        fault = _text_fault(line)
        if fault is not None:
            yield RawRow(where, {}, fault)
        elif line.strip():
            parsed = _parse(line.strip(), "one JSON object per line", "put every row on one line")
            yield RawRow(where, {}, parsed) if isinstance(parsed, RowFault) else _row(parsed, where)


def _json(lines: IO[str], path: str) -> Iterator[RawRow]:
    text = lines.read()
    fault = _text_fault(text)
    if fault is None and not text.strip():
        return
    value = fault or _parse(
        text, "a JSON list of rows", "correct the file; rows on separate lines belong in a .jsonl file"
    )
    if isinstance(value, RowFault):
        raise DataFormatError(f"{path}: {value.reason}")
    if isinstance(value, Mapping):
        tables = [item for item in value.values() if isinstance(item, list)]
        if len(tables) != 1:
            raise DataFormatError(
                f"{path}: expected a JSON list of rows, or an object with one such list, found an object with "
                f"{len(tables)} lists; its keys are {listed(value)}; keep the list of rows only"
            )
        value = tables[0]
    if not isinstance(value, list):
        raise DataFormatError(f"{path}: expected a JSON list of rows, found {quoted(value)}; put the rows in a list")
    for number, row in enumerate(value, start=1):
        where = f"{path}: row {number}"
        yield _row(row, where)


def _row(value: Any, where: str) -> RawRow:
    if not isinstance(value, Mapping):
        reason = f"expected a JSON object, found {quoted(value)}; name its columns"
        return RawRow(where, {}, RowFault(FaultKind.NOT_AN_OBJECT, reason))
    return RawRow(where, value)


def _parse(text: str, expected: str, remedy: str) -> Any:
    """Return the JSON value of ``text``, or a fault if it is not JSON."""
    try:
        return json.loads(text, object_pairs_hook=_without_duplicates)
    except json.JSONDecodeError as error:
        line = f" in line {error.lineno}" if error.lineno > 1 else ""
        found = quoted(text[max(0, error.pos - 30) : error.pos + 30])
        reason = f"expected {expected}, found {found} ({error.msg}{line}); {remedy}"
    except RecursionError:
        reason = f"expected {expected}, found one nested too deeply; flatten it"
    except ValueError as error:  # a number with thousands of digits, a key given twice
        reason = f"expected {expected}, found {error}; correct it"
    return RowFault(FaultKind.NOT_JSON, reason)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) < len(pairs):
        ((twice, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"the key {quoted(twice)} given twice")
    return row


def _csv(lines: IO[str], path: str) -> Iterator[RawRow]:
    """Read CSV; semicolons separate the cells if the first line has semicolons and no commas, as Excel writes them
    where the comma is the decimal sign."""
    header = next(lines, "")
    return _cells(chain([header], lines), path, ";" if ";" in header and "," not in header else ",")


def _tsv(lines: IO[str], path: str) -> Iterator[RawRow]:
    return _cells(lines, path, "\t")


def _cells(lines: Iterable[str], path: str, delimiter: str) -> Iterator[RawRow]:
    """Yield the rows of a table whose first line names the columns; ``where`` names the first line of a row."""
    limit = csv.field_size_limit(sys.maxsize)  # the module's default limit is shorter than many documents
    try:
        table = csv.reader(lines, delimiter=delimiter, strict=True)
        columns: list[str] = []
        first_line = 1
        while (cells := _next_cells(table, f"{path}:{first_line}")) is not None:
            where, first_line = f"{path}:{first_line}", table.line_num + 1
            if not cells:
                continue
            fault = next((fault for cell in cells if (fault := _text_fault(cell)) is not None), None)
            if not columns:
                columns = cells
                _check_columns(columns, delimiter, where, fault)
            elif fault is not None:
                yield RawRow(where, {}, fault)
            elif len(cells) != len(columns):
                reason = (
                    f"expected {len(columns)} cells ({listed(columns)}), found {len(cells)}; put a text with commas, "
                    "tabs, quotes or line breaks in double quotes"
                )
                yield RawRow(where, {}, RowFault(FaultKind.OTHER_CELLS, reason))
            else:
                yield RawRow(where, dict(zip(columns, cells, strict=True)))
    finally:
        csv.field_size_limit(limit)


def _next_cells(table: Iterator[list[str]], where: str) -> list[str] | None:
    try:
        return next(table, None)
    except csv.Error as error:
        raise DataFormatError(
            f"{where}: expected cells between separators, found a row that is incomplete or quoted wrongly ({error}); "
            'put two double quotes ("") where a quoted text contains one'
        ) from None


def _check_columns(columns: Sequence[str], delimiter: str, where: str, fault: RowFault | None) -> None:
    if fault is not None:
        raise DataFormatError(f"{where}: {fault.reason}")
    ((twice, count),) = Counter(columns).most_common(1)
    if count > 1:
        raise DataFormatError(f"{where}: expected every column once, found {quoted(twice)} twice; rename one")
    if len(columns) == 1 and ";" in columns[0]:
        raise DataFormatError(
            f"{where}: expected columns separated by {delimiter!r}, found semicolons; name the file .csv"
        )


_READERS: Mapping[str, Callable[[IO[str], str], Iterator[RawRow]]] = {
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
    ".json": _json,
    ".csv": _csv,
    ".tsv": _tsv,
}

FILE_ENDINGS = (*_READERS, ".parquet")
"""Extensions of files that can be read. ``.gz`` may follow any of them except ``.parquet``."""
