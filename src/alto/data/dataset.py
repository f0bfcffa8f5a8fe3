"""Rows as token ids and targets: made once per task, shared by all jobs."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import InitVar, dataclass, field, replace
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from alto.data.faults import BadRows
from alto.data.row_store import MEMORY, RowStore
from alto.records import LabelSet, RowLabel

__all__ = [
    "IGNORED",
    "EncodedDataset",
    "EncodedRows",
    "MemoryWriter",
    "RowCounts",
    "RowWriter",
    "Span",
    "Unread",
    "digest_of",
    "joined",
    "running_digests",
]

IGNORED = -100
"""The target of a position that predicts nothing."""


@dataclass(frozen=True, slots=True)
class Span:
    """A sequence of a row: ``length`` tokens of it, which continue after the first ``prefix`` tokens of the span before
    this one."""

    length: int
    prefix: int = 0


class RowCounts(NamedTuple):
    """Numbers of every row, as :class:`EncodedDataset` has them."""

    num_row_tokens: Sequence[int]
    num_trained: Sequence[int]
    num_chosen: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedRows:
    """Tokenised rows, as :class:`EncodedDataset` has them, which counts what is not counted yet."""

    input_ids: Sequence[Tensor]
    targets: Sequence[Tensor]
    spans: Sequence[tuple[Span, ...]]
    is_desirable: Sequence[bool]
    counts: RowCounts | None = None


class RowWriter(Protocol):
    """Takes the rows of a split while they are tokenised."""

    def __len__(self) -> int: ...

    def add(self, input_ids: Tensor, targets: Tensor, spans: tuple[Span, ...], *, is_desirable: bool = True) -> None:
        """Add one row.

        Args:
            input_ids, targets: Vectors of equal length, int64; a target is the next token id, or :data:`IGNORED`.
            spans: Sequences of the row.
            is_desirable: Its label.
        """
        ...

    def rows(self) -> EncodedRows:
        """All rows; none can be added after."""
        ...


class MemoryWriter:
    """Keeps the rows in memory."""

    def __init__(self) -> None:
        self._input_ids: list[Tensor] = []
        self._targets: list[Tensor] = []
        self._spans: list[tuple[Span, ...]] = []
        self._is_desirable: list[bool] = []

    def __len__(self) -> int:
        return len(self._input_ids)

    def add(self, input_ids: Tensor, targets: Tensor, spans: tuple[Span, ...], *, is_desirable: bool = True) -> None:
        """As :meth:`RowWriter.add`."""
        self._input_ids.append(input_ids)
        self._targets.append(targets)
        self._spans.append(spans)
        self._is_desirable.append(is_desirable)

    def rows(self) -> EncodedRows:
        """As :meth:`RowWriter.rows`."""
        return EncodedRows(
            input_ids=tuple(self._input_ids),
            targets=tuple(self._targets),
            spans=tuple(self._spans),
            is_desirable=tuple(self._is_desirable),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Unread:
    """A part of the conversations of a split that does not change the output of the chat template.

    Attributes:
        what: A key of messages; ``row: tools`` for what stands beside them; ``role: tool`` for the turns of a role.
        count, total: Number of places where it is not read, and of all places where it occurs.
    """

    what: str
    count: int
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedDataset:
    """All rows of a split, tokenised.

    A row that is a conversation is one sequence. A pair is two, the chosen and the rejected one, laid end to end; their
    common beginning is there once, except for its last token, which predicts the first token of each reply.

    Attributes:
        input_ids: One vector of token ids per row.
        targets: Per row, the token each position has to predict; :data:`IGNORED` where nothing is trained. Of texts
            with labels, 0 at the position whose hidden state the classification head reads.
        num_truncated: Rows cut at ``max_length``.
        num_skipped: Rows left out, for any reason.
        num_masked: Rows left out because nothing is trained in them, or in one reply of a pair, at any length.
        num_unrolled: Conversations that became one row per reply.
        num_alike: Pairs left out because both replies have the same tokens.
        num_shortened: Trained replies of which the chat template leaves words out.
        refused: Rows that the chat template refuses, which are not among the skipped ones; by source.
        unread: Parts of the conversations that are not read.
        spans: The sequences of every row; by default one each.
        sources: Of a mixture the name and the rows of every source, in the order in which they lie here.
        labels: Whether the reply of each row is desirable; None where replies have no labels.
        classes: The label of each row; None where rows are no texts with labels.
        label_set: The labels there are; None where rows are no texts with labels.
        max_length: Tokens at which rows were cut; None where it is not known.
        references: ``[rows, 2]`` float64, nats: reference log-probs of the chosen and the rejected reply of every pair;
            of other rows, that of the trained tokens, and 0. None until they are computed.
        reference_tails: ``[rows, 2]`` float64, nats: the part of ``references`` that is of tokens beyond the length of
            the pair's shorter reply; None where it is not known.
        num_row_tokens: Tokens of every row.
        num_trained: Trained tokens of every row.
        num_chosen: Trained tokens of the chosen reply of every pair; of other rows, all.
        weights: Weight of every row in a mean over rows: its trained tokens; for pairs and rows with labels, all equal.
        counts: What is known of the three numbers of every row; None counts them.
    """

    input_ids: Sequence[Tensor]
    targets: Sequence[Tensor]
    num_truncated: int
    num_skipped: int
    num_masked: int = 0
    num_unrolled: int = 0
    num_alike: int = 0
    num_shortened: int = 0
    refused: tuple[BadRows, ...] = ()
    unread: tuple[Unread, ...] = ()
    spans: Sequence[tuple[Span, ...]] = ()
    sources: tuple[tuple[str, int], ...] = ()
    labels: Sequence[bool] | None = None
    classes: tuple[RowLabel, ...] | None = None
    label_set: LabelSet | None = None
    max_length: int | None = None
    references: Tensor | None = None
    reference_tails: Tensor | None = None
    num_row_tokens: Sequence[int] = field(init=False)
    num_trained: Sequence[int] = field(init=False)
    num_chosen: Sequence[int] = field(init=False)
    weights: Sequence[int] = field(init=False)
    counts: InitVar[RowCounts | None] = None

    def __post_init__(self, counts: RowCounts | None) -> None:
        # `dataclasses.replace` does not hand counts on, so those of other rows are never kept.
        num_row_tokens = counts.num_row_tokens if counts else tuple(ids.numel() for ids in self.input_ids)
        object.__setattr__(self, "num_row_tokens", num_row_tokens)
        if not self.spans:
            object.__setattr__(self, "spans", tuple((Span(length),) for length in num_row_tokens))
        num_trained = counts.num_trained if counts else tuple(map(_num_trained, self.targets))
        object.__setattr__(self, "num_trained", num_trained)
        num_chosen = num_trained if not self.is_paired else counts.num_chosen if counts else self._count_chosen()
        object.__setattr__(self, "num_chosen", num_chosen)
        is_mean_of_rows = self.is_paired or self.labels is not None or self.classes is not None
        object.__setattr__(self, "weights", (1,) * len(self) if is_mean_of_rows else self.num_trained)

    @classmethod
    def of(cls, rows: EncodedRows, *, is_labelled: bool = False, **facts: Any) -> EncodedDataset:
        """A split of ``rows``.

        Args:
            is_labelled: Whether the labels of the rows have a meaning.
            facts: Other attributes.
        """
        return cls(
            input_ids=rows.input_ids,
            targets=rows.targets,
            spans=rows.spans,
            labels=rows.is_desirable if is_labelled else None,
            counts=rows.counts,
            **facts,
        )

    @property
    def _counts(self) -> RowCounts:
        return RowCounts(self.num_row_tokens, self.num_trained, self.num_chosen)

    def with_references(self, references: Tensor, reference_tails: Tensor) -> EncodedDataset:
        """The same rows with reference log-probs, both ``[rows, 2]``."""
        return replace(self, references=references, reference_tails=reference_tails, counts=self._counts)

    def _count_chosen(self) -> tuple[int, ...]:
        first_targets = (targets[: spans[0].length] for targets, spans in zip(self.targets, self.spans, strict=True))
        return tuple(map(_num_trained, first_targets))

    def __len__(self) -> int:
        return len(self.input_ids)

    def parts(self, num_rows: int) -> Iterator[EncodedDataset]:
        """Consecutive parts of so many rows, each a dataset; skipped rows are counted in none of them."""
        return (self.rows(start, start + num_rows) for start in range(0, len(self), num_rows))

    def rows(self, start: int, stop: int) -> EncodedDataset:
        """The rows from ``start`` to before ``stop``, without sources; skipped rows are counted in no part."""
        return EncodedDataset(
            input_ids=self.input_ids[start:stop],
            targets=self.targets[start:stop],
            num_truncated=0,
            num_skipped=0,
            spans=self.spans[start:stop],
            labels=None if self.labels is None else self.labels[start:stop],
            classes=None if self.classes is None else self.classes[start:stop],
            label_set=self.label_set,
            max_length=self.max_length,
            counts=RowCounts(*(column[start:stop] for column in self._counts)),
        )

    @property
    def is_paired(self) -> bool:
        """Whether its rows are pairs."""
        return bool(self.spans) and len(self.spans[0]) == 2

    @property
    def sequence_lengths(self) -> tuple[int, ...]:
        """Tokens of every sequence as its last token sees them, the prompt of a pair in both."""
        return tuple(self._sequence_lengths())

    def _sequence_lengths(self) -> Iterator[int]:
        return (span.prefix + span.length for spans in self.spans for span in spans)

    @property
    def longest_sequence(self) -> int:
        """Tokens that the model sees of the longest sequence, its prefix with it."""
        return max(self._sequence_lengths())

    @property
    def longest_row(self) -> int:
        """Tokens of the longest row, which is never split over micro-batches: of a pair, both replies."""
        return max(self.num_row_tokens)

    @property
    def num_tokens(self) -> int:
        return sum(self.num_row_tokens)

    @property
    def num_trained_tokens(self) -> int:
        return sum(self.num_trained)


def joined(parts: Sequence[EncodedDataset], names: Sequence[str] = (), store: RowStore = MEMORY) -> EncodedDataset:
    """The rows of several sources, one after the other.

    Args:
        parts: One or more, all of conversations or all of pairs.
        names: Names of the sources; empty where they are one dataset.
        store: Where the rows of the parts are.
    """
    unread: dict[str, Unread] = {}
    for one in (one for part in parts for one in part.unread):
        known = unread.get(one.what, Unread(what=one.what, count=0, total=0))
        unread[one.what] = Unread(what=one.what, count=known.count + one.count, total=known.total + one.total)
    return EncodedDataset(
        input_ids=store.chain([part.input_ids for part in parts]),
        targets=store.chain([part.targets for part in parts]),
        num_truncated=sum(part.num_truncated for part in parts),
        num_skipped=sum(part.num_skipped for part in parts),
        num_masked=sum(part.num_masked for part in parts),
        num_unrolled=sum(part.num_unrolled for part in parts),
        num_alike=sum(part.num_alike for part in parts),
        num_shortened=sum(part.num_shortened for part in parts),
        refused=tuple(bad for part in parts for bad in part.refused),
        unread=tuple(unread.values()),
        spans=store.chain([part.spans for part in parts]),
        sources=tuple((name, len(part)) for name, part in zip(names, parts, strict=True)) if names else (),
        labels=None if parts[0].labels is None else store.chain([part.labels or () for part in parts]),
        classes=None if parts[0].classes is None else tuple(label for part in parts for label in part.classes or ()),
        label_set=parts[0].label_set,
        max_length=parts[0].max_length,
        counts=RowCounts(*map(store.chain, zip(*(part._counts for part in parts), strict=True))),
    )


def digest_of(*datasets: EncodedDataset) -> str:
    """A digest of every token and every target, in order, of how pairs are laid out, of labels, and of the sizes of
    sources."""
    return running_digests(*datasets)[-1]


def running_digests(*datasets: EncodedDataset) -> tuple[str, ...]:
    """For each of ``datasets``, :func:`digest_of` it and those before it; tokens are read once."""
    digest = hashlib.sha256()
    found = []
    for dataset in datasets:
        for rows in (dataset.input_ids, dataset.targets):
            for row in rows:
                digest.update(row.numel().to_bytes(8, "little"))
                digest.update(row.numpy().tobytes())
        if dataset.is_paired:
            _add_listed(digest, "[]", ([(span.length, span.prefix) for span in spans] for spans in dataset.spans))
        if dataset.labels is not None:
            _add_listed(digest, "()" if len(dataset) > 1 else ("(", ",)"), dataset.labels)
        if dataset.classes is not None:
            digest.update(repr((dataset.label_set, dataset.classes)).encode())
        if dataset.sources:
            digest.update(repr(dataset.sources).encode())
        found.append(digest.hexdigest())
    return tuple(found)


def _add_listed(digest: hashlib._Hash, brackets: Sequence[str], items: Iterable[object]) -> None:
    """Add the text that Python writes of a list or tuple of ``items``, without making it as a whole."""
    opening, closing = brackets
    digest.update(opening.encode())
    for index, item in enumerate(items):
        digest.update(f"{', ' if index else ''}{item!r}".encode())
    digest.update(closing.encode())


def _num_trained(targets: Tensor) -> int:
    return int((targets != IGNORED).sum())
