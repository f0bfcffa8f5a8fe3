"""The data of a task: read, split and tokenised once, shared by all its jobs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self, TypeAlias

from alto.data.conversation import Conversation, LabelledConversation, Pair, Row
from alto.data.convert import to_conversation, to_labelled, to_pair
from alto.data.dataset import EncodedDataset
from alto.data.encode import encode_dataset
from alto.data.formats import Layout, find_layout
from alto.data.limits import row_limit
from alto.data.notes import encoding_notes, reading_notes, test_notes, tokenizer_notes, unread_notes
from alto.data.pairs import encode_pairs
from alto.data.rows import RawRow
from alto.data.source import open_source
from alto.data.split import sample_rows, split_rows
from alto.errors import DataFormatError
from alto.records import ModelLimits
from alto.spec import Task
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

_SPLITS = ("train", "validation", "test")


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskData:
    """The rows of a task, tokenised.

    Attributes:
        train: Training rows.
        validation: Validation rows.
        test: Rows that nothing is trained on or selected by; None where there are none.
        num_shared: Validation rows that are training rows too.
        notes: Notices about the data, as sentences.
    """

    train: EncodedDataset
    validation: EncodedDataset
    test: EncodedDataset | None = None
    num_shared: int = 0
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
        return {**counts, "shared_rows": self.num_shared}


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRows:
    """The rows of a task before tokenisation; they need no tokenizer and no base model.

    Attributes:
        train: Training rows.
        validation: Validation rows.
        test: Rows that nothing is trained on or selected by; None where there are none.
        layout: Form and columns of the training rows.
        max_length: Tokens at which a row is cut.
        unread_columns: Columns of the dataset without a role, each with the number of rows that have a value there.
    """

    train: list[Row]
    validation: list[Row]
    layout: Layout
    max_length: int
    test: list[Row] | None = None
    unread_columns: Mapping[str, int] = field(default_factory=dict)

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
        train = encode_rows(self.train, tokenizer, self.max_length, "training", limits=limits)
        validation = encode_rows(self.validation, tokenizer, self.max_length, "validation", limits=limits)
        test = self.test and encode_rows(self.test, tokenizer, self.max_length, "test", limits=limits)
        seen = set(self.train)
        num_shared = sum(row in seen for row in self.validation)
        seen.update(self.validation)
        num_known = sum(row in seen for row in self.test or ())
        return TaskData(
            train=train,
            validation=validation,
            test=test or None,
            num_shared=num_shared,
            notes=(
                *unread_notes(self.unread_columns, train.unread),
                *reading_notes(self.train, len(self.validation), num_shared),
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
    """

    name: str
    rows: Sequence[Row]
    max_length: int


def read_task_rows(task: Task) -> TaskRows:
    """Read and split what ``task`` names.

    Raises:
        DataError: See :func:`open_source`, :func:`find_layout`, :func:`split_rows`; or the rows are not of the kind
            that the task's method learns from.
    """
    source = open_source(task.dataset, "dataset", task)
    rows = sample_rows(source.train, task.max_samples, task.data_seed)
    train, layout = _converted(rows, source.form, task, is_paired=learns_from_pairs(task.method))
    num_rows, test = len(train), None
    if task.test_split is not None:
        train, test = split_rows(train, task.test_split, task.data_seed, key="test_split")
    elif task.test_dataset is not None:
        test = _other_rows(task.test_dataset, "test_dataset", task, layout)
    if task.validation_dataset is not None:
        validation = _other_rows(task.validation_dataset, "validation_dataset", task, layout)
    elif source.validation is not None and task.validation_split is None:
        validation, _ = _converted(source.validation, source.form, task, is_paired=layout.is_paired)
    else:
        share = (task.validation_split or DEFAULT_VALIDATION_SHARE) * num_rows / len(train)
        train, validation = split_rows(train, share, task.data_seed)
    if find_method(task.method).entry.is_labelled:  # after the split: both replies to a prompt are on one side of it
        train, validation = _unpaired(train), _unpaired(validation)
        test = None if test is None else _unpaired(test)
    return TaskRows(
        train=train,
        validation=validation,
        test=test,
        layout=layout,
        max_length=task.max_length or source.max_length,
        unread_columns=_unread_columns(rows, layout),
    )


