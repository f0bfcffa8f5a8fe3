"""Reads and splits the rows that a task names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from alto.data.convert import (
    LabelReader,
    find_labels,
    label_of,
    to_conversation,
    to_labelled,
    to_labelled_text,
    to_pair,
)
from alto.data.dataset import MEMORY, RowStore
from alto.data.formats import Layout, find_layout
from alto.data.messages import LabelledConversation, Row, unpaired
from alto.data.rows import BadRows, FaultList, RawRow, RowError, listed
from alto.data.source import Source, open_source, sample_rows, split_rows
from alto.data.task_rows import TaskRows
from alto.errors import DataError, DataFormatError
from alto.records import LabelSet
from alto.spec import DataKeys, Task, TrainOn, find_method


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertedRows:
    """The rows of one dataset.

    Attributes:
        rows: The rows that can be used.
        layout: Their form and columns.
        unread_columns: Columns without a role, each with the number of rows that have a value there.
        bad: The rows that were left out; None if there are none.
        labels: Reader of the labels of texts; None if the rows are not labelled texts.
    """

    rows: Sequence[Row]
    layout: Layout
    unread_columns: Mapping[str, int]
    bad: BadRows | None
    labels: LabelReader | None = None


def convert_rows(
    rows: Sequence[RawRow],
    known_form: str,
    keys: DataKeys,
    method: str,
    *,
    key: str = "dataset",
    is_paired: bool | None = None,
    labels: LabelReader | None = None,
    store: RowStore = MEMORY,
) -> ConvertedRows:
    """Convert ``rows``; their form is the task's, or that of the dataset's preset if the task sets none.

    Args:
        rows: Rows of the dataset; they are read more than once.
        known_form: Form of the dataset's preset; ``auto`` if it has none.
        keys: Data keys of the task, or of one source of its mixture.
        key: The task's key that names the dataset, for messages.
        is_paired: Whether the rows have to be pairs. None accepts both kinds, and prefers the kind that the task's
            method needs.
        labels: The labels that texts may have; None allows all labels of the rows.

    Raises:
        BadRowsError: Rows cannot be used and bad rows are not skipped, or no row can be used.
        DataFormatError: See :func:`find_layout` and :func:`find_labels`; or the rows are not of the kind that the
            task's method learns from.
    """
    form = known_form if keys.dataset_format == "auto" and not keys.columns else keys.dataset_format
    faults = FaultList(key)
    if all(row.fault is not None for row in rows):
        for row in rows:
            assert row.fault is not None
            faults.add(row.where, row.fault)
        faults.settle(len(rows), keys.on_bad_row)
    entry = find_method(method).entry
    meant = entry.is_paired if is_paired is None else is_paired
    layout = find_layout(
        rows,
        form,
        keys.columns,
        is_paired=None if entry.is_labelled else meant,
        is_labelled=entry.is_labelled,
        is_classified=bool(entry.problem_types),
    )
    if not entry.is_labelled and is_paired is not None and layout.is_paired != is_paired:
        raise _wrong_kind(layout, method, key)
    if layout.is_classified and labels is None:
        values = [label_of(row, layout) for row in rows if row.fault is None]
        labels = find_labels(values, keys, entry.problem_types, key)
    unread = _UnreadColumns(layout)
    convert = _converter(layout, labels, is_labelled=entry.is_labelled)

    def convert_all() -> Iterator[Row]:
        for row in rows:
            unread.count(row)
            try:
                yield convert(row, layout)
            except RowError as error:
                faults.add_error(error)

    return ConvertedRows(
        rows=store.keep(convert_all()),
        layout=layout,
        unread_columns=unread.counts,
        bad=faults.settle(len(rows), keys.on_bad_row),
        labels=labels,
    )


def _converter(layout: Layout, labels: LabelReader | None, *, is_labelled: bool) -> Callable[[RawRow, Layout], Row]:
    if labels is not None:
        return partial(to_labelled_text, labels=labels)
    if layout.is_paired:
        return to_pair
    return to_labelled if is_labelled else to_conversation


class _UnreadColumns:
    """A counter of values in columns without a role.

    Attributes:
        counts: Number of rows with a value, by column, in the order in which columns first have one.
    """

    def __init__(self, layout: Layout) -> None:
        self._read = {column for _, column in layout.columns}
        self.counts: Counter[str] = Counter()

    def count(self, row: RawRow) -> None:
        empty: tuple[object, ...] = (None, "", [], {})
        self.counts.update(name for name, value in row.values.items() if name not in self._read and value not in empty)


def _wrong_kind(layout: Layout, method: str, key: str) -> DataFormatError:
    """Return the error for rows of the wrong kind, which the method's objective would find only with a loaded model."""
    if not layout.is_paired:
        return DataFormatError(
            f"{key}: expected preference pairs for method {method}, found rows with one reply ({layout}); write "
            "method: sft, or name the columns of the pairs with columns: {prompt: <its column>, chosen: <its column>, "
            "rejected: <its column>}"
        )
    chosen = layout.column("chosen")
    replies = "" if chosen is None else f"; or train on the chosen replies with columns: {{completion: {chosen}}}"
    return DataFormatError(
        f"{key}: expected rows with one reply for method {method}, found preference pairs ({layout}); learn from "
        f"them with method: dpo{replies}"
    )


