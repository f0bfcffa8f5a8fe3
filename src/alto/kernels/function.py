"""The autograd function of frozen linear layers that read the same input, with a LoRA adapter per slot.

Adapter gradients are written straight into the bank; autograd sees only activations.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor

from alto.kernels.operands import LoraOperands
from alto.kernels.schedule import TokenSchedule

__all__ = ["FrozenLayer", "grouped_lora_linear"]


class FrozenLayer(Protocol):
    """A frozen linear map of tokens."""

    def forward(self, x_TK: Tensor) -> Tensor:
        """Its output ``[T, N]``, a tensor of its own."""
        ...

    def backward(self, dy_TN: Tensor, dx_TK: Tensor | None) -> Tensor:
        """The gradient towards its input ``[T, K]``, added to ``dx_TK`` in place where that is given."""
        ...


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
        ys = tuple(base.forward(x_TK) for base in bases)
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
            for dy_TN, base in zip(dys, ctx.bases, strict=True):
                dx_TK = base.backward(dy_TN, dx_TK)
        if ctx.schedule.segments:
            x_TK, s_TQ = ctx.saved_tensors
            ds_TQ = ctx.ops.grouped_backward_input(dys, ctx.operands, dx_TK, ctx.schedule)
            ctx.ops.grouped_backward_weight(x_TK, s_TQ, dys, ds_TQ, ctx.operands, ctx.schedule)
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
