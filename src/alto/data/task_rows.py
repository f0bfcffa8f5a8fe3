"""The rows of a task before they are tokenised, and their tokenisation."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, cast

from alto.data.convert import LabelReader
from alto.data.dataset import (
    MEMORY,
    EncodedDataset,
    MemoryWriter,
    RowStore,
    RowWriter,
    joined,
)
from alto.data.encoders import encode_dataset, encode_labelled_texts, encode_pairs
from alto.data.formats import Layout
from alto.data.messages import Conversation, LabelledText, Pair, Row
from alto.data.rows import BadRows, row_limit
from alto.data.task_data import (
    TaskData,
    encoding_notes,
    label_notes,
    mixture_notes,
    reading_notes,
    test_notes,
    tokenizer_notes,
    unread_notes,
)
from alto.records import LabelSet, ModelLimits
from alto.spec import OnBadRow, TrainOn

_DIGEST_BYTES = 16


def num_known(rows: Iterable[Row], among: Iterable[Row]) -> int:
    """Count the rows that are also in ``among``; only digests of ``rows`` are in memory, 128 bits each."""
    wanted = Counter(map(_digest, rows))
    return sum(wanted.pop(_digest(row), 0) for row in among) if wanted else 0


def _digest(row: Row) -> bytes:
    return hashlib.blake2b(json.dumps(_row_values(row)).encode(), digest_size=_DIGEST_BYTES).digest()


def _row_values(row: Row) -> list[object]:
    """Return the values that make two rows equal, as JSON values."""
    if isinstance(row, LabelledText):
        text = row.text if isinstance(row.text, str) else _values(row.text)
        return [text, row.text_pair, row.label]
    return [_values(conversation) for conversation in (row.conversations if isinstance(row, Pair) else (row,))]


def _values(conversation: Conversation) -> list[object]:
    """Return the values that make two conversations equal, as JSON values."""
    turns = [(turn.role, turn.content, turn.is_context, turn.extras) for turn in conversation]
    return [turns, getattr(conversation, "template_arguments", ""), getattr(conversation, "is_desirable", None)]


Sources: TypeAlias = tuple[tuple[str, int], ...]
"""Name and number of rows of each source of a split."""

NewWriter: TypeAlias = Callable[[str], RowWriter]
"""Function that makes the writer for the rows of the split with the given name."""


class ReadRows(Protocol):
    """The rows of a task, read but not tokenised yet.

    Attributes:
        layout: Form and columns of the training rows; for a mixture, those of the first source.
        max_length: Number of tokens at which a row is cut.
        labels: Reader of the labels of texts; None if the rows are not labelled texts.
    """

    @property
    def validation(self) -> Sequence[Row]: ...

    @property
    def layout(self) -> Layout: ...

    @property
    def max_length(self) -> int: ...

    @property
    def labels(self) -> LabelReader | None: ...

    def encode(self, tokenizer: Any, limits: ModelLimits | None = None) -> TaskData:
        """Tokenise every split; see :meth:`TaskRows.encode`."""
        ...


def _in_memory(split: str) -> RowWriter:
    return MemoryWriter()


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRows:
    """The rows of a task before tokenisation; they need no tokenizer and no base model.

    Attributes:
        test: Rows that are used neither for training nor for selection; None if there are none.
        layout: Form and columns of the training rows; for a mixture, those of the first source.
        max_length: Number of tokens at which a row is cut.
        unread_columns: Columns of the dataset without a role, each with the number of rows that have a value there.
        bad_rows: Rows that were left out because they cannot be used, by dataset.
        on_bad_row: Treatment of rows that the chat template refuses.
        train_on: The tokens of a row that are trained.
        train_sources, validation_sources: Name and number of rows of every source of a mixture, in the order of the
            rows; empty if the rows are of one dataset.
        labels: Reader of the labels of texts; None if the rows are not labelled texts.
    """

    train: Sequence[Row]
    validation: Sequence[Row]
    layout: Layout
    max_length: int
    test: Sequence[Row] | None = None
    unread_columns: Mapping[str, int] = field(default_factory=dict)
    bad_rows: tuple[BadRows, ...] = ()
    on_bad_row: OnBadRow = "error"
    train_on: TrainOn = "completion"
    train_sources: Sources = ()
    validation_sources: Sources = ()
    labels: LabelReader | None = None
    store: RowStore = MEMORY

    def encode(
        self, tokenizer: Any, limits: ModelLimits | None = None, *, new_writer: NewWriter = _in_memory
    ) -> TaskData:
        """Tokenise every split.

        Args:
            new_writer: Function that makes the writer for a split, or for one source of it; called with the split's
                name.

        Raises:
            DataError: See :func:`encode_dataset`, :func:`encode_pairs`; or the tokenizer leaves replies without an end.
            ModelError: The model has no embedding for a token.
        """
        limits = limits or ModelLimits()
        limit = row_limit(self.max_length, limits)
        about_tokenizer = [] if self.labels else tokenizer_notes(tokenizer, _conversations(self.train))

        def encoded(rows: Sequence[Row], split: str, what: str, sources: Sources = ()) -> EncodedDataset:
            if sources:
                firsts = itertools.accumulate((count for _, count in sources), initial=0)
                parts = [
                    encoded(rows[first : first + count], split, f"{what} ({name})")
                    for first, (name, count) in zip(firsts, sources, strict=False)
                ]
                return joined(parts, [name for name, _ in sources], self.store)
            return encode_rows(
                rows,
                tokenizer,
                self.max_length,
                what,
                limits=limits,
                on_bad_row=self.on_bad_row,
                train_on=self.train_on,
                labels=None if self.labels is None else self.labels.labels,
                writer=new_writer(split),
            )

        train = encoded(self.train, "train", "training", self.train_sources)
        validation = encoded(self.validation, "validation", "validation", self.validation_sources)
        test = encoded(self.test, "test", "test") if self.test else None
        splits = (train, validation, *((test,) if test else ()))
        num_shared = num_known(self.validation, self.train)
        num_known_test = num_known(self.test or (), itertools.chain(self.train, self.validation))
        return TaskData(
            train=train,
            validation=validation,
            test=test,
            num_shared=num_shared,
            num_bad=sum(bad.num_bad for bad in (*self.bad_rows, *(bad for split in splits for bad in split.refused))),
            notes=(
                *mixture_notes(train, validation),
                *label_notes(train, validation),
                *(bad.note for bad in self.bad_rows),
                *unread_notes(self.unread_columns, train.unread, tokenizer, self.layout.form),
                *reading_notes(len(self.validation), num_shared),
                *test_notes(len(self.test or ()), num_known_test),
                *about_tokenizer,
                *encoding_notes(train, "training", limit),
                *encoding_notes(validation, "validation", limit),
                *(encoding_notes(test, "test", limit) if test else ()),
            ),
        )


def _conversations(rows: Sequence[Row]) -> Iterator[Conversation]:
    """Return all conversations of ``rows``; a pair is two."""
    return (
        conversation
        for row in rows
        if not isinstance(row, LabelledText)
        for conversation in (row.conversations if isinstance(row, Pair) else (row,))
    )


def encode_rows(
    rows: Sequence[Row],
    tokenizer: Any,
    max_length: int,
    what: str,
    *,
    limits: ModelLimits | None = None,
    on_bad_row: OnBadRow = "error",
    train_on: TrainOn = "completion",
    labels: LabelSet | None = None,
    writer: RowWriter | None = None,
) -> EncodedDataset:
    """Tokenise rows of one kind: conversations, pairs or labelled texts.

    See :func:`encode_dataset`, :func:`encode_pairs` and :func:`encode_labelled_texts`.

    Args:
        rows: All conversations, all pairs, or all labelled texts.
        tokenizer: Tokenizer of the base model.
        what: Name of the split for messages.
        on_bad_row: Treatment of rows that the chat template refuses.
        train_on: The tokens of a conversation that are trained; of pairs, always the replies.
        labels: All labels; needed for labelled texts.
        writer: Receives the tokenised rows; None keeps them in memory. Labelled texts are always in memory.
    """
    if rows and isinstance(rows[0], LabelledText):
        assert labels is not None, "labelled texts need the set of labels"
        texts = cast(Sequence[LabelledText], rows)
        return encode_labelled_texts(texts, labels, tokenizer, max_length, what, limits=limits, on_bad_row=on_bad_row)
    how: dict[str, Any] = {"limits": limits, "on_bad_row": on_bad_row, "writer": writer}
    if rows and isinstance(rows[0], Pair):
        return encode_pairs(cast(Sequence[Pair], rows), tokenizer, max_length, what, **how)
    conversations = cast(Sequence[Conversation], rows)
    return encode_dataset(conversations, tokenizer, max_length, what, train_on=train_on, **how)


# Reads the rows of a task into memory; if they are large or slow to tokenise, their tokens are kept on disk, in the
# token cache.
