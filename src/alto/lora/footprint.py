"""The memory of a bank and the optimizers of its slots, before they are made."""

from __future__ import annotations

from collections.abc import Collection

import torch

from alto.lora.eight_bit import eight_bit_bytes
from alto.lora.layout import BankLayout
from alto.spec.job_config import OptimizerName

__all__ = ["bank_bytes"]


def bank_bytes(
    layout: BankLayout,
    num_slots: int,
    optims: Collection[OptimizerName],
    adapter_dtype: torch.dtype = torch.float32,
) -> int:
    """Bytes of the tensors of an :class:`AdapterBank` and its :class:`SlotAdamW`, with the largest adapter in every
    slot under the costliest of ``optims``.

    Paged state counts like all other state: it leaves the device only when that is full.

    Args:
        layout: Layout of a row.
        num_slots: Number of slots.
        optims: Optimizers of the task's jobs.
        adapter_dtype: Precision of adapters, gradients and moments.
    """
    rows = 2 + 2 * ("adamw_torch" in optims)  # weights and gradients, two moments
    own = 0
    if set(optims) - {"adamw_torch"}:
        sizes = [
            layout.max_rank * side for module in layout.modules for side in (module.in_features, module.out_features)
        ]
        own = eight_bit_bytes(sizes, adapter_dtype)
    return num_slots * (rows * layout.row_size * adapter_dtype.itemsize + own)
