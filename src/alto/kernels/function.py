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

__all__ = ["FrozenLayer", "added_linear", "grouped_lora_linear"]


class FrozenLayer(Protocol):
    """A frozen linear map of tokens."""

    def forward(self, x_TK: Tensor, y_TN: Tensor | None = None) -> Tensor:
        """Its output ``[T, N]``, a tensor of its own, or added to ``y_TN`` in place where that is given."""
        ...

    def backward(self, dy_TN: Tensor, dx_TK: Tensor | None) -> Tensor:
        """The gradient towards its input ``[T, K]``, added to ``dx_TK`` in place where that is given."""
        ...


def added_linear(x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, y_TN: Tensor | None) -> Tensor:
    """``x Wᵀ + bias``, added to ``y_TN`` in place where that is given."""
    if y_TN is None:
        return F.linear(x_TK, weight_NK, bias_N)
    if bias_N is not None:
        y_TN += bias_N
    return y_TN.addmm_(x_TK, weight_NK.T)


class _GroupedLoraLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TK: Tensor,
        anchor: Tensor,
        bases: Sequence[FrozenLayer],
        operands: LoraOperands,
        schedule: TokenSchedule,
        ops: ModuleType,
    ) -> tuple[Tensor, ...]:
        ctx.bases, ctx.operands, ctx.schedule, ctx.ops = bases, operands, schedule, ops
        ctx.is_adapted = any(slot in operands.slots for slot in schedule.slots)
        if not ctx.is_adapted:
            return tuple(base.forward(x_TK) for base in bases)
        s_TQ = ops.grouped_shrink(x_TK, operands, schedule)
        ctx.save_for_backward(x_TK, s_TQ)
        ys = tuple(x_TK.new_empty(len(x_TK), width) for width in operands.out_features)
        ops.grouped_expand(s_TQ, operands, ys, schedule)
        return tuple(base.forward(x_TK, y_TN) for base, y_TN in zip(bases, ys, strict=True))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, None, None, None, None]:
        dys = [gradient.contiguous() for gradient in gradients]
        dx_TK = None
        if ctx.is_adapted:
            x_TK, s_TQ = ctx.saved_tensors
            dx_TK = torch.empty_like(x_TK) if ctx.needs_input_grad[0] else None
            ctx.ops.grouped_backward(x_TK, s_TQ, dys, ctx.operands, dx_TK, ctx.schedule)
        if ctx.needs_input_grad[0]:
            # A quantised base dequantises its weight at each use: one at a time, and none is kept.
            for dy_TN, base in zip(dys, ctx.bases, strict=True):
                dx_TK = base.backward(dy_TN, dx_TK)
        return dx_TK, None, None, None, None, None


def grouped_lora_linear(
    x_TK: Tensor,
    anchor: Tensor,
    bases: Sequence[FrozenLayer],
    operands: LoraOperands,
    schedule: TokenSchedule,
    ops: ModuleType,
) -> tuple[Tensor, ...]:
    """``y[i] = base(x[i]) + scale_i · dropout_i(x[i]) a_i b_i`` for the tokens of every slot ``i`` in every member.

    The backward pass accumulates ``da``/``db`` into the bank and returns the input's gradient; the frozen weights
    get none. Where no slot of the schedule has an adapter here, only the frozen layers are applied; else each adds its
    product to what the adapters have written, in its own GEMM.

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
