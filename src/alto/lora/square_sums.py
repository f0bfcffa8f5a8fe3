"""Sums of squares of a bank's gradients, one per tile, written by the same kernels that write the gradients.

Shapes: ``Z`` slots, ``C`` tiles of the largest adapter.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import accumulate

import torch

from alto.kernels import GradientTiles
from alto.lora.layout import AdapterShape, BankLayout, GroupPlace

__all__ = ["SquareSums"]

_ROW_ALIGNMENT = 16


class SquareSums:
    """The sums of all slots, and which slots' sums cover the whole gradient of the current step.

    An adapter's sums lie in its row in the order of its own groups, independent of other adapters.

    Args:
        groups: Indices of the groups whose kernels write sums.
        tiles: Tiles of the gradients.
        dtype: Dtype of the sums.
    """

    def __init__(
        self,
        layout: BankLayout,
        groups: Collection[int],
        num_slots: int,
        tiles: GradientTiles,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._layout, self.groups, self.tiles = layout, groups, tiles
        largest = layout.places(AdapterShape(rank=layout.max_rank, targets=layout.modules))
        num_tiles = sum(self._counts(largest.groups))
        row_size = -(-num_tiles // _ROW_ALIGNMENT) * _ROW_ALIGNMENT
        self.sums_ZC = torch.zeros(num_slots, row_size, device=device, dtype=dtype)
        self._complete: set[int] = set()

    def starts(self, places: Sequence[GroupPlace]) -> list[int]:
        """Return the offset of each group's sums in an adapter's row."""
        return list(accumulate(self._counts(places)[:-1], initial=0))

    def num_sums(self, places: Sequence[GroupPlace]) -> int:
        """Return the number of an adapter's sums."""
        return sum(self._counts(places))

    def complete(self, slot: int) -> None:
        """Mark the sums of ``slot`` as covering its whole gradient."""
        self._complete.add(slot)

    def forget(self, slots: Collection[int]) -> None:
        """Mark the sums of ``slots`` as outdated, because their gradients have changed."""
        self._complete.difference_update(slots)

    def are_complete(self, slot: int) -> bool:
        """Return whether the sums of ``slot`` cover its whole gradient."""
        return slot in self._complete

    def _counts(self, places: Sequence[GroupPlace]) -> list[int]:
        max_rank = self._layout.max_rank
        counts = []
        for index, (group, place) in enumerate(zip(self._layout.groups, places, strict=True)):
            widths = [module.out_features for module in group]
            own = self.tiles.num_sums(group[0].in_features, widths, place.ranks, max_rank)
            counts.append(sum(own) if index in self.groups else 0)
        return counts