DEFAULT_VALIDATION_SHARE = 0.1
"""Default share of validation rows, if neither the task nor its dataset defines them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldoutRows:
    """Rows to evaluate an adapter on.

    Attributes:
        name: Name of the rows in results.
        max_length: Number of tokens at which a row is cut.
        train_on: Tokens that the loss is computed on.
        labels: Labels of the task; None if it has none.
    """

    name: str
    rows: Sequence[Row]
    max_length: int
    train_on: TrainOn = "completion"
    labels: LabelSet | None = None


class TaskSources:
    """The datasets that a task names, found but not read yet.

    Raises:
        DataFileNotFoundError, DataError, UnsupportedError: See :func:`open_source`.
    """

    def __init__(self, task: Task) -> None:
        self._task = task
        self._found: dict[tuple[object, ...], Source] = {}
        for name, key, keys in _named_datasets(task):
            self.find(name, key, keys)

    @property
    def name(self) -> str:
        """The dataset as text, for messages."""
        return self._task.dataset_name

    @property
    def num_bytes(self) -> int:
        """Approximate size of the texts, in bytes."""
        return sum(source.num_bytes for source in self._found.values())

    def find(self, name: str, key: str, keys: DataKeys) -> Source:
        """Find a dataset as :func:`open_source` does, but open it only once."""
        place = (name, key, keys.dataset_name, keys.dataset_config, keys.dataset_train_split, keys.dataset_test_split)
        if place not in self._found:
            self._found[place] = open_source(name, key, keys)
        return self._found[place]

    def identity(self, folder: Path) -> list[Any]:
        """Return JSON values that identify the rows, and change when the rows change.

        Args:
            folder: Folder for digests of files.

        Raises:
            DataError: See :func:`alto.data.source.file_digest`.
        """
        return [[*map(str, place), source.identity(folder)] for place, source in self._found.items()]

    def read(self, store: RowStore) -> TaskRows:
        """Read and split the datasets; every source of a mixture is split by itself, with the task's settings.

        Raises:
            BadRowsError: Rows cannot be used and bad rows are not skipped, or no row of a dataset can be used.
            DataError: See :func:`find_layout`, :func:`split_rows`; a dataset cannot be read; or the rows are not of the
                kind that the task's method learns from.
        """
        return _Reader(self._task, self.find, store).task_rows()


def _named_datasets(task: Task) -> Iterator[tuple[str, str, DataKeys]]:
    """Yield name, key and other keys of every dataset of ``task``, training rows first."""
    parts: list[tuple[str, DataKeys]] = [("dataset", task)]
    if task.sources:
        parts = [(f"dataset ({source.name})", task.of_source(source)) for source in task.sources]
    yield from ((keys.dataset_name, key, keys) for key, keys in parts)
    for keys in (*(keys for _, keys in parts), *((task,) if task.sources else ())):
        for key in ("test_dataset", "validation_dataset"):
            if (name := getattr(keys, key)) is not None:
                yield name, key, keys


@dataclass(frozen=True, slots=True)
class _Reader:
    """A reader of the rows of a task into a store."""

    task: Task
    find: Callable[[str, str, DataKeys], Source]
    store: RowStore

    @property
    def method(self) -> str:
        return self.task.method

    def task_rows(self) -> TaskRows:
        task, chain = self.task, self.store.chain
        if not task.sources:
            return self._of_dataset(task, "dataset")
        is_validated_apart = task.validation_dataset is not None
        parts = [
            self._of_dataset(task.of_source(source), f"dataset ({source.name})", is_validated_apart=is_validated_apart)
            for source in task.sources
        ]
        _check_same_labels(parts)
        names = [source.name for source in task.sources]
        validation = chain([part.validation for part in parts])
        test: Sequence[Row] | None = chain([part.test or () for part in parts]) or None
        bad = [bad for part in parts for bad in part.bad_rows]
        of_validation = [(name, len(part.validation)) for name, part in zip(names, parts, strict=True)]
        if task.validation_dataset is not None:
            other = self._of_other(task.validation_dataset, "validation_dataset", task, parts[0])
            validation, of_validation = self._learned(other.rows), []
            bad += [] if other.bad is None else [other.bad]
        if task.test_dataset is not None:
            other = self._of_other(task.test_dataset, "test_dataset", task, parts[0])
            test = self._learned(other.rows)
            bad += [] if other.bad is None else [other.bad]
        unread: Counter[str] = Counter()
        for part in parts:
            unread.update(part.unread_columns)
        return replace(
            parts[0],
            train=chain([part.train for part in parts]),
            validation=validation,
            test=test,
            max_length=task.max_length or max(part.max_length for part in parts),
            unread_columns=dict(unread),
            bad_rows=tuple(bad),
            train_sources=tuple((name, len(part.train)) for name, part in zip(names, parts, strict=True)),
            validation_sources=tuple(of_validation),
        )

    def _of_dataset(self, keys: DataKeys, key: str, *, is_validated_apart: bool = False) -> TaskRows:
        """Read the rows of one dataset.

        Args:
            keys: Data keys of the task, or of one source of its mixture.
            key: The task's key that names the dataset, for messages.
            is_validated_apart: Whether another dataset holds the validation rows, so that all rows are trained.
        """
        source = self.find(keys.dataset_name, key, keys)
        splits = source.read(self.store)
        rows = sample_rows(splits.train, keys.max_samples, keys.data_seed, store=self.store)
        converted = convert_rows(
            rows,
            source.form,
            keys,
            self.method,
            key=key,
            is_paired=find_method(self.method).entry.is_paired,
            store=self.store,
        )
        train, layout, bad = converted.rows, converted.layout, [converted.bad]
        num_rows, test = len(train), None
        if keys.test_split is not None:
            train, test = split_rows(train, keys.test_split, keys.data_seed, key="test_split", store=self.store)
        elif keys.test_dataset is not None:
            other = self._of_other(keys.test_dataset, "test_dataset", keys, converted)
            test = other.rows
            bad.append(other.bad)
        validation: Sequence[Row] = []
        if is_validated_apart:
            pass
        elif keys.validation_dataset is not None:
            other = self._of_other(keys.validation_dataset, "validation_dataset", keys, converted)
            validation = other.rows
            bad.append(other.bad)
        elif splits.validation is not None and keys.validation_split is None:
            other = self._convert_like(splits.validation, source, keys, key, converted)
            validation = other.rows
            bad.append(other.bad)
        else:
            share = (keys.validation_split or DEFAULT_VALIDATION_SHARE) * num_rows / len(train)
            train, validation = split_rows(train, share, keys.data_seed, store=self.store)
        return TaskRows(
            train=self._learned(train),
            validation=self._learned(validation),
            test=None if test is None else self._learned(test),
            layout=layout,
            max_length=keys.max_length or source.max_length,
            unread_columns=converted.unread_columns,
            bad_rows=tuple(one for one in bad if one is not None),
            on_bad_row=keys.on_bad_row,
            train_on=keys.train_on,
            labels=converted.labels,
            store=self.store,
        )

    def _of_other(self, name: str, key: str, keys: DataKeys, like: TaskRows | ConvertedRows) -> ConvertedRows:
        """Read the dataset that the task names under ``key``, as rows of the same kind and with the same labels as
        ``like``; if it has a validation or test split (whichever ``key`` asks for), only that split."""
        source = self.find(name, key, keys)
        splits = source.read(self.store)
        own = splits.validation if key == "validation_dataset" else splits.test
        rows = splits.train if own is None else own
        return self._convert_like(rows, source, keys, key, like)

    def _convert_like(
        self, rows: Sequence[RawRow], source: Source, keys: DataKeys, key: str, like: TaskRows | ConvertedRows
    ) -> ConvertedRows:
        """Convert ``rows`` of ``source`` to rows of the same kind and with the same labels as ``like``."""
        return convert_rows(
            rows,
            source.form,
            keys,
            self.method,
            key=key,
            is_paired=like.layout.is_paired,
            labels=like.labels,
            store=self.store,
        )

    def _learned(self, rows: Sequence[Row]) -> Sequence[Row]:
        return _learned(rows, self.method, self.store)


def read_heldout_rows(task: Task, dataset: str | None) -> HeldoutRows:
    """Read rows to evaluate a finished adapter on; if possible, rows that were not used for training or selection.

    Args:
        dataset: A file, a preset or a hub dataset, whose test split is used if it has one. None uses the task's test
            rows; if it sets none, the test split of its dataset; if there is none, the task's validation rows.

    Raises:
        DataError: See :func:`open_source`, :meth:`TaskSources.read`.
    """
    name = dataset or task.dataset_name
    if dataset is None and (task.sources or task.test_dataset is not None or task.test_split is not None):
        return _own_heldout_rows(task)
    source = open_source(name, "dataset", task)
    splits = source.read(MEMORY)
    if splits.test is not None:
        name, found = f"{name} (test split)", convert_rows(splits.test, source.form, task, task.method)
    elif dataset is None:
        return _own_heldout_rows(task)
    else:
        found = convert_rows(splits.train, source.form, task, task.method)
    if found.bad is not None:
        name += f" ({found.bad.num_bad:,} bad rows left out)"
    return HeldoutRows(
        name=name,
        rows=_wanted(_learned(found.rows, task.method)),
        max_length=task.max_length or source.max_length,
        train_on=task.train_on,
        labels=task.label_set,
    )


def _own_heldout_rows(task: Task) -> HeldoutRows:
    own = TaskSources(task).read(MEMORY)
    if own.test:
        name, rows = f"{task.test_dataset or task.dataset_name} (test rows)", own.test
    elif task.refit is None:
        name, rows = f"{task.dataset_name} (validation rows)", own.validation
    else:
        raise DataError(
            "dataset: expected rows that the adapter was not trained on, found a refit, which was also trained on the "
            "validation rows; name other rows with --dataset"
        )
    return HeldoutRows(
        name=name,
        rows=_wanted(rows),
        max_length=own.max_length,
        train_on=task.train_on,
        labels=task.label_set,
    )


def _check_same_labels(parts: Sequence[TaskRows]) -> None:
    """Check that the sources of a mixture have the same labels."""
    found = {part.labels.labels: None for part in parts if part.labels is not None}
    if len(found) > 1:
        raise DataFormatError(
            "dataset: expected sources with the same labels, found "
            f"{' and '.join(listed(labels.names) for labels in found)}; name all labels with id2label"
        )


def _learned(rows: Sequence[Row], method: str, store: RowStore = MEMORY) -> Sequence[Row]:
    """Return ``rows`` as ``method`` learns from them.

    Call it after rows are split, so that both replies to a prompt are in the same split."""
    return store.keep(unpaired(rows)) if find_method(method).entry.is_labelled else rows


def _wanted(rows: Sequence[Row]) -> list[Row]:
    """Return ``rows`` without undesirable replies and without labels: an adapter is evaluated on replies that it should
    give."""
    return [
        row.unlabelled if isinstance(row, LabelledConversation) else row
        for row in rows
        if not isinstance(row, LabelledConversation) or row.is_desirable
    ]
