"""Tokenises a split into an `EncodedDataset`, and a task into its `TaskData`, once for all jobs."""

from __future__ import annotations

import hashlib
import itertools
import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from alto.data.convert import LabelReader
from alto.data.dataset import IGNORED, MEMORY, EncodedDataset, RowStore, RowWriter, Span, joined
from alto.data.encode import EncodedRow, Encoder, num_shared
from alto.data.formats import Layout
from alto.data.messages import Conversation, LabelledText, Pair, Row, place_of
from alto.data.rows import (
    BadRows,
    ConversationError,
    FaultKind,
    FaultList,
    RowFault,
    RowLimit,
    check_token_ids,
    quoted,
    row_limit,
)
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
from alto.data.template import ChatTemplate
from alto.errors import DataError
from alto.records import LabelSet, ModelLimits
from alto.spec import OnBadRow, TrainOn

_NO_LIMITS = ModelLimits()
_DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoding:
    """Everything that decides how a row is tokenised.

    Attributes:
        tokenizer: Tokenizer of the base model.
        max_length: Number of tokens at which a sequence is cut; at the model's positions if there are fewer.
        limits: Limits of the base model.
        train_on: The tokens of a conversation that are trained; of pairs, always the replies.
        on_bad_row: Treatment of rows that cannot be tokenised.
        labels: All labels of the task; None if the rows are not labelled texts.
        shares_prompts: Whether the common beginning of a pair goes through the model only once.
    """

    tokenizer: Any
    max_length: int
    limits: ModelLimits = _NO_LIMITS
    train_on: TrainOn = "completion"
    on_bad_row: OnBadRow = "error"
    labels: LabelSet | None = None
    shares_prompts: bool = True

    @property
    def limit(self) -> RowLimit:
        """The number of tokens at which a sequence is cut, and the reason."""
        return row_limit(self.max_length, self.limits)


def tokenize(rows: Sequence[Row], encoding: Encoding, what: str, writer: RowWriter | None = None) -> EncodedDataset:
    """Tokenise rows of one kind: all conversations, all pairs, or all labelled texts.

    A pair is left out and counted if a reply is empty or not trained (it would teach the length of replies, not their
    content), if both replies have the same tokens, or if no difference between them is left after the cut. Trained
    tokens of pairs and of labelled replies are the same as in TRL's ``DPOTrainer``: ``{% generation %}`` in the
    template is ignored. In both replies of a pair, training begins at the same position: the first token that is
    trained in either.

    Labelled texts get the tokenizer's special tokens. The longer of two texts is cut first, at the side that the
    tokenizer says. Conversations among them are written by the chat template, and their first tokens are kept. The
    classification head reads a row's last token that is not padding; the padding token comes from the model's
    configuration, or else from the tokenizer.

    Args:
        what: Name of the split for messages, e.g. ``"training"``.
        writer: Receives the tokenised rows; None keeps them in memory.

    Raises:
        BadRowsError: Rows are bad and are not skipped, or all rows are bad. A row is bad if the chat template refuses
            it, if it is a text without tokens, or if it is a pair with several replies after the point where its
            conversations first differ, and the template rewrites earlier replies.
        DataError: No row has a trained token left; all rows are conversations that were cut, so that the model would
            never see the end of a reply; or the tokenizer returns ``token_type_ids`` for two texts, which the model
            does not get here.
        ModelError: The model has no embedding for a token.
    """
    first = rows[0] if rows else None
    kind = _Texts if isinstance(first, LabelledText) else _Pairs if isinstance(first, Pair) else _Conversations
    return kind(rows, encoding, what, RowWriter() if writer is None else writer).dataset()


