"""Norms of the gradients of a bank's slots, from sums of squares where kernels have left them."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from alto.kernels import upload
from alto.lora.bank import AdapterBank

__all__ = ["gradient_norms"]


def gradient_norms(ops: ModuleType, bank: AdapterBank, slots: Sequence[int]) -> Tensor:
    """Norm ``[len(slots)]`` of every slot's gradient, at least float32.

    A slot's norm is read from the sums of squares of its gradient's tiles if all of the gradient has such sums, and
    from the gradient if not: of adapters with further tensors, embeddings or experts, of those whose gradient is summed
    over ranks, and of those whose pass has left out a module. Which of the two depends on the slot alone.
    """
    sums = bank.square_sums
    summed = [] if sums is None else [index for index, slot in enumerate(slots) if sums.are_complete(slot)]
    if sums is None or not summed:
        norms: Tensor = ops.row_norms(bank.grads_ZP, slots, [bank.places(slot).end for slot in slots])
        return norms
    counts = [sums.num_sums(bank.places(slots[index]).groups) for index in summed]
    norms = ops.summed_norms(sums.sums_ZC, [slots[index] for index in summed], counts)
    left = [index for index in range(len(slots)) if index not in set(summed)]
    if not left:
        return norms
    rest = [slots[index] for index in left]
    of_rows = ops.row_norms(bank.grads_ZP, rest, [bank.places(slot).end for slot in rest])
    order = sorted(range(len(slots)), key=(summed + left).__getitem__)
    # A list as an index would be copied from memory that is not pinned, which synchronises host and device.
    return torch.cat([norms, of_rows]).index_select(0, upload(order, torch.int64, norms.device))
