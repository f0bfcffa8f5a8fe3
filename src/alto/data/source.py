"""Finds a named dataset: a local file, a preset, or a dataset of the hub."""

from __future__ import annotations

import difflib
import itertools
import random
import re
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alto.data.dataset import MEMORY, RowStore
from alto.data.digests import file_digest
from alto.data.files import FILE_ENDINGS, HubRows, load_hub_dataset, read_file, unpacked_bytes
from alto.data.rows import Item, RawRow, listed
from alto.errors import DataError, DataFileNotFoundError
from alto.spec import DataKeys, RowFormName


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetPreset:
    """A hub dataset and its defaults, which a task's own keys override.

    Attributes:
        names: Names of the dataset in a task, besides ``hub_id``.
        max_length: Tokens at which a row is cut: the value of its authors' own recipes; for GSM8K, enough for all rows.
        config: Configuration on the hub; None if there is only one.
        train_split, test_split: Splits on the hub; there is no test split if rows are held out of the training split.
        row_counts: Numbers of training, validation and test rows drawn from the training split with the task's
            ``data_seed``; None if its rows are used as they are.
    """

    names: tuple[str, ...]
    hub_id: str
    max_length: int
    config: str | None = None
    form: RowFormName
    train_split: str = "train"
    test_split: str | None = None
    row_counts: tuple[int, int, int] | None = None


PRESETS = (
    DatasetPreset(
        names=("gsm8k", "math/gsm8k"),
        hub_id="openai/gsm8k",
        max_length=512,
        config="main",
        form="prompt_completion",
        test_split="test",
    ),
    DatasetPreset(
        names=("tulu-3", "tulu3"),
        hub_id="allenai/tulu-3-sft-mixture",
        max_length=4096,
        form="messages",
        row_counts=(9_000, 1_000, 1_000),
    ),
    DatasetPreset(
        names=("openthoughts3", "openthoughts-3"),
        hub_id="open-thoughts/OpenThoughts3-1.2M",
        max_length=16384,
        form="sharegpt",
    ),
    DatasetPreset(
        names=("ultrafeedback",),
        hub_id="HuggingFaceH4/ultrafeedback_binarized",
        max_length=1024,
        form="auto",
        train_split="train_prefs",
        test_split="test_prefs",
    ),
)


def find_preset(name: str) -> DatasetPreset | None:
    """Return the preset called ``name``, in upper or lower case."""
    wanted = name.lower()
    return next((preset for preset in PRESETS if wanted in (*preset.names, preset.hub_id.lower())), None)


def nearest_preset(name: str) -> str | None:
    """Return the name of the preset that is probably meant by ``name``; None if none is similar."""
    near = difflib.get_close_matches(name.lower(), [name for preset in PRESETS for name in preset.names], n=1)
    return near[0] if near else None


def sample_rows(rows: Sequence[Item], count: int | None, seed: int, *, store: RowStore = MEMORY) -> Sequence[Item]:
    """Draw ``count`` of ``rows`` with a fixed seed, in their original order; return all if ``count`` is None."""
    if count is None or count >= len(rows):
        return store.choose(rows, range(len(rows)))
    return store.choose(rows, sorted(random.Random(seed).sample(range(len(rows)), count)))


def split_rows(
    rows: Sequence[Item], fraction: float, seed: int, *, key: str = "validation_split", store: RowStore = MEMORY
) -> tuple[Sequence[Item], Sequence[Item]]:
    """Split off rows drawn with a fixed seed; return training rows and rows set aside, each in original order.

    Args:
        fraction: Fraction of the rows to set aside, in (0, 1).
        key: The task's key for that fraction, for messages.

    Raises:
        DataError: There are fewer than two rows to split.
    """
    if len(rows) < 2:
        raise DataError(
            f"{key}: expected at least 2 rows to split, found {len(rows)}; "
            f"add rows or name a {key.replace('split', 'dataset')}"
        )
    count = min(len(rows) - 1, max(1, round(fraction * len(rows))))
    chosen = set(random.Random(seed).sample(range(len(rows)), count))
    left = array("q", (index for index in range(len(rows)) if index not in chosen))
    return store.choose(rows, left), store.choose(rows, sorted(chosen))


def carve_rows(
    rows: Sequence[Item], counts: Sequence[int], seed: int, *, store: RowStore = MEMORY
) -> list[Sequence[Item]]:
    """Draw disjoint parts of ``counts`` rows with a fixed seed, each in original order.

    Raises:
        DataError: There are fewer rows than ``counts`` add up to.
    """
    if len(rows) < sum(counts):
        raise DataError(
            f"dataset: expected at least {sum(counts)} rows to draw {', '.join(map(str, counts))} from, found "
            f"{len(rows)}; name the splits with dataset_train_split and validation_split"
        )
    drawn = iter(random.Random(seed).sample(range(len(rows)), sum(counts)))
    return [store.choose(rows, sorted(itertools.islice(drawn, count))) for count in counts]


DEFAULT_MAX_LENGTH = 1024
"""Default of ``max_length``, if neither a task nor a preset sets it."""