class _Split(ABC):
    """The tokenisation of one split, and what is counted on the way."""

    noun = "row"

    def __init__(self, rows: Sequence[Any], encoding: Encoding, what: str, writer: RowWriter) -> None:
        self.rows = rows
        self.encoding = encoding
        self.limit = encoding.limit
        self.what = what
        self.writer = writer
        self.faults = FaultList(f"the {what} data")
        self.is_labelled = bool(rows) and isinstance(rows[0], Conversation) and rows[0].is_desirable is not None
        self.encoder = self.make_encoder()
        self.num_rows = self.num_truncated = self.num_masked = self.num_unrolled = self.num_alike = 0

    def make_encoder(self) -> Encoder:
        return Encoder(self.encoding.tokenizer, self.encoding.train_on, follows_marks=not self.is_labelled)

    @abstractmethod
    def add_rows(self) -> None:
        """Tokenise all rows, and give them to the writer."""

    def check_rows(self) -> None:  # noqa: B027 (not all kinds of rows have a check)
        """Check what is left of the rows."""

    def dataset(self) -> EncodedDataset:
        self.add_rows()
        refused = self.faults.settle(len(self.rows), self.encoding.on_bad_row)
        self.check_rows()
        return self.writer.dataset(
            is_labelled=self.is_labelled,
            label_set=self.encoding.labels,
            num_truncated=self.num_truncated,
            num_skipped=self.num_rows - len(self.writer),
            num_masked=self.num_masked,
            num_unrolled=self.num_unrolled,
            num_alike=self.num_alike,
            num_shortened=self.encoder.num_shortened,
            refused=() if refused is None else (refused,),
            unread=self.encoder.unread,
            max_length=self.limit.num_tokens,
        )

    def place(self, number: int, row: Row) -> str:
        return place_of(row, f"{self.noun} {number} of the {self.what} data")

    def refuse(self, where: str, error: ConversationError) -> None:
        self.faults.add(where, RowFault(FaultKind.REFUSED, str(error)))

    def check_ids(self, ids: Sequence[int], where: str) -> None:
        check_token_ids(ids, self.encoding.limits, self.encoding.tokenizer, where)

    def cut(self, row: EncodedRow) -> tuple[Tensor, Tensor]:
        """Return the token ids of ``row``, cut, and the target of each position: position t predicts token t + 1."""
        ids = torch.tensor(row.input_ids[: self.limit.num_tokens], dtype=torch.long)
        trained = torch.tensor(row.is_trained[: self.limit.num_tokens], dtype=torch.bool)
        targets = torch.full_like(ids, IGNORED)
        targets[:-1] = torch.where(trained[1:], ids[1:], IGNORED)
        return ids, targets


class _Conversations(_Split):
    """Conversations: all have a label, or none has."""

    noun = "conversation"

    def add_rows(self) -> None:
        for number, (conversation, found) in enumerate(self.encoder.all_rows(self.rows), start=1):
            where = self.place(number, conversation)
            if isinstance(found, ConversationError):
                self.refuse(where, found)
                continue
            rows = found or [EncodedRow((), ())]
            self.num_unrolled += len(rows) > 1
            for row in rows:
                self.num_rows += 1
                self.check_ids(row.input_ids, where)
                self.num_truncated += len(row.input_ids) > self.limit.num_tokens
                self.num_masked += not any(row.is_trained[1:])
                ids, targets = self.cut(row)
                if (targets != IGNORED).any():
                    spans, label = (Span(ids.numel()),), conversation.is_desirable
                    self.writer.add(ids, targets, spans, label=label, columns=conversation.columns)

    def check_rows(self) -> None:
        limit, what = self.limit, self.what
        if not len(self.writer):
            raise DataError(
                f"expected rows to train on in the {what} data, found none of {self.num_rows} with a completion in "
                f"{limit.name}; {limit.remedy} or check that completions are not empty"
            )
        if self.num_truncated == self.num_rows and self.rows[0][-1].role != "text":
            raise DataError(
                f"expected rows of the {what} data to fit into {limit.name}, found all {self.num_rows} longer, so "
                f"that the end of a reply would never be learned; {limit.remedy}"
            )


class _Pairs(_Split):
    """Preference pairs: two sequences per row, whose common beginning goes through the model once."""

    noun = "pair"

    def make_encoder(self) -> Encoder:
        return Encoder(self.encoding.tokenizer, follows_marks=False)

    def add_rows(self) -> None:
        for number, pair in enumerate(self.rows, start=1):
            where = self.place(number, pair)
            if not all(any(turn.is_trained and not turn.is_empty for turn in side) for side in pair.conversations):
                self.num_rows += 1
                self.num_masked += 1
                continue
            try:
                rows = _begun_together([self._encoded(conversation) for conversation in pair.conversations])
            except ConversationError as error:
                self.refuse(where, error)
                continue
            self.num_rows += 1
            for row in rows:
                self.check_ids(row.input_ids, where)
            if rows[0].input_ids == rows[1].input_ids:
                self.num_alike += 1
                continue
            self.num_truncated += any(len(row.input_ids) > self.limit.num_tokens for row in rows)
            (chosen, chosen_targets), (rejected, rejected_targets) = map(self.cut, rows)
            is_cut_off = any(not (targets != IGNORED).any() for targets in (chosen_targets, rejected_targets))
            if is_cut_off or torch.equal(chosen, rejected):
                continue
            prefix = _num_untrained(*rows) if self.encoding.shares_prompts else 0
            self.writer.add(
                torch.cat([chosen, rejected[prefix:]]),
                torch.cat([chosen_targets, rejected_targets[prefix:]]),
                (Span(chosen.numel()), Span(rejected.numel() - prefix, prefix)),
            )

    def check_rows(self) -> None:
        if not len(self.writer):
            raise DataError(
                f"expected pairs to learn from in the {self.what} data, found none of {len(self.rows)} with two "
                f"different replies in {self.limit.name}; {self.limit.remedy} or check that replies differ and are not "
                "empty"
            )

    def _encoded(self, conversation: Conversation) -> EncodedRow:
        rows = self.encoder.rows(conversation)
        if len(rows) > 1:
            raise ConversationError(
                f"expected one reply where the conversations of a pair first differ, found {len(rows)} in the "
                f"conversation that begins with {quoted(conversation[0].content)}, and the model's chat template "
                "rewrites earlier replies; make the last one the reply, and the others part of the prompt"
            )
        return rows[0]


