"""The step in which each gradient of a bank was written: the first product of a step overwrites, later ones are added.

So gradients need not be zeroed after a step, and none is read before the first product of the next step. Kernels may
also store the sum of squares of every gradient tile they write, so that a gradient's norm needs no extra pass over it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["GradientSteps", "GradientTiles", "GroupGradients"]


class GradientTiles(NamedTuple):
    """The tiles in which kernels write gradients.

    Attributes:
        wide: Number of features per tile.
        narrow: Largest number of ranks per tile.
        many, wide_of_many: If a bank may have more than ``many`` ranks side by side, tiles have ``wide_of_many``
            features.
    """

    wide: int
    narrow: int
    many: int
    wide_of_many: int

    def num_sums(
        self, in_features: int, out_features: Sequence[int], ranks: Sequence[int], max_rank: int
    ) -> tuple[int, ...]:
        """Return the number of tiles of a group's ``A`` and of every member's ``B``, for an adapter with these ranks in
        a bank with up to ``max_rank``."""
        a = self._num_tiles(in_features, sum(ranks), max_rank * len(ranks))
        bs = (self._num_tiles(wide, rank, max_rank) for wide, rank in zip(out_features, ranks, strict=True))
        return a, *bs

    def _num_tiles(self, wide: int, narrow: int, most: int) -> int:
        columns = self.wide_of_many if most > self.many else self.wide
        return -(-wide // columns) * -(-narrow // self.narrow)


class GradientSteps:
    """Step numbers of all slots, shared by all groups of modules of a bank."""

    def __init__(self, num_slots: int) -> None:
        self.of_slots = [0] * num_slots

    def end(self, slots: Sequence[int]) -> None:
        """End the current step of ``slots``; their gradients are no longer needed."""
        for slot in slots:
            self.of_slots[slot] += 1


class GroupGradients:
    """The record of which gradients of one group of modules were written in the current step.

    Args:
        steps: Step numbers of the bank.
    """

    def __init__(self, steps: GradientSteps) -> None:
        self._steps = steps.of_slots
        self._written = [-1] * len(steps.of_slots)

    def begin(self, slots: Sequence[int]) -> tuple[bool, ...]:
        """Return whether each of ``slots`` already has a gradient of its current step, and mark all of them as having
        one."""
        steps, written = self._steps, self._written
        found = tuple([written[slot] == steps[slot] for slot in slots])
        if not all(found):
            for slot in slots:
                written[slot] = steps[slot]
        return found

    def has(self, slot: int) -> bool:
        """Return whether ``slot`` has a gradient of its current step."""
        return self._written[slot] == self._steps[slot]