_SAVED_BY_DATASETS = ("dataset_dict.json", "state.json")
"""Files of a folder that ``save_to_disk`` of the package datasets has written: of a ``DatasetDict``, and of a
``Dataset``."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Splits:
    """Rows of a dataset before their form is known.

    Attributes:
        train: Rows of a file, or of the split to train on.
        validation, test: Rows of the dataset's own splits; None if it has none.
    """

    train: Sequence[RawRow]
    validation: Sequence[RawRow] | None = None
    test: Sequence[RawRow] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A dataset that exists, before its rows are read.

    Attributes:
        read: Function that reads the rows into a store; raises as :func:`alto.data.files.read_file` does.
        identity: Function that returns JSON values which identify the rows and change when the rows change. Takes the
            folder for digests of files.
        num_bytes: Approximate size of the text, in bytes.
        form: Form of the rows, from a preset; ``auto`` otherwise.
        max_length: Number of tokens at which a row is cut, if the task sets none.
    """

    read: Callable[[RowStore], Splits]
    identity: Callable[[Path], Sequence[Any]]
    num_bytes: int
    form: str = "auto"
    max_length: int = DEFAULT_MAX_LENGTH


def open_source(name: str, key: str, keys: DataKeys) -> Source:
    """Find the dataset that ``keys`` call ``name``; an existing file wins over any other meaning.

    Args:
        name: Name of the dataset. If it is the task's own dataset, the task's configuration and splits apply.
        key: The task's key that holds ``name``, for messages.
        keys: Data keys of the task, or of one source of its mixture.

    Raises:
        DataFileNotFoundError: There is no such file, preset or hub dataset.
        DataError: The dataset cannot be reached, or lacks a split.
        UnsupportedError: A package that reads it is not installed.
    """
    is_own = name == keys.dataset
    path = Path(name).expanduser()
    if _exists(path):
        return _file(path, name, key, keys if is_own else None)
    preset = find_preset(name)
    if preset is None:
        if not _is_hub_id(name):
            raise _not_found(name, path, key)
        preset = DatasetPreset(names=(), hub_id=name, form="auto", max_length=DEFAULT_MAX_LENGTH)
    config = keys.dataset_config if is_own else None
    splits = load_hub_dataset(preset.hub_id, config or preset.config, key)
    own_split = keys.dataset_train_split if is_own else None
    train_split = own_split or preset.train_split
    test_split = (keys.dataset_test_split if is_own else None) or preset.test_split

    train = _split(splits, train_split, "dataset_train_split", name)
    validation, test = (splits.get(split) if split != train_split else None for split in ("validation", "test"))
    if test_split is not None:
        test = _split(splits, test_split, "dataset_test_split", name)
    counts = preset.row_counts if own_split is None else None

    def read(store: RowStore) -> Splits:
        if counts is None:
            return Splits(train=train, validation=validation, test=test)
        carved = carve_rows(train, counts, keys.data_seed, store=store)
        return Splits(train=carved[0], validation=carved[1], test=carved[2] if test_split is None else test)

    used = [split for split in (train, validation, test) if split is not None]
    return Source(
        read=read,
        identity=lambda _: [split.identity for split in used],
        num_bytes=sum(split.num_bytes for split in used),
        form=preset.form,
        max_length=preset.max_length,
    )


def is_elsewhere(name: str) -> bool:
    """Return whether ``name`` is not a file on this machine, but may be one on another machine, or a hub dataset."""
    path = Path(name).expanduser()
    return not _exists(path) and (path.is_absolute() or find_preset(name) is not None or _is_hub_id(name))


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # the name is too long for a file
        return False


def _file(path: Path, name: str, key: str, keys: DataKeys | None) -> Source:
    """Return the source of the file ``path``; ``keys`` are given if those about splits apply to the file."""
    if not path.is_file() and not path.is_dir():
        raise DataFileNotFoundError(
            f"{key}: expected a file, found a pipe or device at {path}; save the rows in a file and name that"
        )
    if not path.is_file() and any((path / name).is_file() for name in _SAVED_BY_DATASETS):
        raise DataFileNotFoundError(
            f"{key}: expected a file, found the folder {path}, which save_to_disk of the package datasets has written; "
            f"give the rows in Python, alto.Task(dataset=datasets.load_from_disk({str(path)!r}), …), or write a file "
            "of each split with to_parquet and name that"
        )
    if not path.is_file():
        raise DataFileNotFoundError(
            f"{key}: expected a file, found the folder {path}; name a file in it, or, if a hub dataset is meant, "
            "start ALTO in another folder"
        )
    for field in ("dataset_config", "dataset_train_split", "dataset_test_split"):
        if keys is not None and getattr(keys, field) is not None:
            raise DataError(
                f"{field}: expected a hub dataset, which has configurations and splits, found the file {name}; remove "
                "the key, and name the rows to validate on with validation_dataset"
            )
    return Source(
        read=lambda store: Splits(train=read_file(path, key, store)),
        identity=lambda folder: [str(path), file_digest(path, folder)],
        num_bytes=unpacked_bytes(path),
    )


def _is_hub_id(name: str) -> bool:
    return _HUB_ID.fullmatch(name) is not None and not name.lower().endswith((*FILE_ENDINGS, ".gz"))


def _split(splits: Mapping[str, HubRows], split: str, key: str, name: str) -> HubRows:
    if split not in splits:
        raise DataError(
            f"{key}: expected a split of {name} ({listed(splits)}), found {split!r}; set the key to one of them"
        )
    if not len(splits[split]):
        raise DataError(
            f"{key}: expected at least one row, found none in the split {split} of {name}; name a different split"
        )
    return splits[split]


def _not_found(name: str, path: Path, key: str) -> DataFileNotFoundError:
    near = nearest_preset(name)
    known = ", ".join(preset.names[0] for preset in PRESETS)
    return DataFileNotFoundError(
        f"{key}: expected a file, a hub dataset (owner/name) or one of {known}, found nothing at {path}; "
        + (f"did you mean {near!r}?" if near else "check the path")
    )
