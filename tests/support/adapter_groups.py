"""Groups of linear modules with adapters in a bank, for the tests of the ops, and the same adapters in dense form.
Nothing here asks the code under test for the position of a matrix.

Shapes: ``M`` members of the group; the others as in :mod:`alto.kernels.reference`. Dense matrices have the largest rank
``R`` for every slot and member, and zeros where an adapter has no columns.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from alto.kernels import LoraOperands

__all__ = ["Group"]

GAP = 3
"""Unused numbers between two matrices of a row; odd, so that nothing is aligned."""


class Group:
    """Random adapters of one group, one per row, and the positions of their numbers.

    Attributes:
        ranks_ZM: Rank of every slot on every member; 0 if a slot does not target a member.
        ratios_ZM: Scale of every slot on every member, divided by that of the slot's segment.
        operands: The group with all slots occupied. Parameters and gradients are random numbers of few bits, which
            every dtype holds exactly; parameters between the matrices are NaN.
        own_ZP: Whether each number of the bank belongs to a matrix.
    """

    def __init__(
        self,
        ranks_ZM: Sequence[Sequence[int]],
        *,
        in_features: int,
        out_features: Sequence[int],
        number: int = 5,
        seed: int = 0,
        ratios_ZM: Sequence[Sequence[float]] | None = None,
    ) -> None:
        num_slots, num_members = len(ranks_ZM), len(out_features)
        self.ratios_ZM = ratios_ZM or [[1.0] * num_members for _ in ranks_ZM]
        self.ranks_ZM = ranks_ZM
        self._number, self._in_features, self._out_features = number, in_features, out_features
        self._max_rank = max(1, *(rank for ranks in ranks_ZM for rank in ranks))
        # Place in its row of every number of the dense matrices, and number in them of each narrow column; -1: none.
        self._a_addresses_ZMKR = torch.full((num_slots, num_members, in_features, self._max_rank), -1)
        self._b_addresses = [torch.full((num_slots, self._max_rank, n), -1) for n in out_features]
        self._columns_ZQ = torch.full((num_slots, num_members * self._max_rank), -1)
        self._seats = [self._lay_out(slot, ranks) for slot, ranks in enumerate(ranks_ZM)]
        addresses = [self._a_addresses_ZMKR, *self._b_addresses]
        self.own_ZP = torch.zeros(num_slots, max(int(part.max()) for part in addresses) + 1 + GAP, dtype=torch.bool)
        for part in addresses:
            slots, *_ = torch.nonzero(part >= 0, as_tuple=True)
            self.own_ZP[slots, part[part >= 0]] = True
        generator = torch.Generator().manual_seed(seed)
        params_ZP, grads_ZP = (torch.randint(-8, 9, self.own_ZP.shape, generator=generator) / 8.0 for _ in range(2))
        self.operands = self.operands_with_adapters(
            params_ZP.double().masked_fill(~self.own_ZP, float("nan")), grads_ZP.double()
        )

    def operands_with_adapters(self, params_ZP: Tensor, grads_ZP: Tensor) -> LoraOperands:
        """Return the group on another bank, with every slot resident that is resident in ``operands``."""
        operands = LoraOperands(
            number=self._number,
            in_features=self._in_features,
            out_features=self._out_features,
            params_ZP=params_ZP,
            grads_ZP=grads_ZP,
            max_rank=self._max_rank,
        )
        for slot, (ranks, (a_start, b_starts)) in enumerate(zip(self.ranks_ZM, self._seats, strict=True)):
            operands.assign(slot, ranks, a_start, b_starts, self.ratios_ZM[slot])
        return operands

    def dense(self, rows_ZP: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return ``A`` as ``[Z, M, K, R]`` and ``B`` of every member as ``[Z, R, N]``, from a tensor with the layout of
        the bank."""
        with_zero = torch.cat([rows_ZP, rows_ZP.new_zeros(rows_ZP.shape[0], 1)], dim=1)

        def take(addresses: Tensor) -> Tensor:
            return with_zero.gather(1, (addresses % with_zero.shape[1]).flatten(1)).view(addresses.shape)

        return take(self._a_addresses_ZMKR), [take(addresses) for addresses in self._b_addresses]

    def put(self, rows_ZP: Tensor, a_ZMKR: Tensor, bs: Sequence[Tensor]) -> Tensor:
        """Return a copy of ``rows_ZP`` with the dense matrices in their places."""
        rows_ZP = rows_ZP.clone()
        for values, addresses in zip((a_ZMKR, *bs), (self._a_addresses_ZMKR, *self._b_addresses), strict=True):
            slots, *_ = torch.nonzero(addresses >= 0, as_tuple=True)
            rows_ZP[slots, addresses[addresses >= 0]] = values[addresses >= 0]
        return rows_ZP

    def packed(self, s_TMR: Tensor, token_slots_T: Tensor, fill: float) -> Tensor:
        """Return ``[T, M, R]`` in the form of the ops, ``[T, Q]``, with ``fill`` past every slot's own columns."""
        flat = torch.cat([s_TMR.flatten(1), s_TMR.new_full((s_TMR.shape[0], 1), fill)], dim=1)
        return flat.gather(1, self._columns_ZQ[token_slots_T] % flat.shape[1])

    def _lay_out(self, slot: int, ranks: Sequence[int]) -> tuple[int, list[int]]:
        """Choose the positions of ``slot``'s matrices, with gaps and different for each slot; record every address."""
        width, a_start, first = sum(ranks), GAP + slot % 5, 0
        start, b_starts = a_start + self._in_features * width + GAP, []
        rows_K1 = a_start + width * torch.arange(self._in_features)[:, None]
        for member, (rank, n) in enumerate(zip(ranks, self._out_features, strict=True)):
            self._a_addresses_ZMKR[slot, member, :, :rank] = rows_K1 + torch.arange(first, first + rank)
            self._b_addresses[member][slot, :rank] = start + torch.arange(rank * n).view(rank, n)
            self._columns_ZQ[slot, first : first + rank] = member * self._max_rank + torch.arange(rank)
            b_starts.append(start)
            start += rank * n + GAP
            first += rank
        return a_start, b_starts
