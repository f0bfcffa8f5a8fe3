"""The memory of a bank and its optimizers, computed before they are created."""

from __future__ import annotations

import math
from collections.abc import Collection

import torch

from alto.lora.eight_bit import eight_bit_bytes
from alto.lora.layout import BankLayout
from alto.lora.torch_optimizers import TORCH_OPTIMIZERS, torch_optimizer_bytes
from alto.spec.optimizers import OptimizerName

__all__ = ["bank_bytes"]


def bank_bytes(
    layout: BankLayout,
    num_slots: int,
    optims: Collection[OptimizerName],
    adapter_dtype: torch.dtype = torch.float32,
    working_dtype: torch.dtype | None = None,
    state_dtype: torch.dtype | None = None,
) -> int:
    """Return the memory of an :class:`AdapterBank` and its :class:`SlotAdamW`, in bytes, with the largest adapter in
    every slot and the costliest of ``optims``.

    Paged state counts in full, because it leaves the device only when the device's memory is full.

    Args:
        optims: Optimizers of the task's jobs.
        adapter_dtype: Precision of adapters and gradients.
        working_dtype: Precision of the bank's copies of its weights; None for no copies.
        state_dtype: Precision of the moments of ``adamw_torch``; None means that of the adapters.
    """
    bytes_of_rows = 2 * adapter_dtype.itemsize  # weights and gradients
    if working_dtype is not None:
        bytes_of_rows += working_dtype.itemsize
    if "adamw_torch" in optims:
        bytes_of_rows += 2 * (state_dtype or adapter_dtype).itemsize
    shapes: list[tuple[int, ...]] = [
        (layout.max_rank, side) for module in layout.modules for side in (module.in_features, module.out_features)
    ]
    shapes += [extra.shape for extra in layout.extras]
    own = [
        torch_optimizer_bytes(shapes, adapter_dtype, optim)
        if optim in TORCH_OPTIMIZERS
        else eight_bit_bytes(map(math.prod, shapes), adapter_dtype)
        for optim in set(optims) - {"adamw_torch"}
    ]
    return num_slots * (bytes_of_rows * layout.row_size + max(own, default=0))
