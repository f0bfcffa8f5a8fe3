"""Rows as token ids and targets: made once per task, shared by all jobs."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from alto.data.faults import BadRows

__all__ = ["IGNORED", "EncodedDataset", "Span", "Unread", "digest_of", "joined"]

IGNORED = -100
"""The target of a position that predicts nothing."""


@dataclass(frozen=True, slots=True)
class Span:
    """A sequence of a row: ``length`` tokens of it, which continue after the first ``prefix`` tokens of the span before
    this one."""

    length: int
    prefix: int = 0


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
        targets: Per row, the token each position has to predict; :data:`IGNORED` where nothing is trained.
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
        labels: Whether the reply of each row is desirable; None where rows have no labels.
        max_length: Tokens at which rows were cut; None where it is not known.
        references: ``[rows, 2]`` float64, nats: reference log-probs of the chosen and the rejected reply of every pair;
            of other rows, that of the trained tokens, and 0. None until they are computed.
        reference_tails: ``[rows, 2]`` float64, nats: the part of ``references`` that is of tokens beyond the length of
            the pair's shorter reply; None where it is not known.
        num_trained: Trained tokens of every row.
        num_chosen: Trained tokens of the chosen reply of every pair; of other rows, all.
        weights: Weight of every row in a mean over rows: its trained tokens; for pairs and labelled rows, all equal.
    """

    input_ids: tuple[Tensor, ...]
    targets: tuple[Tensor, ...]
    num_truncated: int
    num_skipped: int
    num_masked: int = 0
    num_unrolled: int = 0
    num_alike: int = 0
    num_shortened: int = 0
    refused: tuple[BadRows, ...] = ()
    unread: tuple[Unread, ...] = ()
    spans: tuple[tuple[Span, ...], ...] = ()
    sources: tuple[tuple[str, int], ...] = ()
    labels: tuple[bool, ...] | None = None
    max_length: int | None = None
    references: Tensor | None = None
    reference_tails: Tensor | None = None
    num_trained: tuple[int, ...] = field(init=False)
    num_chosen: tuple[int, ...] = field(init=False)
    weights: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_trained", tuple(int((targets != IGNORED).sum()) for targets in self.targets))
        if not self.spans:
            object.__setattr__(self, "spans", tuple((Span(ids.numel()),) for ids in self.input_ids))
        first_targets = (targets[: spans[0].length] for targets, spans in zip(self.targets, self.spans, strict=True))
        num_chosen = tuple(int((targets != IGNORED).sum()) for targets in first_targets)
        object.__setattr__(self, "num_chosen", num_chosen if self.is_paired else self.num_trained)
        is_mean_of_rows = self.is_paired or self.labels is not None
        object.__setattr__(self, "weights", (1,) * len(self) if is_mean_of_rows else self.num_trained)

    def __len__(self) -> int:
        return len(self.input_ids)

    def parts(self, num_rows: int) -> Iterator[EncodedDataset]:
        """Consecutive parts of so many rows, each a dataset; skipped rows are counted in none of them."""
        for start in range(0, len(self), num_rows):
            stop = start + num_rows
            yield EncodedDataset(
                input_ids=self.input_ids[start:stop],
                targets=self.targets[start:stop],
                num_truncated=0,
                num_skipped=0,
                spans=self.spans[start:stop],
                labels=None if self.labels is None else self.labels[start:stop],
                max_length=self.max_length,
            )

    @property
    def is_paired(self) -> bool:
        """Whether its rows are pairs."""
        return len(self.spans[0]) == 2

    @property
    def sequence_lengths(self) -> tuple[int, ...]:
        """Tokens of every sequence as its last token sees them, the prompt of a pair in both."""
        return tuple(span.prefix + span.length for spans in self.spans for span in spans)

    @property
    def longest_sequence(self) -> int:
        """Tokens that the model sees of the longest sequence, its prefix with it."""
        return max(self.sequence_lengths)

    @property
    def longest_row(self) -> int:
        """Tokens of the longest row, which is never split over micro-batches: of a pair, both replies."""
        return max(ids.numel() for ids in self.input_ids)

    @property
    def num_tokens(self) -> int:
        return sum(ids.numel() for ids in self.input_ids)

    @property
    def num_trained_tokens(self) -> int:
        return sum(self.num_trained)


def joined(parts: Sequence[EncodedDataset], names: Sequence[str]) -> EncodedDataset:
    """The rows of several sources, one after the other.

    Args:
        parts: One or more, all of conversations or all of pairs.
        names: Names of the sources.
    """
    unread: dict[str, Unread] = {}
    for one in (one for part in parts for one in part.unread):
        known = unread.get(one.what, Unread(what=one.what, count=0, total=0))
        unread[one.what] = Unread(what=one.what, count=known.count + one.count, total=known.total + one.total)
    return EncodedDataset(
        input_ids=tuple(row for part in parts for row in part.input_ids),
        targets=tuple(row for part in parts for row in part.targets),
        num_truncated=sum(part.num_truncated for part in parts),
        num_skipped=sum(part.num_skipped for part in parts),
        num_masked=sum(part.num_masked for part in parts),
        num_unrolled=sum(part.num_unrolled for part in parts),
        num_alike=sum(part.num_alike for part in parts),
        num_shortened=sum(part.num_shortened for part in parts),
        refused=tuple(bad for part in parts for bad in part.refused),
        unread=tuple(unread.values()),
        spans=tuple(spans for part in parts for spans in part.spans),
        sources=tuple((name, len(part)) for name, part in zip(names, parts, strict=True)),
        labels=None if parts[0].labels is None else tuple(label for part in parts for label in part.labels or ()),
        max_length=parts[0].max_length,
    )


def digest_of(*datasets: EncodedDataset) -> str:
    """A digest of every token and every target, in order, of how pairs are laid out, and of labels."""
    digest = hashlib.sha256()
    for dataset in datasets:
        for rows in (dataset.input_ids, dataset.targets):
            for row in rows:
                digest.update(row.numel().to_bytes(8, "little"))
                digest.update(row.numpy().tobytes())
        if dataset.is_paired:
            digest.update(repr([[(span.length, span.prefix) for span in spans] for spans in dataset.spans]).encode())
        if dataset.labels is not None:
            digest.update(repr(dataset.labels).encode())
    return digest.hexdigest()
