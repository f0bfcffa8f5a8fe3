"""Samples the lengths of a task's rows, and makes rows of random tokens with these lengths.

Memory and time of a step depend on the lengths of its rows, the number of their trained tokens and the shared tokens of
pairs, not on their text.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from alto.data import IGNORED, Advantage, EncodedDataset, Span, TaskData
from alto.records import LabelSet, RowLabel

_SKETCHED = 64
NUM_EVALUATED = {"cpu": 8, "cuda": 32}
"""Largest number of evaluated rows by device; few rows fill a CPU's cores."""


class SpanLength(NamedTuple):
    """The length of a sequence: its tokens, its trained tokens, and how many tokens of the sequence before it are its
    prefix."""

    num_tokens: int
    num_trained: int
    prefix: int = 0


@dataclass(frozen=True, slots=True)
class RowLength:
    """The sequences of a row: one for a conversation, two for a pair."""

    spans: tuple[SpanLength, ...]

    @property
    def num_tokens(self) -> int:
        """Number of tokens that go through the model."""
        return sum(span.num_tokens for span in self.spans)


def lengths_of(dataset: EncodedDataset, *, num_generated: int = 0) -> tuple[RowLength, ...]:
    """Return at most 64 row lengths, at equal distances in the sorted list of all, so that their mean is about the mean
    of all rows.

    Args:
        num_generated: Number of tokens that a job generates instead of the trained tokens of a row; 0 if it trains on
            the rows as they are.
    """
    spans = zip(dataset.spans, dataset.num_chosen, dataset.num_trained, strict=True)
    num_numbers = len(SpanLength._fields) * len(dataset.spans[0])
    numbers = np.fromiter(
        (number for row in spans for span in _span_lengths(*row) for number in span),
        np.int32,
        len(dataset) * num_numbers,
    ).reshape(len(dataset), -1, len(SpanLength._fields))
    num_tokens = numbers[:, :, 0].sum(axis=1)
    by_importance = (num_tokens, *numbers.reshape(len(dataset), -1).T)
    order = np.lexsort(by_importance[::-1])
    count = min(_SKETCHED, len(dataset))
    chosen = (numbers[order[int((index + 0.5) * len(dataset) / count)]].tolist() for index in range(count))
    lengths = tuple(RowLength(tuple(SpanLength(*span) for span in row)) for row in chosen)
    return tuple(map(partial(_generated, num_generated=num_generated), lengths)) if num_generated else lengths


def _generated(row: RowLength, *, num_generated: int) -> RowLength:
    """Return the length of a row whose trained tokens are replaced by generated ones."""
    (span,) = row.spans
    return RowLength((SpanLength(span.num_tokens - span.num_trained + num_generated, num_generated),))


def _span_lengths(spans: Sequence[Span], num_chosen: int, num_trained: int) -> Iterator[SpanLength]:
    """Yield the span lengths of one row, whose first span has ``num_chosen`` of its ``num_trained`` trained tokens."""
    for span, trained in zip(spans, (num_chosen, num_trained - num_chosen), strict=False):
        yield SpanLength(span.length, trained, span.prefix)


def synthetic_rows(
    lengths: Sequence[RowLength],
    vocabulary: int,
    count: int,
    *,
    num_evaluated: int = NUM_EVALUATED["cpu"],
    is_labelled: bool = False,
    is_sampled: bool = False,
    labels: LabelSet | None = None,
) -> TaskData:
    """Make ``count`` training rows of random tokens; the first ``num_evaluated`` rows are also the validation rows.

    Reference log-probs are 0. If replies are labelled, every second row is desirable; if they are sampled, every row
    has an advantage; if there are ``labels``, each row has the first label. Token ids are below ``vocabulary``. The
    lengths are taken from ``lengths`` in strides, so that short and long rows mix.
    """
    generator = torch.Generator().manual_seed(0)
    stride = _coprime_to(len(lengths))
    rows = [lengths[index * stride % len(lengths)] for index in range(count)]
    train, validation = (
        _dataset(part, vocabulary, generator, is_labelled, is_sampled, labels) for part in (rows, rows[:num_evaluated])
    )
    return TaskData(train=train, validation=validation)


def _dataset(
    rows: Sequence[RowLength],
    vocabulary: int,
    generator: torch.Generator,
    is_labelled: bool,
    is_sampled: bool,
    labels: LabelSet | None,
) -> EncodedDataset:
    input_ids, targets = [], []
    for row in rows:
        ids = torch.randint(0, vocabulary, (row.num_tokens,), generator=generator)
        predicted = ids.roll(-1)
        end = 0
        for span in row.spans:
            start, end = end, end + span.num_tokens
            # The last token predicts nothing; the trained tokens come just before it, like a reply at the end of its
            # row.
            predicted[start : end - 1 - span.num_trained] = IGNORED
            predicted[end - 1] = IGNORED
        if labels is not None:
            predicted = torch.full_like(ids, IGNORED)
            predicted[-1] = 0
        input_ids.append(ids)
        targets.append(predicted)
    spans = tuple(tuple(Span(span.num_tokens, span.prefix) for span in row.spans) for row in rows)
    return EncodedDataset(
        input_ids=tuple(input_ids),
        targets=tuple(targets),
        spans=spans,
        references=torch.zeros(len(rows), 2, dtype=torch.float64) if is_labelled or len(spans[0]) == 2 else None,
        reference_tails=torch.zeros(len(rows), 2, dtype=torch.float64) if len(spans[0]) == 2 else None,
        labels=tuple(index % 2 == 0 for index in range(len(rows))) if is_labelled else None,
        classes=None if labels is None else (_any_label(labels),) * len(rows),
        label_set=labels,
        advantages=(Advantage(1.0, 1.0),) * len(rows) if is_sampled else None,
        max_length=max(row.num_tokens for row in rows) if is_labelled else None,
    )


def _any_label(labels: LabelSet) -> RowLabel:
    return 0 if labels.problem_type == "single_label_classification" else (0.0,) * labels.num_labels


def _coprime_to(count: int) -> int:
    """Return a stride near ``count`` divided by the golden ratio that visits every index."""
    stride = max(1, round(count * 0.618))
    while math.gcd(stride, count) != 1:
        stride += 1
    return stride
