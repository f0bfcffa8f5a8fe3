"""Mixtures: datasets of several sources, from which each job draws rows by its own weights."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field, field_validator

from alto.base import quoted
from alto.errors import SpecError
from alto.spec.data_forms import RowFormName, check_columns
from alto.spec.keys import canonical_keys
from alto.spec.validation import SpecModel, check_path, is_finite_number

MIXTURE_WEIGHTS = "mixture_weights"
"""The field of a job that holds its mixture weights."""

Weights = tuple[tuple[str, float], ...]
"""The share of each source, by its name; the shares add up to 1."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_MAX_SOURCES = 64
_ALIASES = {
    "dataset": "path",
    "split": "dataset_train_split",
    "test_split": "dataset_test_split",
    "config": "dataset_config",
    "format": "dataset_format",
}


class MixtureSource(SpecModel):
    """One source of a mixture, with the keys that a task without a mixture has for its dataset.

    Attributes:
        path: A file, a hub dataset or a preset.
        name: Name of the source in weights, events and reports; the default is the file's name without suffixes.
        weight: Weight of the source for jobs that set no ``mixture_weights``.
        dataset_config, dataset_train_split, dataset_test_split, dataset_format, columns, validation_dataset: Same as
            the task's keys.
    """

    path: str = Field(min_length=1, description="a file, a hub dataset or a preset")
    name: str = Field(min_length=1, max_length=40, description="name of the source")
    weight: float = Field(
        default=1.0, ge=0, le=1e6, description="weight of the source, if a job sets no mixture_weights"
    )
    dataset_config: str | None = Field(default=None, min_length=1, description="configuration of a hub dataset")
    dataset_train_split: str | None = Field(default=None, min_length=1, description="split to train on")
    dataset_test_split: str | None = Field(default=None, min_length=1, description="split with held-out rows")
    dataset_format: RowFormName | None = Field(
        default=None, description="format of the rows; by default that of the task"
    )
    columns: Mapping[str, str] = Field(default={}, description="names of the columns by role")
    validation_dataset: str | None = Field(default=None, min_length=1, description="validation rows")

    @field_validator("path", "validation_dataset", mode="before")
    @classmethod
    def _accept_paths(cls, value: object) -> object:
        return os.fspath(value) if isinstance(value, os.PathLike) else value

    @field_validator("path", "validation_dataset")
    @classmethod
    def _check_path(cls, value: str | None) -> str | None:
        if value is not None:
            check_path(value)
        return value

    @field_validator("name")
    @classmethod
    def _check_name(cls, value: str) -> str:
        if not _NAME.fullmatch(value):
            raise ValueError(
                f"should be letters, digits, '.', '_' and '-', the first a letter or digit, found {quoted(value)}. "
                "Choose another name."
            )
        return value

    @field_validator("columns", mode="before")
    @classmethod
    def _check_columns(cls, columns: object) -> object:
        return check_columns(columns)


def parse_sources(given: object, default_name: Any) -> tuple[MixtureSource, ...]:
    """Return the sources of a task whose ``dataset`` is a list.

    Args:
        given: The user's list.
        default_name: A function that makes a name from a path.

    Raises:
        SpecError: An entry is not a source, two have the same name, or no weight is above 0.
        UnknownKeyError, ConflictingKeysError: See :func:`alto.spec.keys.canonical_keys`.
    """
    assert isinstance(given, list | tuple)
    if not 1 <= len(given) <= _MAX_SOURCES:
        raise SpecError(
            f"dataset should be one dataset, or a list of 1 to {_MAX_SOURCES} sources, found {len(given)}. Write for "
            "example [{path: maths.jsonl, weight: 0.7}, {path: chat.jsonl, weight: 0.3}]."
        )
    sources = tuple(_parsed(item, index, default_name) for index, item in enumerate(given))
    names = [source.name for source in sources]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise SpecError(f"dataset should give every source a different name, found {quoted(twice)} twice. Set 'name'.")
    if not any(source.weight for source in sources):
        raise SpecError("dataset should have a source with a weight above 0, found none. Raise one.")
    return sources


def _parsed(item: object, index: int, default_name: Any) -> MixtureSource:
    where = f"dataset[{index}]"
    if isinstance(item, MixtureSource):
        return item
    if not isinstance(item, Mapping):
        raise SpecError(
            f"{where} should be a mapping with a path, found {quoted(item)}. Write for example "
            "{path: maths.jsonl, weight: 0.7}."
        )
    values = canonical_keys(item, fields=tuple(MixtureSource.model_fields), aliases=_ALIASES, where=where)
    values.setdefault("name", default_name(values.get("path"))[:40])
    if isinstance(values.get("weight"), int) and not isinstance(values["weight"], bool):
        values["weight"] = float(values["weight"])
    try:
        return MixtureSource(**values)
    except SpecError as error:
        raise SpecError(f"In {where}: {error}") from None


def normalised(value: object) -> Weights:
    """Return weights by name, scaled so that they add up to 1.

    Args:
        value: A mapping of names to weights, or a list of such pairs.

    Raises:
        ValueError: ``value`` is neither, a weight is negative or not finite, or all are 0.
    """
    pairs: Sequence[Any] = tuple(value.items()) if isinstance(value, Mapping) else ()
    if isinstance(value, list | tuple):
        pairs = value
    for pair in pairs:
        is_pair = isinstance(pair, list | tuple) and len(pair) == 2 and isinstance(pair[0], str)
        if not is_pair or isinstance(pair[1], bool) or not isinstance(pair[1], int | float):
            pairs = ()
    if not pairs or len({name for name, _ in pairs}) < len(pairs):
        raise ValueError(
            f"should map names of sources to weights, found {quoted(value)}. Write for example "
            "{maths: 0.7, chat: 0.3}."
        )
    are_weights = all(is_finite_number(weight) and weight >= 0 for _, weight in pairs)
    total = sum(float(weight) for _, weight in pairs) if are_weights else 0.0
    if not 0 < total < math.inf:
        raise ValueError(
            f"should hold finite weights >= 0, at least one of them above 0, found {quoted(dict(pairs))}. Correct them."
        )
    if math.isclose(total, 1.0, rel_tol=1e-12):
        return tuple((name, float(weight)) for name, weight in pairs)
    return tuple((name, weight / total) for name, weight in pairs)


def ordered(weights: Weights, sources: Sequence[MixtureSource]) -> Weights:
    """Return the weights of a job in the order of its task's sources.

    Raises:
        SpecError: The names are not exactly those of the sources, or the task has only one dataset.
    """
    if not sources:
        raise SpecError(
            f"{MIXTURE_WEIGHTS} should be set only if 'dataset' is a list of sources, found one dataset. Remove the "
            "key."
        )
    by_name, expected = dict(weights), [source.name for source in sources]
    if by_name.keys() != set(expected):
        raise SpecError(
            f"{MIXTURE_WEIGHTS} should have a weight for every source ({', '.join(expected)}), found "
            f"{', '.join(map(quoted, by_name))}. Correct the names; 0 leaves a source out."
        )
    return tuple((name, by_name[name]) for name in expected)