def _begun_together(rows: list[EncodedRow]) -> list[EncodedRow]:
    """Return both conversations, trained from the first token on that is trained in either.

    If one reply merges with the end of the prompt, the other is trained from that token on as well, so that both are
    compared after the same prompt.
    """
    begins = [row.is_trained.index(True) for row in rows if any(row.is_trained)]
    if len(begins) < len(rows):
        return rows
    first = min(begins)
    return [
        EncodedRow(row.input_ids, (*row.is_trained[:first], *[True] * (begin - first), *row.is_trained[begin:]))
        for row, begin in zip(rows, begins, strict=True)
    ]


def _num_untrained(chosen: EncodedRow, rejected: EncodedRow) -> int:
    """Return the number of untrained tokens that both begin with, without the last: it predicts a reply's first."""
    first_trained = min(row.is_trained.index(True) for row in (chosen, rejected))
    return max(0, min(first_trained, num_shared(chosen.input_ids, rejected.input_ids)) - 1)


class _Texts(_Split):
    """Labelled texts."""

    def add_rows(self) -> None:
        assert self.encoding.labels is not None, "labelled texts need the set of labels"
        padding = self.encoding.limits.pad_token_id
        padding = self.encoding.tokenizer.pad_token_id if padding is None else padding
        for number, row in enumerate(self.rows, start=1):
            where = self.place(number, row)
            try:
                ids = self._token_ids(row)
            except ConversationError as error:
                self.refuse(where, error)
                continue
            if not ids:
                reason = "expected a text with at least one token, found none; correct the row"
                self.faults.add(where, RowFault(FaultKind.EMPTY_REPLY, reason))
                continue
            self.num_rows += 1
            if len(ids) > self.limit.num_tokens:
                self.num_truncated += 1
                ids = self._token_ids(row, self.limit.num_tokens)
            self.check_ids(ids, where)
            targets = torch.full((len(ids),), IGNORED)
            targets[_last_token(ids, padding)] = 0
            self.writer.add(torch.tensor(ids), targets, (Span(len(ids)),), label=row.label)

    def _token_ids(self, row: LabelledText, max_length: int | None = None) -> list[int]:
        """Return the token ids of a row, cut at ``max_length`` tokens if that is given."""
        tokenizer = self.encoding.tokenizer
        if not isinstance(row.text, str):
            if not getattr(tokenizer, "chat_template", None):
                raise ConversationError(
                    "expected a tokenizer with a chat template, which conversations need, found one without; set "
                    "chat_template, or give texts"
                )
            text = ChatTemplate(tokenizer).text(row.text, open_turn=False)
            ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
            return ids[:max_length]
        cut = {} if max_length is None else {"truncation": True, "max_length": max_length}
        encoded = tokenizer(row.text, row.text_pair, verbose=False, **cut)
        if any(encoded.get("token_type_ids", ())):
            raise DataError(
                "model: expected a tokenizer whose tokens alone tell two texts apart, found one that marks each token "
                "with its text (token_type_ids); put both texts into one column"
            )
        return list(encoded["input_ids"])


def _last_token(ids: Sequence[int], padding: int | None) -> int:
    """Return the position of the last token that is not padding; 0 if all are padding, as in transformers."""
    if padding is None:
        return len(ids) - 1
    return max((position for position, token in enumerate(ids) if token != padding), default=0)


Sources: TypeAlias = tuple[tuple[str, int], ...]
"""Name and number of rows of each source of a split."""

