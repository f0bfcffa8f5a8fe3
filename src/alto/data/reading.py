"""Reads and splits the rows that a task names, or finds their tokens in the token cache."""

from __future__ import annotations

import contextlib
import datetime
import json
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from alto.base import cache_home, replace_file
from alto.data.convert import (
    LabelReader,
    find_labels,
    have_labels,
    label_of,
    to_conversation,
    to_labelled,
    to_labelled_text,
    to_pair,
)
from alto.data.dataset import MEMORY, DiskStore, HeadStore, RowStore, writing_cache
from alto.data.digests import changed, code_digest, digest_of_json, tokenizer_digest
from alto.data.formats import Layout, find_layout
from alto.data.messages import Conversation, Row, unpaired
from alto.data.rows import BadRows, FaultList, RawRow, RowError, listed
from alto.data.source import Source, open_source, sample_rows, split_rows
from alto.data.task_data import TaskData
from alto.data.token_cache import TokenCache
from alto.data.tokenize import TaskRows
from alto.errors import DataError, DataFormatError, RunWriteError, UnsupportedError
from alto.records import LabelSet, ModelLimits
from alto.spec import REWARD_ARGUMENTS, DataKeys, Task, TrainOn, find_method

DEFAULT_VALIDATION_SPLIT = 0.1
"""Default share of validation rows, if neither the task nor its dataset defines them."""

LARGE_BYTES = 256 * 2**20
"""Size of a task's texts from which ``token_cache: auto`` means ``disk``, in bytes."""

SLOW_BYTES = 4 * 2**20
"""Size of a task's texts from which ``token_cache: auto`` keeps tokens on disk if possible, in bytes: one core
tokenises about this much in ten seconds."""

_EMPTY: tuple[object, ...] = (None, "", [], {})
"""Values of a column that have nothing to read."""

_WITHOUT_EFFECT = {"name", "model", "chat_template", "token_cache"}
"""Data keys that do not change the rows. The chat template belongs to the tokenizer."""


def read_task_rows(task: Task, *, head: HeadStore | None = None) -> TaskRows | CachedRows:
    """Read and split the rows of ``task``.

    Every source of a mixture is split by itself, with the task's ``validation_split`` and ``test_split``. Rows whose
    tokens are in the token cache, and that were read without an error, are not read again.

    Args:
        head: Store that takes only the first rows of every dataset, used if tokenising all rows would take long. Not
            used for labelled texts, since their labels come from all rows.

    Raises:
        BadRowsError: Rows cannot be used and bad rows are not skipped, or no row of a dataset can be used.
        DataError: See :func:`alto.data.source.open_source`, :meth:`TaskSources.read`.
        RunWriteError: The token cache cannot be written; :class:`DiskFullError` if the disk is full.
    """
    sources = TaskSources(task)
    if find_method(task.method).entry.problem_types:
        return sources.read(MEMORY)  # the token cache does not store labels of texts
    if head is not None and sources.num_bytes >= SLOW_BYTES:
        return sources.read(head)
    is_auto, num_bytes = task.token_cache == "auto", sources.num_bytes
    needs_disk = task.token_cache == "disk" or (is_auto and num_bytes >= LARGE_BYTES)
    if needs_disk or (is_auto and num_bytes >= SLOW_BYTES):
        try:
            return CachedRows(task, sources, TokenCache(cache_home() / "tokens"), needs_disk=needs_disk)
        except RunWriteError as error:
            if needs_disk:
                raise
            _warn(error)
    return sources.read(MEMORY)


def _warn(error: Exception) -> None:
    warnings.warn(f"The tokens are held in memory, and computed again at every start: {error}", stacklevel=3)


