"""The data of a task: read, split and tokenised once, shared by all its jobs."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self, TypeAlias

from alto.data.conversation import Conversation, LabelledConversation, Pair, Row, unpaired
from alto.data.convert import to_conversation, to_labelled, to_pair
from alto.data.dataset import EncodedDataset, joined
from alto.data.encode import encode_dataset
from alto.data.faults import BadRows, FaultList
from alto.data.formats import Layout, find_layout
from alto.data.limits import row_limit
from alto.data.notes import encoding_notes, mixture_notes, reading_notes, test_notes, tokenizer_notes, unread_notes
from alto.data.pairs import encode_pairs
from alto.data.rows import RawRow, RowError
from alto.data.source import open_source
from alto.data.split import sample_rows, split_rows
from alto.errors import DataFormatError
from alto.records import ModelLimits
from alto.spec import OnBadRow, Task, TrainOn
from alto.spec.data_keys import DataKeys
from alto.spec.method import find_method, learns_from_pairs

__all__ = [
    "DEFAULT_VALIDATION_SHARE",
    "EvaluationSplit",
    "HeldoutRows",
    "TaskData",
    "TaskRows",
    "encode_rows",
    "read_heldout_rows",
    "read_task_rows",
]

DEFAULT_VALIDATION_SHARE = 0.1
"""Default share of validation rows, where neither the task nor its dataset defines them."""

EvaluationSplit: TypeAlias = Literal["validation", "test"]
"""Rows that nothing is trained on."""

Sources: TypeAlias = tuple[tuple[str, int], ...]
"""Names and numbers of rows of the sources of a split."""

_SPLITS = ("train", "validation", "test")


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskData:
    """The rows of a task, tokenised.

    Attributes:
        train: Training rows.
        validation: Validation rows.
        test: Rows that nothing is trained on or selected by; None where there are none.
        num_shared: Validation rows that are training rows too.
        num_bad: Rows left out because they cannot be used.
        notes: Notices about the data, as sentences.
    """

    train: EncodedDataset
    validation: EncodedDataset
    test: EncodedDataset | None = None
    num_shared: int = 0
    num_bad: int = 0
    notes: tuple[str, ...] = ()

    @property
    def splits(self) -> tuple[EncodedDataset, ...]:
        """Training, validation and, where there are some, test rows."""
        return (self.train, self.validation) if self.test is None else (self.train, self.validation, self.test)

    def held_out(self, split: EvaluationSplit) -> EncodedDataset:
        """The validation or the test rows, which there have to be."""
        dataset = self.validation if split == "validation" else self.test
        assert dataset is not None, "the task has no test rows"
        return dataset

    def with_splits(self, splits: Sequence[EncodedDataset]) -> Self:
        """The same data with other ``splits``, as many and in the same order."""
        train, validation, *rest = splits
        return replace(self, train=train, validation=validation, test=rest[0] if rest else None)

    def counts(self) -> dict[str, int]:
        """Rows and tokens of every split, what was cut or left out, and the validation rows that are trained too."""
        counts = {
            f"{name}_{what}": count
            for name, split in zip(_SPLITS, self.splits, strict=False)
            for what, count in (
                ("rows", len(split)),
                ("tokens", split.num_tokens),
                ("trained_tokens", split.num_trained_tokens),
                ("truncated_rows", split.num_truncated),
                ("skipped_rows", split.num_skipped),
                ("masked_rows", split.num_masked),
                ("unrolled_rows", split.num_unrolled),
                ("alike_rows", split.num_alike),
            )
        }
        return {**counts, "shared_rows": self.num_shared, "bad_rows": self.num_bad}


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRows:
    """The rows of a task before tokenisation; they need no tokenizer and no base model.

    Attributes:
        train: Training rows.
        validation: Validation rows.
        test: Rows that nothing is trained on or selected by; None where there are none.
        layout: Form and columns of the training rows; of a mixture those of the first source.
        max_length: Tokens at which a row is cut.
        unread_columns: Columns of the dataset without a role, each with the number of rows that have a value there.
        bad_rows: Rows that were left out because they cannot be used, by dataset.
        on_bad_row: What is done about rows that the chat template refuses.
        train_on: Which tokens of a row are trained.
        train_sources, validation_sources: Of a mixture the name and the rows of every source, in the order in which
            they lie in the split; empty where its rows are of one dataset.
    """

    train: list[Row]
    validation: list[Row]
    layout: Layout
    max_length: int
    test: list[Row] | None = None
    unread_columns: Mapping[str, int] = field(default_factory=dict)
    bad_rows: tuple[BadRows, ...] = ()
    on_bad_row: OnBadRow = "error"
    train_on: TrainOn = "completion"
    train_sources: Sources = ()
    validation_sources: Sources = ()

    def encode(self, tokenizer: Any, limits: ModelLimits | None = None) -> TaskData:
        """Tokenise every split.

        Args:
            limits: Those of the model; None where it sets none.

        Raises:
            DataError: See :func:`encode_dataset`, :func:`encode_pairs`; or the tokenizer leaves replies without an end.
            ModelError: The model has no embedding of a token.
        """
        limits = limits or ModelLimits()
        limit = row_limit(self.max_length, limits)
        about_tokenizer = tokenizer_notes(tokenizer, _conversations(self.train))

        def encoded(rows: Sequence[Row], what: str, sources: Sources = ()) -> EncodedDataset:
            if sources:
                left = iter(rows)
                of_each = [(name, list(itertools.islice(left, count))) for name, count in sources]
                parts = [encoded(of_one, f"{what} ({name})") for name, of_one in of_each]
                return joined(parts, [name for name, _ in sources])
            return encode_rows(
                rows,
                tokenizer,
                self.max_length,
                what,
                limits=limits,
                on_bad_row=self.on_bad_row,
                train_on=self.train_on,
            )

        train = encoded(self.train, "training", self.train_sources)
        validation = encoded(self.validation, "validation", self.validation_sources)
        test = self.test and encoded(self.test, "test")
        splits = (train, validation, *((test,) if test else ()))
        seen = set(self.train)
        num_shared = sum(row in seen for row in self.validation)
        seen.update(self.validation)
        num_known = sum(row in seen for row in self.test or ())
        return TaskData(
            train=train,
            validation=validation,
            test=test or None,
            num_shared=num_shared,
            num_bad=sum(bad.num_bad for bad in (*self.bad_rows, *(bad for split in splits for bad in split.refused))),
            notes=(
                *mixture_notes(train, validation),
                *(bad.note for bad in self.bad_rows),
                *unread_notes(self.unread_columns, train.unread),
                *reading_notes(len(self.validation), num_shared),
                *test_notes(len(self.test or ()), num_known),
                *about_tokenizer,
                *encoding_notes(train, "training", limit),
                *encoding_notes(validation, "validation", limit),
                *(encoding_notes(test, "test", limit) if test else ()),
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldoutRows:
    """Rows to measure an adapter on, the name to report them under, and the tokens at which a row is cut.

    Attributes:
        name: Name of the rows in results.
        rows: The rows.
        max_length: Tokens at which a row is cut.
        train_on: Tokens that the loss is of.
    """

    name: str
    rows: Sequence[Row]
    max_length: int
    train_on: TrainOn = "completion"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Converted:
    """The rows of one dataset, their layout, and those that were left out; None where none were."""

    rows: list[Row]
    layout: Layout
    bad: BadRows | None


def read_task_rows(task: Task) -> TaskRows:
    """Read and split what ``task`` names; of a mixture every source by itself, with the task's ``validation_split`` and
    ``test_split`` of each.

    Raises:
        BadRowsError: Rows cannot be used, and these are not skipped, or all of a dataset's.
        DataError: See :func:`open_source`, :func:`find_layout`, :func:`split_rows`; or the rows are not of the kind
            that the task's method learns from.
    """
    if not task.sources:
        return _read_rows(task, task.method, "dataset")
    parts = [_read_rows(task.of_source(source), task.method, f"dataset ({source.name})") for source in task.sources]
    names = [source.name for source in task.sources]
    validation = [row for part in parts for row in part.validation]
    test: list[Row] | None = [row for part in parts for row in part.test or ()] or None
    layout, bad = parts[0].layout, [bad for part in parts for bad in part.bad_rows]
    of_validation = [(name, len(part.validation)) for name, part in zip(names, parts, strict=True)]
    if task.validation_dataset is not None:
        other = _other_rows(task.validation_dataset, "validation_dataset", task, task.method, layout)
        validation, of_validation = other.rows, []
        bad += [] if other.bad is None else [other.bad]
    if task.test_dataset is not None:
        other = _other_rows(task.test_dataset, "test_dataset", task, task.method, layout)
        test = other.rows
        bad += [] if other.bad is None else [other.bad]
    unread: Counter[str] = Counter()
    for part in parts:
        unread.update(part.unread_columns)
    return replace(
        parts[0],
        train=[row for part in parts for row in part.train],
        validation=validation,
        test=test,
        max_length=task.max_length or max(part.max_length for part in parts),
        unread_columns=dict(unread),
        bad_rows=tuple(bad),
        train_sources=tuple((name, len(part.train)) for name, part in zip(names, parts, strict=True)),
        validation_sources=tuple(of_validation),
    )


def _read_rows(keys: DataKeys, method: str, key: str) -> TaskRows:
    """The rows of one dataset.

    Args:
        keys: Of the task, or of one source of its mixture.
        method: Method of the task.
        key: The task's key that names the dataset, for messages.
    """
    source = open_source(keys.dataset_name, key, keys)
    rows = sample_rows(source.train, keys.max_samples, keys.data_seed)
    converted = _converted(rows, source.form, keys, method, key=key, is_paired=learns_from_pairs(method))
    train, layout, bad = converted.rows, converted.layout, [converted.bad]
    num_rows, test = len(train), None
    if keys.test_split is not None:
        train, test = split_rows(train, keys.test_split, keys.data_seed, key="test_split")
    elif keys.test_dataset is not None:
        other = _other_rows(keys.test_dataset, "test_dataset", keys, method, layout)
        test = other.rows
        bad.append(other.bad)
    if keys.validation_dataset is not None:
        other = _other_rows(keys.validation_dataset, "validation_dataset", keys, method, layout)
        validation = other.rows
        bad.append(other.bad)
    elif source.validation is not None and keys.validation_split is None:
        other = _converted(source.validation, source.form, keys, method, key=key, is_paired=layout.is_paired)
        validation = other.rows
        bad.append(other.bad)
    else:
        share = (keys.validation_split or DEFAULT_VALIDATION_SHARE) * num_rows / len(train)
        train, validation = split_rows(train, share, keys.data_seed)
    if find_method(method).entry.is_labelled:  # after the split: both replies to a prompt are on one side of it
        train, validation = unpaired(train), unpaired(validation)
        test = None if test is None else unpaired(test)
    return TaskRows(
        train=train,
        validation=validation,
        test=test,
        layout=layout,
        max_length=keys.max_length or source.max_length,
        unread_columns=_unread_columns(rows, layout),
        bad_rows=tuple(one for one in bad if one is not None),
        on_bad_row=keys.on_bad_row,
        train_on=keys.train_on,
    )


def read_heldout_rows(task: Task, dataset: str | None) -> HeldoutRows:
    """Rows to evaluate a finished adapter on; if possible, rows that were not used for training or selection.

    Args:
        dataset: A file, a preset or a hub dataset, whose test split is taken where it has one. None takes the test
            split of the task's own dataset, and where it has none, the task's validation rows.

    Raises:
        DataError: See :func:`read_task_rows`.
    """
    name = dataset or task.dataset_name
    if dataset is None and task.sources:
        return _own_heldout_rows(task)
    source = open_source(name, "dataset", task)
    if source.test is not None:
        name, found = f"{name} (test split)", _converted(source.test, source.form, task, task.method)
    elif dataset is None:
        return _own_heldout_rows(task)
    else:
        found = _converted(source.train, source.form, task, task.method)
    rows = found.rows
    if find_method(task.method).entry.is_labelled:
        # An adapter is measured on the replies that it is to give.
        labelled = [row for row in unpaired(rows) if isinstance(row, LabelledConversation)]
        rows = [row.unlabelled for row in labelled if row.is_desirable]
    if found.bad is not None:
        name += f" ({found.bad.num_bad:,} bad rows left out)"
    return HeldoutRows(name=name, rows=rows, max_length=task.max_length or source.max_length, train_on=task.train_on)


def _own_heldout_rows(task: Task) -> HeldoutRows:
    own = read_task_rows(task)
    name = f"{task.dataset_name} (validation rows)"
    return HeldoutRows(name=name, rows=own.validation, max_length=own.max_length, train_on=task.train_on)


def _other_rows(name: str, key: str, keys: DataKeys, method: str, layout: Layout) -> _Converted:
    """The rows of the dataset that the task names under ``key``, of the same kind as its training rows: its split of
    that kind, where it has one."""
    other = open_source(name, key, keys)
    own = other.validation if key == "validation_dataset" else other.test
    rows = other.train if own is None else own
    return _converted(rows, other.form, keys, method, key=key, is_paired=layout.is_paired)


def _converted(
    rows: Sequence[RawRow],
    known_form: str,
    keys: DataKeys,
    method: str,
    *,
    key: str = "dataset",
    is_paired: bool | None = None,
) -> _Converted:
    """Rows in the task's form; where it is not set, in the form of the dataset's preset.

    Args:
        key: The task's key that names the dataset, for messages.
        is_paired: Whether they have to be pairs; None accepts either, and prefers the kind that the task's method
            needs.
    """
    form = known_form if keys.dataset_format == "auto" and not keys.columns else keys.dataset_format
    raw = list(rows)
    faults = FaultList(key)
    if all(row.fault is not None for row in raw):
        for row in raw:
            assert row.fault is not None
            faults.add(row.where, row.fault)
        faults.settle(len(raw), keys.on_bad_row)
    is_labelled = find_method(method).entry.is_labelled
    meant = learns_from_pairs(method) if is_paired is None else is_paired
    layout = find_layout(raw, form, keys.columns, is_paired=None if is_labelled else meant, is_labelled=is_labelled)
    if not is_labelled and is_paired is not None and layout.is_paired != is_paired:
        raise _wrong_kind(layout, method, key)
    convert = to_pair if layout.is_paired else to_labelled if is_labelled else to_conversation
    converted = []
    for row in raw:
        try:
            converted.append(convert(row, layout))
        except RowError as error:
            faults.add_error(error)
    return _Converted(rows=converted, layout=layout, bad=faults.settle(len(raw), keys.on_bad_row))


def _unread_columns(rows: Sequence[RawRow], layout: Layout) -> dict[str, int]:
    """Columns without a role, in the dataset's order, each with the number of rows that have a value there."""
    read = {column for _, column in layout.columns}
    empty: tuple[object, ...] = (None, "", [], {})
    return dict(
        Counter(name for row in rows for name, value in row.values.items() if name not in read and value not in empty)
    )


