"""Splits off validation rows, and orders the rows of a job."""

from __future__ import annotations

import itertools
import random
from array import array
from collections.abc import Sequence
from typing import TypeVar

import torch

from alto.data.row_store import MEMORY, RowStore
from alto.errors import DataError

__all__ = ["DataOrder", "carve_rows", "sample_rows", "split_rows"]

Row = TypeVar("Row")


def sample_rows(rows: Sequence[Row], count: int | None, seed: int, *, store: RowStore = MEMORY) -> Sequence[Row]:
    """Draw ``count`` of ``rows`` with a fixed seed, in their original order; return all if ``count`` is None."""
    if count is None or count >= len(rows):
        return store.choose(rows, range(len(rows)))
    return store.choose(rows, sorted(random.Random(seed).sample(range(len(rows)), count)))


def split_rows(
    rows: Sequence[Row], share: float, seed: int, *, key: str = "validation_split", store: RowStore = MEMORY
) -> tuple[Sequence[Row], Sequence[Row]]:
    """Split off rows drawn with a fixed seed; return training rows and rows set aside, each in original order.

    Args:
        share: Share of the rows to set aside, in (0, 1).
        key: The task's key for that share, for messages.

    Raises:
        DataError: There are fewer than two rows to split.
    """
    if len(rows) < 2:
        raise DataError(
            f"{key}: expected at least 2 rows to split, found {len(rows)}; "
            f"add rows or name a {key.replace('split', 'dataset')}"
        )
    count = min(len(rows) - 1, max(1, round(share * len(rows))))
    chosen = set(random.Random(seed).sample(range(len(rows)), count))
    left = array("q", (index for index in range(len(rows)) if index not in chosen))
    return store.choose(rows, left), store.choose(rows, sorted(chosen))


def carve_rows(
    rows: Sequence[Row], counts: Sequence[int], seed: int, *, store: RowStore = MEMORY
) -> list[Sequence[Row]]:
    """Draw disjoint parts of ``counts`` rows with a fixed seed, each in original order.

    Raises:
        DataError: There are fewer rows than ``counts`` add up to.
    """
    if len(rows) < sum(counts):
        raise DataError(
            f"dataset: expected at least {sum(counts)} rows to draw {', '.join(map(str, counts))} from, found "
            f"{len(rows)}; name the splits with dataset_train_split and validation_split"
        )
    drawn = iter(random.Random(seed).sample(range(len(rows)), sum(counts)))
    return [store.choose(rows, sorted(itertools.islice(drawn, count))) for count in counts]


class DataOrder:
    """The rows of each step of a job: every epoch has its own shuffle, which depends only on seed and epoch.

    The last batch of an epoch holds the remaining rows, as in Hugging Face's Trainer. The rows of any step can be
    computed at any time, so a job that is parked or resumed needs no random state.
    """

    def __init__(self, num_rows: int, batch_size: int, seed: int) -> None:
        self._num_rows = num_rows
        self._batch_size = batch_size
        self._seed = seed
        self._steps_per_epoch = -(-num_rows // batch_size)
        self._epoch = -1
        self._permutation_N = torch.empty(0, dtype=torch.int64)

    def rows_of_step(self, step: int) -> list[int]:
        """Return the row numbers of the step with 0-based index ``step``."""
        epoch, position = divmod(step, self._steps_per_epoch)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
            self._epoch, self._permutation_N = epoch, torch.randperm(self._num_rows, generator=generator)
        rows: list[int] = self._permutation_N[position * self._batch_size :][: self._batch_size].tolist()
        return rows