class TaskSources:
    """The datasets that a task names, found but not read yet.

    Raises:
        DataFileNotFoundError, DataError, UnsupportedError: See :func:`open_source`.
    """

    def __init__(self, task: Task) -> None:
        self.task = task
        self._opened: dict[tuple[object, ...], Source] = {}
        parts: list[tuple[str, DataKeys]] = [("dataset", task)]
        if task.sources:
            parts = [(f"dataset ({source.name})", task.of_source(source)) for source in task.sources]
        for key, keys in parts:
            self.find(keys.dataset_name, key, keys)
        for keys in (*(keys for _, keys in parts), *((task,) if task.sources else ())):
            for key in ("test_dataset", "validation_dataset"):
                if (name := getattr(keys, key)) is not None:
                    self.find(name, key, keys)

    @property
    def num_bytes(self) -> int:
        """Approximate size of the texts, in bytes."""
        return sum(source.num_bytes for source in self._opened.values())

    def find(self, name: str, key: str, keys: DataKeys) -> Source:
        """Find a dataset as :func:`open_source` does, but open it only once."""
        place = (name, key, keys.dataset_name, keys.dataset_config, keys.dataset_train_split, keys.dataset_test_split)
        if place not in self._opened:
            self._opened[place] = open_source(name, key, keys)
        return self._opened[place]

    def identity(self, folder: Path) -> list[Any]:
        """Return JSON values that identify the rows, and change when the rows change.

        Args:
            folder: Folder for digests of files.

        Raises:
            DataError: See :func:`alto.data.digests.file_digest`.
        """
        return [[*map(str, place), source.identity(folder)] for place, source in self._opened.items()]

    def read(self, store: RowStore) -> TaskRows:
        """Read and split the datasets; every source of a mixture is split by itself, with the task's settings.

        Raises:
            BadRowsError: Rows cannot be used and bad rows are not skipped, or no row of a dataset can be used.
            DataError: See :func:`find_layout`, :func:`split_rows`; a dataset cannot be read; or the rows are not of the
                kind that the task's method learns from.
        """
        reader, task = _Reader(self.task, self.find, store, self.task.keeps_columns), self.task
        if not task.sources:
            return reader.of_dataset(task, "dataset")
        is_validated_apart = task.validation_dataset is not None
        parts = [
            reader.of_dataset(task.of_source(source), f"dataset ({source.name})", is_validated_apart=is_validated_apart)
            for source in task.sources
        ]
        _check_same_labels(parts)
        names = [source.name for source in task.sources]
        validation = store.chain([part.validation for part in parts])
        test: Sequence[Row] | None = store.chain([part.test or () for part in parts]) or None
        bad = [bad for part in parts for bad in part.bad_rows]
        validation_sources = _sizes(names, [part.validation for part in parts])
        if task.validation_dataset is not None:
            other = reader.of_other(task.validation_dataset, "validation_dataset", task, parts[0])
            validation, validation_sources = reader.learned(other.rows), ()
            bad += other.bad_rows
        if task.test_dataset is not None:
            other = reader.of_other(task.test_dataset, "test_dataset", task, parts[0])
            test = reader.learned(other.rows)
            bad += other.bad_rows
        unread: Counter[str] = Counter()
        for part in parts:
            unread.update(part.unread_columns)
        return replace(
            parts[0],
            train=store.chain([part.train for part in parts]),
            validation=validation,
            test=test,
            max_length=task.max_length or max(part.max_length for part in parts),
            unread_columns=unread,
            bad_rows=tuple(bad),
            train_sources=_sizes(names, [part.train for part in parts]),
            validation_sources=validation_sources,
        )


def _sizes(names: Sequence[str], parts: Sequence[Sequence[Row]]) -> tuple[tuple[str, int], ...]:
    return tuple(zip(names, map(len, parts), strict=True))


