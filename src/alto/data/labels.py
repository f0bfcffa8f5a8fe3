"""Labels of texts: finds the labels in a task's rows, and reads the label of one row."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from alto.data.rows import FaultKind, listed
from alto.errors import DataFormatError
from alto.records import LabelSet, ProblemType, RowLabel
from alto.spec.data_keys import DataKeys

__all__ = ["LabelError", "LabelReader", "find_labels"]

_NEEDED_LABELS = 2


class LabelError(ValueError):
    """A value that is not a label of the task; the message completes "expected … to be"."""

    def __init__(self, expected: str, kind: FaultKind = FaultKind.WRONG_VALUE) -> None:
        super().__init__(expected)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class LabelReader:
    """A reader of the labels of rows.

    Attributes:
        labels: All labels of the task.
        reads_indices: Whether a whole number is read as the index of a label; otherwise only names are read.
    """

    labels: LabelSet
    reads_indices: bool

    def read(self, value: object) -> RowLabel:
        """Return the label that ``value`` of a row means.

        Raises:
            LabelError: It means none.
        """
        if _is_missing(value):
            raise LabelError("a label", FaultKind.NO_LABEL)
        if self.labels.problem_type == "regression":
            return _numbers(value, self.labels.num_labels)
        if self.labels.problem_type == "single_label_classification":
            return self._index(value)
        return self._marks(value)

    def _index(self, value: object) -> int:
        expected = f"one of {listed(self.labels.names)}"
        number, name = _number(value), _name(value)
        if name in self.labels.names:
            return self.labels.names.index(name)
        if self.reads_indices and number is not None and number in range(self.labels.num_labels):
            return int(number)
        raise LabelError(expected, FaultKind.UNKNOWN_LABEL if name is not None else FaultKind.WRONG_VALUE)

    def _marks(self, value: object) -> tuple[float, ...]:
        """Return a 1 for every label that a row has, and a 0 for others; ``value`` lists names, or 0s and 1s."""
        count = self.labels.num_labels
        if not isinstance(value, list):
            raise LabelError("a list of labels")
        numbers = [_number(item) for item in value]
        if value and all(number is not None for number in numbers):
            if len(numbers) != count or not all(number in (0, 1) for number in numbers):
                raise LabelError(f"a list of names, or of {count} numbers that are 0 or 1")
            return tuple(float(number or 0) for number in numbers)
        found = {self._index(item) for item in value}
        return tuple(float(index in found) for index in range(count))


def find_labels(values: Sequence[object], keys: DataKeys, allowed: Sequence[ProblemType], key: str) -> LabelReader:
    """Find the labels of a dataset.

    Names are sorted. Whole numbers are the indices of labels, and all from 0 to K - 1 have to occur unless
    ``num_labels`` is set; CSV files hold them as text. Values that cannot be labels are ignored: they are faults of
    their rows.

    Args:
        values: The value of every row in the label column.
        keys: Data keys of the task, or of one source of its mixture.
        allowed: Problem types that the task's method can learn.
        key: The task's key that names the dataset, for messages.

    Raises:
        DataFormatError: The labels do not fit the method or the keys, or there are fewer than two.
    """
    present = [value for value in values if not _is_missing(value)]
    if not present:
        raise DataFormatError(
            f"{key}: expected rows with labels, found none; name the column with columns: {{label: <its column>}}"
        )
    problem_type = keys.problem_type or _problem_type(present, allowed)
    if problem_type == "regression":
        names = _output_names(present, keys)
    else:
        names = keys.id2label or _class_names(present, keys, problem_type, key)
    return LabelReader(
        LabelSet(problem_type=problem_type, names=names),
        # If the names of labels look like numbers, a number in a row is a name.
        reads_indices=_are_numbers(present) and all(_number(name) is None for name in names),
    )


def _problem_type(present: Sequence[object], allowed: Sequence[ProblemType]) -> ProblemType:
    if len(allowed) == 1:
        return allowed[0]
    is_list = any(isinstance(value, list) for value in present)
    return "multi_label_classification" if is_list else "single_label_classification"


def _output_names(present: Sequence[object], keys: DataKeys) -> tuple[str, ...]:
    """Return the names of the outputs of a regression."""
    first = present[0]
    count = keys.num_labels or (len(first) if isinstance(first, list) else 1)
    return keys.id2label or _default_names(count)


def _class_names(present: Sequence[object], keys: DataKeys, problem_type: ProblemType, key: str) -> tuple[str, ...]:
    if problem_type == "multi_label_classification":
        vector = next((value for value in present if isinstance(value, list) and value), [])
        if vector and all(_number(item) is not None for item in vector):
            return _default_names(keys.num_labels or len(vector))
        present = [item for value in present if isinstance(value, list) for item in value]
    if _are_numbers(present):
        return _numbered_names([number for value in present if (number := _number(value)) is not None], keys, key)
    names = tuple(sorted({name for value in present if isinstance(value, str | bool) and (name := _name(value))}))
    return _checked(names, keys, key)


def _numbered_names(numbers: Sequence[float], keys: DataKeys, key: str) -> tuple[str, ...]:
    fraction = next((number for number in numbers if not float(number).is_integer()), None)
    if fraction is not None:
        raise DataFormatError(
            f"{key}: expected labels that are names or whole numbers, found {fraction}; write method: regression to "
            "learn numbers"
        )
    indices = sorted({int(number) for number in numbers if number >= 0})
    count = keys.num_labels or len(indices)
    if keys.num_labels is None and indices != list(range(count)):
        raise DataFormatError(
            f"{key}: expected labels that are all the numbers from 0 to one less than their count, found "
            f"{listed(map(str, indices))}; set num_labels if some do not occur in the rows, or write names"
        )
    return _checked(_default_names(count), keys, key)


def _checked(names: tuple[str, ...], keys: DataKeys, key: str) -> tuple[str, ...]:
    if len(names) < _NEEDED_LABELS:
        raise DataFormatError(
            f"{key}: expected at least two different labels, found {listed(names)}; check the column with columns: "
            "{label: <its column>}, or name all labels with id2label"
        )
    if keys.num_labels is not None and keys.num_labels != len(names):
        raise DataFormatError(
            f"{key}: expected num_labels, {keys.num_labels}, to be the number of different labels, found "
            f"{len(names)}: {listed(names)}; name all labels with id2label if some do not occur in the rows"
        )
    return names


def _default_names(count: int) -> tuple[str, ...]:
    return tuple(f"LABEL_{index}" for index in range(count))


def _numbers(value: object, count: int) -> tuple[float, ...]:
    numbers = [_number(item) for item in (value if isinstance(value, list) else [value])]
    if len(numbers) != count or any(number is None for number in numbers):
        raise LabelError("a finite number" if count == 1 else f"a list of {count} finite numbers")
    return tuple(float(number) for number in numbers if number is not None)


def _is_missing(value: object) -> bool:
    is_nan = isinstance(value, float) and math.isnan(value)
    return value is None or is_nan or (isinstance(value, str) and not value.strip())


def _are_numbers(present: Sequence[object]) -> bool:
    """Return whether most labels, including those in lists, are numbers."""
    items = [item for value in present for item in (value if isinstance(value, list) else [value])]
    return 2 * sum(_number(item) is not None for item in items) > len(items)


def _name(value: object) -> str | None:
    """Return the name of a label: a text, a whole number, or a truth value as JSON writes it; None for others."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(value).strip() if isinstance(value, str | int) else None


def _number(value: object) -> float | None:
    """Return a finite number, which may be written as a text; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, str | int | float) or "_" in str(value):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None