def read_heldout_rows(task: Task, dataset: str | None) -> HeldoutRows:
    """Rows to evaluate a finished adapter on; if possible, rows that were not used for training or selection.

    Args:
        dataset: A file, a preset or a hub dataset, whose test split is taken where it has one. None takes the test
            split of the task's own dataset, and where it has none, the task's validation rows.

    Raises:
        DataError: See :func:`read_task_rows`.
    """
    name = dataset or task.dataset
    source = open_source(name, "dataset", task)
    if source.test is not None:
        name, rows = f"{name} (test split)", _converted(source.test, source.form, task)[0]
    elif dataset is None:
        name, rows = f"{name} (validation rows)", read_task_rows(task).validation
    else:
        rows = _converted(source.train, source.form, task)[0]
    if find_method(task.method).entry.is_labelled:
        # An adapter is measured on the replies that it is to give.
        labelled = [row for row in _unpaired(rows) if isinstance(row, LabelledConversation)]
        rows = [row.unlabelled for row in labelled if row.is_desirable]
    return HeldoutRows(name=name, rows=rows, max_length=task.max_length or source.max_length)


def _unpaired(rows: Sequence[Row]) -> list[Row]:
    """``rows`` with two labelled conversations instead of each pair, the chosen one first."""
    unpaired: list[Row] = []
    for row in rows:
        if isinstance(row, Pair):
            unpaired += [LabelledConversation(row.chosen, True), LabelledConversation(row.rejected, False)]
        else:
            unpaired.append(row)
    return unpaired


def _other_rows(name: str, key: str, task: Task, layout: Layout) -> list[Row]:
    """The rows of the dataset that the task names under ``key``, of the same kind as its training rows: its split of
    that kind, where it has one."""
    other = open_source(name, key, task)
    own = other.validation if key == "validation_dataset" else other.test
    return _converted(other.train if own is None else own, other.form, task, key=key, is_paired=layout.is_paired)[0]


def _converted(
    rows: Sequence[RawRow], known_form: str, task: Task, *, key: str = "dataset", is_paired: bool | None = None
) -> tuple[list[Row], Layout]:
    """Rows in the task's form; where it is not set, in the form of the dataset's preset.

    Args:
        key: The task's key that names the dataset, for messages.
        is_paired: Whether they have to be pairs; None accepts either, and prefers the kind that the task's method
            needs.
    """
    form = known_form if task.dataset_format == "auto" and not task.columns else task.dataset_format
    listed = list(rows)
    if find_method(task.method).entry.is_labelled:
        layout = find_layout(listed, form, task.columns, is_labelled=True)
        to_row = to_pair if layout.is_paired else to_labelled
        return [to_row(row, layout) for row in listed], layout
    meant = learns_from_pairs(task.method) if is_paired is None else is_paired
    layout = find_layout(listed, form, task.columns, is_paired=meant)
    if is_paired is not None and layout.is_paired != is_paired:
        raise _wrong_kind(layout, task.method, key)
    convert = to_pair if layout.is_paired else to_conversation
    return [convert(row, layout) for row in listed], layout


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
    rows: Sequence[Row], tokenizer: Any, max_length: int, what: str, *, limits: ModelLimits | None = None
) -> EncodedDataset:
    """Tokenise rows of either kind, all of one; see :func:`encode_dataset` and :func:`encode_pairs`.

    Args:
        rows: All conversations, or all pairs.
        tokenizer: Tokenizer of the base model.
        max_length: Tokens at which a row is cut.
        what: Name of the split for messages.
        limits: Limits of the model; None where it has none.
    """
    pairs = [row for row in rows if isinstance(row, Pair)]
    if pairs:
        return encode_pairs(pairs, tokenizer, max_length, what, limits=limits)
    conversations = [row for row in rows if not isinstance(row, Pair)]
    return encode_dataset(conversations, tokenizer, max_length, what, limits=limits)