def _wrong_kind(layout: Layout, method: str, key: str) -> DataFormatError:
    """The check of the method's objective, before a model is loaded."""
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


def _conversations(rows: Sequence[Row]) -> list[Conversation]:
    """All conversations of ``rows``; a pair is two."""
    return [conversation for row in rows for conversation in (row.conversations if isinstance(row, Pair) else (row,))]


def encode_rows(
    rows: Sequence[Row],
    tokenizer: Any,
    max_length: int,
    what: str,
    *,
    limits: ModelLimits | None = None,
    on_bad_row: OnBadRow = "error",
    train_on: TrainOn = "completion",
) -> EncodedDataset:
    """Tokenise rows of either kind, all of one; see :func:`encode_dataset` and :func:`encode_pairs`.

    Args:
        rows: All conversations, or all pairs.
        tokenizer: Tokenizer of the base model.
        max_length: Tokens at which a row is cut.
        what: Name of the split for messages.
        limits: Limits of the model; None where it has none.
        on_bad_row: What is done about rows that the chat template refuses.
        train_on: Which tokens of a conversation are trained; of pairs, replies are.
    """
    pairs = [row for row in rows if isinstance(row, Pair)]
    if pairs:
        return encode_pairs(pairs, tokenizer, max_length, what, limits=limits, on_bad_row=on_bad_row)
    conversations = [row for row in rows if not isinstance(row, Pair)]
    return encode_dataset(
        conversations, tokenizer, max_length, what, limits=limits, on_bad_row=on_bad_row, train_on=train_on
    )
