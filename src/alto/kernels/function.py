"""The autograd function of frozen linear layers that read the same input, with a LoRA adapter per slot.

Adapter gradients are written straight into the bank; autograd sees only activations.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from alto.kernels.operands import LoraOperands
from alto.kernels.schedule import TokenSchedule

__all__ = ["LinearWeights", "grouped_lora_linear"]


class LinearWeights(Protocol):
    """A frozen linear layer: weight ``[N, K]`` and bias ``[N]``, as those of ``torch.nn.Linear``."""

    @property
    def weight(self) -> Tensor: ...

    @property
    def bias(self) -> Tensor | None: ...


class _GroupedLoraLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TK: Tensor,
        anchor: Tensor,
        bases: Sequence[LinearWeights],
        operands: LoraOperands,
        schedule: TokenSchedule,
        ops: ModuleType,
    ) -> tuple[Tensor, ...]:
        ys = tuple(F.linear(x_TK, base.weight, base.bias) for base in bases)
        ctx.bases, ctx.operands, ctx.schedule, ctx.ops = bases, operands, schedule, ops
        if schedule.segments:
            s_TQ = ops.grouped_shrink(x_TK, operands, schedule)
            ops.fused_expand_add(s_TQ, operands, ys, schedule)
            ctx.save_for_backward(x_TK, s_TQ)
        return ys

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, None, None, None, None]:
        dys = [gradient.contiguous() for gradient in gradients]
        dx_TK = None
        if ctx.needs_input_grad[0]:
            # A quantised base dequantises its weight at each use: one at a time, and none is kept.
            dx_TK = dys[0] @ ctx.bases[0].weight
            for dy_TN, base in zip(dys[1:], ctx.bases[1:], strict=True):
                dx_TK.addmm_(dy_TN, base.weight)
        if ctx.schedule.segments:
            x_TK, s_TQ = ctx.saved_tensors
            ds_TQ = ctx.ops.grouped_backward_input(dys, ctx.operands, dx_TK, ctx.schedule)
            ctx.ops.grouped_backward_weight(x_TK, s_TQ, dys, ds_TQ, ctx.operands, ctx.schedule)
        return dx_TK, None, None, None, None, None


def grouped_lora_linear(
    x_TK: Tensor,
    anchor: Tensor,
    bases: Sequence[LinearWeights],
    operands: LoraOperands,
    schedule: TokenSchedule,
    ops: ModuleType,
) -> tuple[Tensor, ...]:
    """``y[i] = x[i] Wᵀ + bias + scale_i · dropout_i(x[i]) a_i b_i`` for the tokens of every slot ``i`` in every member.

    The backward pass accumulates ``da``/``db`` into the bank and returns the input's gradient; the frozen weights
    get none. Under a schedule without segments the tokens belong to no job, and only the frozen layers are applied.

    Args:
        x_TK: Input.
        anchor: A tensor that requires grad, so that autograd reaches layers whose input does not.
        bases: The frozen layers of the group's members.
        operands: The adapters of the group.
        schedule: Tokens of every slot.
        ops: The backend that holds the ops.

    Returns:
        ``y_TN`` of every member, in the dtype of ``x_TK``.
    """
    result: tuple[Tensor, ...] = _GroupedLoraLinear.apply(x_TK, anchor, tuple(bases), operands, schedule, ops)
    return result
