"""Parquet files and datasets of the Hugging Face hub: the one place where ``datasets`` and ``pyarrow`` are used.

Rows of the hub stay in Arrow's memory-mapped files until they are read, so drawing a few rows of a large dataset is
cheap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from alto.data.lazy import LazySequence
from alto.data.rows import FaultKind, RawRow, RowFault, quoted
from alto.errors import DataError, DataFileNotFoundError, DataFormatError, UnsupportedError

__all__ = ["HubRows", "load_hub_dataset", "parquet_rows"]

_BATCH_ROWS = 1024
_REACH_SECONDS = 10.0


class HubRows(LazySequence[RawRow]):
    """The rows of one split of a hub dataset, each converted when it is read; an unreadable row has a fault.

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
        fault = RowFault(FaultKind.NOT_UTF8, f"expected UTF-8 text, found {error}; write the file again")
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
            f"{path}: expected a Parquet file, found something else ({quoted(str(error))}); write the file again"
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
            f"{key}: expected a dataset that can be loaded, found {name} ({_first_line(error)}); "
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
    return UnsupportedError(f'{what} need the package datasets, found none; pip install "alto-lora[data]"')


def _unknown(name: str, key: str, error: Exception) -> DataFileNotFoundError:
    return DataFileNotFoundError(
        f"{key}: expected a dataset of the hub, found none under {name} ({_first_line(error)}); check the spelling, "
        "and log in with `hf auth login` if it is private or gated"
    )


def _unreachable(name: str, key: str, error: Exception) -> DataError:
    return DataError(
        f"{key}: expected to reach the hub for {name}, found no connection ({_first_line(error)}); go online, set "
        "HF_HUB_OFFLINE=1 to use what was downloaded before, or name a file"
    )


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0][:200]
