"""The rows of each step of a job that draws from several sources."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["MixtureOrder", "mixture_counts"]


def mixture_counts(num_rows: int, shares: Sequence[float]) -> list[int]:
    """Return the number of rows of every source in an epoch: its share of ``num_rows``.

    Numbers are rounded so that they add up to ``num_rows`` (largest remainders; the first source wins a tie).

    Args:
        shares: Share of every source; they sum to 1.
    """
    exact = [num_rows * share for share in shares]
    counts = [math.floor(value + 1e-9) for value in exact]
    left = num_rows - sum(counts)
    by_remainder = sorted(
        (index for index, share in enumerate(shares) if share > 0), key=lambda index: counts[index] - exact[index]
    )
    for index in itertools.islice(itertools.cycle(by_remainder), left):
        counts[index] += 1
    return counts


class MixtureOrder:
    """The rows of each step of a job, drawn from sources by its own weights.

    An epoch has as many rows as all sources together, whatever the weights; every source has its share of them
    (:func:`mixture_counts`). The rows of a source are an endless stream of shuffles, and every epoch continues the
    stream where the epoch before stopped. So a source that is smaller than its share repeats in new shuffles, and a
    larger source gives other rows in later epochs. The rows of an epoch are shuffled together. Everything depends only
    on seed, weights and sizes, and the rows of any step can be computed at any time: like :class:`alto.data.DataOrder`,
    it has no state except the number of steps done.

    Args:
        sizes: Number of rows of every source; the dataset holds one source after the other.
        shares: Share of every source; they sum to 1.
    """

    def __init__(self, sizes: Sequence[int], shares: Sequence[float], batch_size: int, seed: int) -> None:
        assert len(sizes) == len(shares), "one share per source"
        self._sizes = tuple(sizes)
        self._firsts = tuple(itertools.accumulate(sizes, initial=0))[:-1]
        self._counts = mixture_counts(sum(sizes), shares)
        self._batch_size = batch_size
        self._seed = seed
        self._steps_per_epoch = -(-sum(sizes) // batch_size)
        self._epoch = -1
        self._rows_N = torch.empty(0, dtype=torch.int64)

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of rows of every source in an epoch."""
        return tuple(self._counts)

    def rows_of_step(self, step: int) -> list[int]:
        """Return the row numbers of the step with 0-based index ``step``."""
        epoch, position = divmod(step, self._steps_per_epoch)
        if epoch != self._epoch:
            self._epoch, self._rows_N = epoch, self._rows_of_epoch(epoch)
        rows: list[int] = self._rows_N[position * self._batch_size :][: self._batch_size].tolist()
        return rows

    def _rows_of_epoch(self, epoch: int) -> Tensor:
        drawn_N = torch.cat(
            [
                first + self._stream(source, size, epoch * count, count)
                for source, (first, size, count) in enumerate(zip(self._firsts, self._sizes, self._counts, strict=True))
            ]
        )
        return drawn_N[self._shuffle(len(drawn_N), "epoch", epoch)]

    def _stream(self, source: int, size: int, start: int, count: int) -> Tensor:
        """Return rows ``start`` to ``start + count - 1`` of a source's endless stream of shuffles."""
        if not count:
            return torch.empty(0, dtype=torch.int64)
        first, last = start // size, (start + count - 1) // size
        rows = torch.cat([self._shuffle(size, f"source {source}", number) for number in range(first, last + 1)])
        return rows[start - first * size :][:count]

    def _shuffle(self, size: int, what: str, number: int) -> Tensor:
        digest = hashlib.sha256(f"{self._seed}/{what}/{number}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        return torch.randperm(size, generator=generator)
