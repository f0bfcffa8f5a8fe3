"""Gradient norms of a bank's slots, computed from sums of squares where kernels have written them."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from alto.kernels import upload
from alto.lora.bank import AdapterBank

__all__ = ["gradient_norms"]


def gradient_norms(ops: ModuleType, bank: AdapterBank, slots: Sequence[int]) -> Tensor:
    """Return the norm of every slot's gradient, ``[len(slots)]``, at least float32.

    A norm is computed from the sums of squares of the gradient's tiles if they cover the whole gradient, and from the
    gradient itself otherwise: for adapters with extra tensors, embeddings or experts, for gradients summed over ranks,
    and for passes that skipped a module. The choice depends only on the slot itself.
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
    # Indexing with a list would copy from unpinned memory, which synchronises host and device.
    return torch.cat([norms, of_rows]).index_select(0, upload(order, torch.int64, norms.device))
