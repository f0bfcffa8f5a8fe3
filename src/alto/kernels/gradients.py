"""In which step the gradients of a bank were written: the first product of a step overwrites, later ones are added.

So no gradient is set to zero after a step, and none is read before the first product of the next. Kernels may also keep
the sum of squares of every tile of a gradient that they write, so that the norm of a gradient needs no pass over it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["GradientSteps", "GradientTiles", "GroupGradients"]


class GradientTiles(NamedTuple):
    """The tiles in which kernels write gradients.

    Attributes:
        wide: Features of a tile.
        narrow: Most ranks of a tile.
        many, wide_of_many: Where a bank may have more than ``many`` ranks side by side, tiles have so many features.
    """

    wide: int
    narrow: int
    many: int
    wide_of_many: int

    def num_sums(
        self, in_features: int, out_features: Sequence[int], ranks: Sequence[int], max_rank: int
    ) -> tuple[int, ...]:
        """Tiles of ``A`` of a group and of every member's ``B``, of an adapter of these ranks in a bank for up to
        ``max_rank``."""
        a = self._num_tiles(in_features, sum(ranks), max_rank * len(ranks))
        bs = (self._num_tiles(wide, rank, max_rank) for wide, rank in zip(out_features, ranks, strict=True))
        return a, *bs

    def _num_tiles(self, wide: int, narrow: int, most: int) -> int:
        columns = self.wide_of_many if most > self.many else self.wide
        return -(-wide // columns) * -(-narrow // self.narrow)


class GradientSteps:
    """Numbers the steps of every slot, for all groups of modules of a bank."""

    def __init__(self, num_slots: int) -> None:
        self.of_slots = [0] * num_slots

    def end(self, slots: Sequence[int]) -> None:
        """End the present step of ``slots``: their gradients are of no use any more."""
        for slot in slots:
            self.of_slots[slot] += 1


class GroupGradients:
    """The gradients of one group of modules.

    Args:
        steps: Of the bank.
    """

    def __init__(self, steps: GradientSteps) -> None:
        self._steps = steps.of_slots
        self._written = [-1] * len(steps.of_slots)

    def begin(self, slots: Sequence[int]) -> tuple[bool, ...]:
        """Whether each of ``slots`` has a gradient of its present step; from now on it has."""
        steps, written = self._steps, self._written
        found = tuple([written[slot] == steps[slot] for slot in slots])
        if not all(found):
            for slot in slots:
                written[slot] = steps[slot]
        return found

    def has(self, slot: int) -> bool:
        """Whether ``slot`` has a gradient of its present step."""
        return self._written[slot] == self._steps[slot]