def _check_same_labels(parts: Sequence[TaskRows]) -> None:
    """Check that the sources of a mixture have the same labels."""
    found = {part.labels.labels: None for part in parts if part.labels is not None}
    if len(found) > 1:
        raise DataFormatError(
            "dataset: expected sources with the same labels, found "
            f"{' and '.join(listed(labels.names) for labels in found)}; name all labels with id2label"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Converted:
    """The converted rows of a dataset, or of one of its splits; see :class:`TaskRows`."""

    rows: Sequence[Row]
    layout: Layout
    labels: LabelReader | None
    unread_columns: Mapping[str, int]
    bad_rows: tuple[BadRows, ...]


@dataclass(frozen=True, slots=True)
class _Reader:
    """A reader of single datasets of a task into a store.

    Attributes:
        find: Function that finds a dataset by its name, the task's key that names it, and the other data keys.
        keeps_columns: Whether rows keep the columns that reward functions get.
    """

    task: Task
    find: Callable[[str, str, DataKeys], Source]
    store: RowStore
    keeps_columns: bool = False

    def of_dataset(self, keys: DataKeys, key: str, *, is_validated_apart: bool = False) -> TaskRows:
        """Read and split the rows of one dataset.

        Args:
            keys: Data keys of the task, or of one source of its mixture.
            key: The task's key that names the dataset, for messages.
            is_validated_apart: Whether another dataset holds the validation rows, so that all rows are trained.
        """
        source = self.find(keys.dataset_name, key, keys)
        splits = source.read(self.store)
        rows = sample_rows(splits.train, keys.max_samples, keys.data_seed, store=self.store)
        own = self.converted(rows, source, keys, key, is_paired=find_method(self.task.method).entry.is_paired)
        train, bad = own.rows, [*own.bad_rows]
        num_rows, test = len(train), None
        if keys.test_split is not None:
            train, test = split_rows(train, keys.test_split, keys.data_seed, key="test_split", store=self.store)
        elif keys.test_dataset is not None:
            other = self.of_other(keys.test_dataset, "test_dataset", keys, own)
            test = other.rows
            bad += other.bad_rows
        validation: Sequence[Row] = []
        if is_validated_apart:
            pass
        elif keys.validation_dataset is not None:
            other = self.of_other(keys.validation_dataset, "validation_dataset", keys, own)
            validation = other.rows
            bad += other.bad_rows
        elif splits.validation is not None and keys.validation_split is None:
            other = self._converted_like(own, splits.validation, source, keys, key)
            validation = other.rows
            bad += other.bad_rows
        else:
            fraction = (keys.validation_split or DEFAULT_VALIDATION_SPLIT) * num_rows / len(train)
            train, validation = split_rows(train, fraction, keys.data_seed, store=self.store)
        return TaskRows(
            train=self.learned(train),
            validation=self.learned(validation),
            test=None if test is None else self.learned(test),
            layout=own.layout,
            max_length=keys.max_length or source.max_length,
            unread_columns=own.unread_columns,
            bad_rows=tuple(bad),
            on_bad_row=keys.on_bad_row,
            train_on=keys.train_on,
            labels=own.labels,
            store=self.store,
        )

    def of_other(self, name: str, key: str, keys: DataKeys, like: _Converted | TaskRows) -> _Converted:
        """Read the dataset that the task names under ``key``: its validation or test split, as ``key`` says, or all
        rows without such a split. The rows are of the same kind and have the same labels as ``like``."""
        source = self.find(name, key, keys)
        splits = source.read(self.store)
        own = splits.validation if key == "validation_dataset" else splits.test
        return self._converted_like(like, splits.train if own is None else own, source, keys, key)

    def _converted_like(
        self, like: _Converted | TaskRows, rows: Sequence[RawRow], source: Source, keys: DataKeys, key: str
    ) -> _Converted:
        return self.converted(rows, source, keys, key, is_paired=like.layout.is_paired, labels=like.labels)

    def converted(
        self,
        rows: Sequence[RawRow],
        source: Source,
        keys: DataKeys,
        key: str,
        *,
        is_paired: bool | None = None,
        labels: LabelReader | None = None,
        is_unlabelled: bool = False,
    ) -> _Converted:
        """Return converted rows of ``source``; their form is the task's, or else that of the dataset's preset.

        Args:
            rows: Rows of the dataset; they are read more than once.
            keys: Data keys of the task, or of one source of its mixture.
            key: The task's key that names the dataset, for messages.
            is_paired: Whether the rows have to be pairs. None accepts both kinds, and prefers the kind that the task's
                method needs.
            labels: The labels that texts may have; None allows all labels of the rows.
            is_unlabelled: Whether the texts have no labels, though the task's method learns labels.

        Raises:
            BadRowsError: Rows cannot be used and bad rows are not skipped, or no row can be used.
            DataFormatError: See :func:`find_layout` and :func:`find_labels`; or the rows are not of the kind that the
                task's method learns from.
        """
        faults = FaultList(key)
        if all(row.fault is not None for row in rows):
            for row in rows:
                assert row.fault is not None
                faults.add(row.where, row.fault)
            faults.settle(len(rows), keys.on_bad_row)
        entry = find_method(self.task.method).entry
        layout = self._layout_of(rows, source, keys, key, is_paired, is_unlabelled)
        if layout.is_classified and labels is None and not is_unlabelled:
            values = [label_of(row, layout) for row in rows if row.fault is None]
            labels = find_labels(values, keys, entry.problem_types, key)
        convert = _converter(layout, labels, is_labelled=entry.is_labelled)
        known, unread = {column for _, column in layout.columns}, Counter[str]()
        kept_columns = _argument_columns(rows, layout, key) if self.keeps_columns else ()

        def convert_all() -> Iterator[Row]:
            for row in rows:
                if not kept_columns:
                    unread.update(
                        name for name, value in row.values.items() if name not in known and value not in _EMPTY
                    )
                try:
                    found = convert(row, layout)
                except RowError as error:
                    faults.add_error(error)
                    continue
                if kept_columns and isinstance(found, Conversation):
                    values = {name: row.values.get(name) for name in kept_columns}
                    found = found.with_columns(json.dumps(values, default=str))
                yield found

        kept = self.store.keep(convert_all())  # fills ``unread`` and ``faults``
        bad = faults.settle(len(rows), keys.on_bad_row)
        return _Converted(
            rows=kept, layout=layout, labels=labels, unread_columns=unread, bad_rows=() if bad is None else (bad,)
        )

    def _layout_of(
        self, rows: Sequence[RawRow], source: Source, keys: DataKeys, key: str, paired: bool | None, unlabelled: bool
    ) -> Layout:
        form = source.form if keys.dataset_format == "auto" and not keys.columns else keys.dataset_format
        entry = find_method(self.task.method).entry
        meant = entry.is_paired if paired is None else paired
        layout = find_layout(
            rows,
            form,
            keys.columns,
            is_paired=None if entry.is_labelled else meant,
            is_labelled=entry.is_labelled,
            is_classified=bool(entry.problem_types),
            is_unlabelled=unlabelled,
        )
        if not entry.is_labelled and paired is not None and layout.is_paired != paired:
            raise _wrong_kind(layout, self.task.method, key)
        return layout

    def learned(self, rows: Sequence[Row]) -> Sequence[Row]:
        """Return ``rows`` as the task's method learns from them.

        Call it after rows are split, so that both replies to a prompt are in the same split."""
        return self.store.keep(unpaired(rows)) if find_method(self.task.method).entry.is_labelled else rows


def _argument_columns(rows: Sequence[RawRow], layout: Layout, key: str) -> tuple[str, ...]:
    """Return the names of the columns that reward functions get: all without a role, and the reply's column if it has
    a name of its own, such as ``answer``.

    Raises:
        DataFormatError: A column without a role has the name of another argument of reward functions.
    """
    known = {column for _, column in layout.columns}
    found = tuple(dict.fromkeys(name for row in rows for name in row.values if name not in known))
    for name in found:
        if name in REWARD_ARGUMENTS:
            raise DataFormatError(
                f"{key}: expected columns whose names are not arguments that every reward function gets "
                f"({', '.join(REWARD_ARGUMENTS)}), found {name!r}; rename the column, or give it a role, for example "
                f"with columns: {{completion: {name}}}"
            )
    reply = layout.column("completion")
    return found if reply in (None, "completion", *REWARD_ARGUMENTS) else (*found, reply)


def _converter(layout: Layout, labels: LabelReader | None, *, is_labelled: bool) -> Callable[[RawRow, Layout], Row]:
    if layout.is_classified:
        return partial(to_labelled_text, labels=labels)
    if layout.is_paired:
        return to_pair
    return to_labelled if is_labelled else to_conversation


def _wrong_kind(layout: Layout, method: str, key: str) -> DataFormatError:
    """Return the error for rows of the wrong kind, which the method's objective would find only with a loaded model."""
    if not layout.is_paired:
        return DataFormatError(
            f"{key}: expected preference pairs for method {method}, found rows with one reply ({layout}); set "
            "method: sft, or name the columns of the pairs with columns: {prompt: <its column>, chosen: <its column>, "
            "rejected: <its column>}"
        )
    chosen = layout.column("chosen")
    replies = "" if chosen is None else f"; or train on the chosen replies with columns: {{completion: {chosen}}}"
    return DataFormatError(
        f"{key}: expected rows with one reply for method {method}, found preference pairs ({layout}); learn from "
        f"them with method: dpo{replies}"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    """Facts that are kept about rows that were read without an error."""

    layout: Layout
    max_length: int


_CODEC = TypeAdapter(_Known)


class CachedRows:
    """The rows of a task whose tokens are in the token cache, or will be; they are read only when needed.

    Args:
        needs_disk: Whether texts and tokens must stay out of memory, so that an unusable cache is an error.

    Attributes:
        layout, max_length: See :class:`TaskRows`.
        labels: None, since labelled texts are not cached.
    """

    labels = None

    def __init__(self, task: Task, sources: TaskSources, cache: TokenCache, *, needs_disk: bool) -> None:
        self._needs_disk = needs_disk
        self._sources = sources
        self._cache = cache
        self._identity = sources.identity(cache.folder)
        self._key = [code_digest(), _settings(task), self._identity]
        self._rows: TaskRows | None = None
        name = digest_of_json(self._key)
        file = cache.folder / f"{name}.rows.json"
        with cache.locked(name):
            known: _Known | None = None
            with contextlib.suppress(OSError, ValueError):
                known = _CODEC.validate_json(file.read_bytes())
            if known is None:
                rows = self.read()
                known = _Known(layout=rows.layout, max_length=rows.max_length)
                with writing_cache(cache.folder):
                    replace_file(file, _CODEC.dump_json(known))
        self.layout = known.layout
        self.max_length = known.max_length

    def read(self) -> TaskRows:
        """Read the rows, once; they are on disk if ``needs_disk``.

        Raises:
            DataError: Their files have changed since they were found.
        """
        if self._rows is None:
            rows = self._sources.read(DiskStore(self._cache.folder) if self._needs_disk else MEMORY)
            if self._sources.identity(self._cache.folder) != self._identity:
                raise changed(self._sources.task.dataset_name)
            self._rows = rows
        return self._rows

    @property
    def train(self) -> Sequence[Row]:
        """The training rows."""
        return self.read().train

    @property
    def validation(self) -> Sequence[Row]:
        """The validation rows."""
        return self.read().validation

    def encode(self, tokenizer: Any, limits: ModelLimits | None = None) -> TaskData:
        """Tokenise every split as :meth:`TaskRows.encode` does, and keep the tokens on disk.

        If that fails and tokens may be in memory, warn and keep them in memory.

        Raises:
            RunWriteError: The token cache cannot be written.
            UnsupportedError: The tokenizer cannot be saved, so its tokens cannot be found again.
        """
        limits = limits or ModelLimits()
        # A template that writes the date gives different tokens tomorrow.
        is_dated = "strftime_now" in str(getattr(tokenizer, "chat_template", None))
        date = datetime.date.today().isoformat() if is_dated else None
        try:
            of_model = [tokenizer_digest(tokenizer), limits.max_positions, limits.vocab_size, date]
            return self._cache.data(
                digest_of_json([self._key, of_model]),
                lambda new_writer: self.read().encode(tokenizer, limits, new_writer=new_writer),
                layout=self.layout,
                max_length=self.max_length,
            )
        except (RunWriteError, UnsupportedError) as error:
            if self._needs_disk:
                raise
            _warn(error)
            return self.read().encode(tokenizer, limits)


def _settings(task: Task) -> dict[str, Any]:
    """Return all settings of ``task`` that decide its rows and who may reuse their tokens, as JSON values."""
    entry = find_method(task.method).entry
    keys = task.model_dump(mode="json", include=set(DataKeys.model_fields) - _WITHOUT_EFFECT)
    # A tenant could tell from the time saved that another tenant has the same data, so tenants share no tokens.
    method = [task.method, entry.is_paired, entry.is_labelled, task.keeps_columns]
    return {**keys, "tenant": task.tenant, "method": method}


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldoutRows:
    """Rows to evaluate an adapter on.

    Attributes:
        name: Name of the rows in results.
        max_length: Number of tokens at which a row is cut.
        train_on: Tokens that the loss is computed on.
        labels: Labels of the task; None if it has none.
        own: The rows of a task, if these are its test or validation rows; else None.
    """

    name: str
    rows: Sequence[Row]
    max_length: int
    train_on: TrainOn = "completion"
    labels: LabelSet | None = None
    own: TaskRows | None = None


def read_heldout_rows(task: Task, dataset: str | None, *, needs_labels: bool = True) -> HeldoutRows:
    """Read rows to evaluate a finished adapter on; if possible, rows that were not used for training or selection.

    Args:
        dataset: A file, a preset or a hub dataset, whose test split is used if it has one. None uses the task's test
            rows; if it sets none, the test split of its dataset; if there is none, the task's validation rows.
        needs_labels: Whether to refuse texts without labels if the task's method learns labels.

    Raises:
        DataError: See :func:`open_source`, :meth:`TaskSources.read`; or labels are needed and no row has one.
    """
    if dataset is None and (task.sources or task.test_dataset is not None or task.test_split is not None):
        return _own_heldout_rows(task)
    source = open_source(dataset or task.dataset_name, "dataset", task)
    splits = source.read(MEMORY)
    if splits.test is None and dataset is None:
        return _own_heldout_rows(task)
    reader = _Reader(task, open_source, MEMORY)
    rows = splits.train if splits.test is None else splits.test
    is_unlabelled = bool(find_method(task.method).entry.problem_types) and not have_labels(rows, task.columns)
    if is_unlabelled and needs_labels:
        raise DataError(
            f"dataset: expected rows with labels to measure on, found no label in {dataset or task.dataset_name}; "
            "predict the labels with --save-predictions FILE (in Python: predictions=True), or name rows with labels"
        )
    found = reader.converted(rows, source, task, "dataset", is_unlabelled=is_unlabelled)
    name = (dataset or task.dataset_name) + ("" if splits.test is None else " (test split)")
    name += "".join(f" ({bad.num_bad:,} bad rows left out)" for bad in found.bad_rows)
    return _held_out(task, name, reader.learned(found.rows), task.max_length or source.max_length)


def _own_heldout_rows(task: Task) -> HeldoutRows:
    own = TaskSources(task).read(MEMORY)
    if own.test:
        found = _held_out(task, f"{task.test_dataset or task.dataset_name} (test rows)", own.test, own.max_length)
        return replace(found, own=own)
    if task.refit is None:
        found = _held_out(task, f"{task.dataset_name} (validation rows)", own.validation, own.max_length)
        return replace(found, own=own)
    raise DataError(
        "dataset: expected rows that the adapter was not trained on, found a refit, which was also trained on the "
        "validation rows; name other rows with --dataset"
    )


def _held_out(task: Task, name: str, rows: Sequence[Row], max_length: int) -> HeldoutRows:
    """Return ``rows`` without undesirable replies and without labels: an adapter is evaluated on replies that it should
    give."""
    wanted = [
        row.labelled(None) if isinstance(row, Conversation) else row
        for row in rows
        if not isinstance(row, Conversation) or row.is_desirable is not False
    ]
    return HeldoutRows(name=name, rows=wanted, max_length=max_length, train_on=task.train_on, labels=task.label_set)
