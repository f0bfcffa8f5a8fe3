"""A bias of every slot, added to its own tokens.

One implementation in PyTorch serves all backends: it moves each number once, in a number of launches that does not
depend on the jobs. A slot's bits do not depend on the other slots.

Shapes: ``T`` tokens, ``S`` segments, ``Z`` slots, ``N`` features.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from alto.kernels.schedule import TokenSchedule
from alto.kernels.slot_tensors import SlotTensors

__all__ = ["segment_sums", "slot_bias_change"]


class _SlotBiasChange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, biases: SlotTensors, base_N: Tensor, schedule: TokenSchedule, dtype: torch.dtype
    ) -> Tensor:
        ctx.biases, ctx.schedule = biases, schedule
        change_ZN = biases.gather(base_N).to(dtype) - base_N.to(dtype)
        return change_ZN.index_select(0, schedule.slots_of_tokens(base_N.device))

    @staticmethod
    def backward(ctx: Any, gradient_TN: Tensor) -> tuple[None, None, None, None, None]:
        ctx.biases.accumulate(segment_sums(gradient_TN, ctx.schedule), ctx.schedule)
        return None, None, None, None, None


def slot_bias_change(
    anchor: Tensor, biases: SlotTensors, base_N: Tensor, schedule: TokenSchedule, dtype: torch.dtype
) -> Tensor:
    """By how much every token's own bias differs from the frozen one, ``[T, N]``: zero where a slot has no own.

    The backward pass adds the gradient of each bias, summed over the tokens of its slot, to the bank.

    Args:
        anchor: A tensor that requires grad, so that autograd reaches it.
        biases: Of shape ``[N]``.
        base_N: The frozen bias.
        schedule: Tokens of every slot.
        dtype: Of the output that it is added to. Biases are rounded to it first, as they are where PEFT loads them.
    """
    change_TN: Tensor = _SlotBiasChange.apply(anchor, biases, base_N, schedule, dtype)
    return change_TN


def segment_sums(values_TN: Tensor, schedule: TokenSchedule) -> Tensor:
    """The sum of every segment's rows, ``[S, N]``, at least float32, all segments in one launch.

    Each is summed one token after the other, so the same numbers give the same bits.
    """
    values_TN = values_TN.to(torch.promote_types(values_TN.dtype, torch.float32)).contiguous()
    lengths_S = schedule.lengths_of_segments(values_TN.device)
    # unsafe: the lengths are valid; checking them would synchronise host and device.
    return torch.segment_reduce(values_TN, "sum", lengths=lengths_S, axis=0, unsafe=True)