NewWriter: TypeAlias = Callable[[str], RowWriter]
"""Function that makes the writer for the rows of the split with the given name."""


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
        store: Store of the rows.
    """

    train: Sequence[Row]
    validation: Sequence[Row] = ()
    test: Sequence[Row] | None = None
    layout: Layout
    max_length: int
    unread_columns: Mapping[str, int] = field(default_factory=dict)
    bad_rows: tuple[BadRows, ...] = ()
    on_bad_row: OnBadRow = "error"
    train_on: TrainOn = "completion"
    train_sources: Sources = ()
    validation_sources: Sources = ()
    labels: LabelReader | None = None
    store: RowStore = MEMORY

    def encode(
        self,
        tokenizer: Any,
        limits: ModelLimits | None = None,
        *,
        new_writer: NewWriter = lambda split: RowWriter(),
    ) -> TaskData:
        """Tokenise every split.

        Args:
            new_writer: Function that makes the writer for a split, or for one source of it; called with the split's
                name.

        Raises:
            DataError: See :func:`tokenize`; or the tokenizer leaves replies without an end.
            ModelError: The model has no embedding for a token.
        """
        encoding = self._encoding(tokenizer, limits)
        about_tokenizer = [] if self.labels else tokenizer_notes(tokenizer, _all_conversations(self.train))

        train = self._encoded(self.train, "train", "training", encoding, self.train_sources, new_writer)
        validation = self._encoded(
            self.validation, "validation", "validation", encoding, self.validation_sources, new_writer
        )
        test = self._encoded(self.test, "test", "test", encoding, (), new_writer) if self.test else None
        splits = {"training": train, "validation": validation, **({"test": test} if test else {})}
        num_repeated = num_known(self.validation, self.train)
        num_known_test = num_known(self.test or (), itertools.chain(self.train, self.validation))
        bad_rows = (*self.bad_rows, *(bad for split in splits.values() for bad in split.refused))
        return TaskData(
            train=train,
            validation=validation,
            test=test,
            num_repeated=num_repeated,
            num_known_test=num_known_test,
            num_bad=sum(bad.num_bad for bad in bad_rows),
            notes=(
                *mixture_notes(train, validation),
                *label_notes(train, validation),
                *(bad.note for bad in self.bad_rows),
                *unread_notes(self.unread_columns, train.unread, tokenizer, self.layout.form),
                *reading_notes(len(self.validation), num_repeated),
                *test_notes(len(self.test or ()), num_known_test),
                *about_tokenizer,
                *(note for what, split in splits.items() for note in encoding_notes(split, what, encoding.limit)),
            ),
            layout=self.layout,
            max_length=self.max_length,
        )

    def encode_held_out(self, tokenizer: Any, limits: ModelLimits) -> EncodedDataset:
        """Tokenise only the test rows, or if there are none the validation rows; errors as :meth:`encode`."""
        encoding = self._encoding(tokenizer, limits)
        if self.test:
            return self._encoded(self.test, "test", "test", encoding)
        return self._encoded(self.validation, "validation", "validation", encoding, self.validation_sources)

    def _encoding(self, tokenizer: Any, limits: ModelLimits | None) -> Encoding:
        return Encoding(
            tokenizer=tokenizer,
            max_length=self.max_length,
            limits=limits or _NO_LIMITS,
            train_on=self.train_on,
            on_bad_row=self.on_bad_row,
            labels=None if self.labels is None else self.labels.labels,
        )

    def _encoded(
        self,
        rows: Sequence[Row],
        split: str,
        what: str,
        encoding: Encoding,
        sources: Sources = (),
        new_writer: NewWriter = lambda split: RowWriter(),
    ) -> EncodedDataset:
        if not sources:
            return tokenize(rows, encoding, what, new_writer(split))
        firsts = itertools.accumulate((count for _, count in sources), initial=0)
        parts = [
            self._encoded(rows[first : first + count], split, f"{what} ({name})", encoding, (), new_writer)
            for first, (name, count) in zip(firsts, sources, strict=False)
        ]
        return joined(parts, [name for name, _ in sources], self.store)


def _all_conversations(rows: Sequence[Row]) -> Iterator[Conversation]:
    """Return all conversations of ``rows``; a pair is two."""
    return (
        conversation
        for row in rows
        if not isinstance(row, LabelledText)
        for conversation in (row.conversations if isinstance(row, Pair) else (row,))
    )


def num_known(rows: Iterable[Row], among: Iterable[Row]) -> int:
    """Count the rows that are also in ``among``; only digests of ``rows`` are in memory, 128 bits each."""
    wanted = Counter(map(_digest, rows))
    return sum(wanted.pop(_digest(row), 0) for row in among) if wanted else 0


def _digest(row: Row) -> bytes:
    return hashlib.blake2b(json.dumps(_row_values(row)).encode(), digest_size=_DIGEST_BYTES).digest()


def _row_values(row: Row) -> list[object]:
    """Return the values that make two rows equal, as JSON values."""
    if isinstance(row, LabelledText):
        return [row.text if isinstance(row.text, str) else _values(row.text), row.text_pair, row.label]
    return list(map(_values, _all_conversations([row])))


def _values(conversation: Conversation) -> list[object]:
    """Return the values that make two conversations equal, as JSON values."""
    turns = [(turn.role, turn.content, turn.is_context, turn.extras) for turn in conversation]
    return [turns, conversation.template_arguments, conversation.is_desirable]
