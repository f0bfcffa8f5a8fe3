"""A bias per slot, added to the slot's own tokens.

One PyTorch implementation serves all backends, because it moves each element once, in a number of launches that does
not depend on the jobs. A slot's results are bit-identical whatever other slots are present.

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
    """Return the difference between every token's own bias and the frozen one, ``[T, N]``; zero if a slot has no own
    bias.

    The backward pass adds the gradient of each bias, summed over the tokens of its slot, to the bank.

    Args:
        anchor: A tensor that requires grad, so that autograd runs the backward pass.
        biases: The slots' biases, each ``[N]``.
        base_N: The frozen bias.
        dtype: Dtype of the output that the result is added to. Biases are rounded to it first, as PEFT does when it
            loads them.
    """
    change_TN: Tensor = _SlotBiasChange.apply(anchor, biases, base_N, schedule, dtype)
    return change_TN


def segment_sums(values_TN: Tensor, schedule: TokenSchedule) -> Tensor:
    """Return the sum of every segment's rows, ``[S, N]``, at least float32, in one launch for all segments.

    Each segment is summed token by token, so the same inputs give the same bits.
    """
    values_TN = values_TN.to(torch.promote_types(values_TN.dtype, torch.float32)).contiguous()
    lengths_S = schedule.lengths_of_segments(values_TN.device)
    # unsafe=True skips the check of the lengths, which are valid; it would synchronise host and device.
    return torch.segment_reduce(values_TN, "sum", lengths=lengths_S, axis=0, unsafe=True)
