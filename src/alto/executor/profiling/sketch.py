"""The lengths of a task's rows in a few numbers, and rows of random tokens with these lengths.

What a step takes depends on how long its rows are and how much of them is trained, not on what they say.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from alto.data import EncodedDataset, TaskData

__all__ = ["RowLength", "lengths_of", "synthetic_rows"]

_SKETCHED = 64
_EVALUATED = 32


@dataclass(frozen=True, slots=True, order=True)
class RowLength:
    """Tokens of a row, and how many of them are trained."""

    num_tokens: int
    num_trained: int


def lengths_of(dataset: EncodedDataset) -> tuple[RowLength, ...]:
    """At most 64 lengths at equal distances in the order of all, so that their mean is about that of the rows."""
    lengths = sorted(
        RowLength(ids.numel(), int((targets >= 0).sum()))
        for ids, targets in zip(dataset.input_ids, dataset.targets, strict=True)
    )
    count = min(_SKETCHED, len(lengths))
    return tuple(lengths[int((index + 0.5) * len(lengths) / count)] for index in range(count))


def synthetic_rows(lengths: Sequence[RowLength], vocabulary: int, count: int) -> TaskData:
    """``count`` rows of random tokens to train on, and a few to evaluate.

    Their lengths go around ``lengths`` in strides, so that short and long ones mix.
    """
    generator = torch.Generator().manual_seed(0)
    stride = _coprime_to(len(lengths))
    chosen = [lengths[index * stride % len(lengths)] for index in range(count)]
    input_ids, targets = [], []
    for length in chosen:
        ids = torch.randint(0, vocabulary, (length.num_tokens,), generator=generator)
        predicted = ids.roll(-1)
        # The last token predicts nothing; what is trained lies before it, as a reply lies at the end of its row.
        predicted[: length.num_tokens - 1 - length.num_trained] = -100
        predicted[-1] = -100
        input_ids.append(ids)
        targets.append(predicted)
    return TaskData(
        train=_dataset(input_ids, targets), validation=_dataset(input_ids[:_EVALUATED], targets[:_EVALUATED])
    )


def _dataset(input_ids: Sequence[Tensor], targets: Sequence[Tensor]) -> EncodedDataset:
    return EncodedDataset(input_ids=tuple(input_ids), targets=tuple(targets), num_truncated=0, num_skipped=0)


def _coprime_to(count: int) -> int:
    """A stride near the golden section of ``count`` that visits every index."""
    stride = max(1, round(count * 0.618))
    while math.gcd(stride, count) != 1:
        stride += 1
    return stride
