"""The autograd function of frozen linear layers that read the same input, with a LoRA adapter per slot.

Adapter gradients are written straight into the bank; autograd sees only activations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from alto.kernels.operands import LoraOperands
from alto.kernels.schedule import TokenSchedule


class FrozenLayer(Protocol):
    """A frozen linear map of tokens."""

    def forward(self, x_TK: Tensor, y_TN: Tensor | None = None) -> Tensor:
        """Return the output ``[T, N]`` as a new tensor, or add it to ``y_TN`` in place if that is given."""
        ...

    def backward(self, dy_TN: Tensor, dx_TK: Tensor | None) -> Tensor:
        """Return the gradient with respect to the input, ``[T, K]``, added to ``dx_TK`` in place if that is given."""
        ...


def added_linear(x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, y_TN: Tensor | None) -> Tensor:
    """Return ``x Wᵀ + bias``, added to ``y_TN`` in place if that is given."""
    if y_TN is None:
        return F.linear(x_TK, weight_NK, bias_N)
    if bias_N is not None:
        y_TN += bias_N
    return y_TN.addmm_(x_TK, weight_NK.T)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedLinear:
    """Frozen linear layers that read the same input, with the adapters of a forward pass."""

    bases: Sequence[FrozenLayer]
    operands: LoraOperands
    schedule: TokenSchedule
    ops: ModuleType

    @property
    def is_adapted(self) -> bool:
        """Whether any slot of the schedule has an adapter in this group."""
        return any(slot in self.operands.slots for slot in self.schedule.slots)

    def forward(self, x_TK: Tensor) -> tuple[tuple[Tensor, ...], Tensor | None]:
        """Return ``y_TN`` of every member, and ``s_TQ`` for the backward pass, which is None if no slot has an adapter
        in this group."""
        if not self.is_adapted:
            return tuple(base.forward(x_TK) for base in self.bases), None
        s_TQ = self.ops.grouped_shrink(x_TK, self.operands, self.schedule)
        ys = tuple(x_TK.new_empty(len(x_TK), width) for width in self.operands.out_features)
        self.ops.grouped_expand(s_TQ, self.operands, ys, self.schedule)
        return tuple(base.forward(x_TK, y_TN) for base, y_TN in zip(self.bases, ys, strict=True)), s_TQ

    def backward(
        self, dys: Sequence[Tensor], x_TK: Tensor | None, s_TQ: Tensor | None, *, needs_dx: bool
    ) -> Tensor | None:
        """Return the gradient with respect to the input, ``[T, K]``, if needed; add the gradients of the adapters to
        the bank.

        Args:
            dys: Upstream gradient ``[T, N]`` of every member, contiguous.
            x_TK, s_TQ: Tensors of the forward pass; None if no slot has an adapter in this group.
        """
        dx_TK = None
        if s_TQ is not None:
            assert x_TK is not None
            dx_TK = torch.empty_like(x_TK) if needs_dx else None
            self.ops.grouped_backward(x_TK, s_TQ, dys, self.operands, dx_TK, self.schedule)
        if needs_dx:
            # A quantised base dequantises its weight at each use; the loop keeps only one weight in memory.
            for dy_TN, base in zip(dys, self.bases, strict=True):
                dx_TK = base.backward(dy_TN, dx_TK)
        return dx_TK


class _GroupedLoraLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TK: Tensor, anchor: Tensor, group: GroupedLinear) -> tuple[Tensor, ...]:
        ctx.group = group
        ys, s_TQ = group.forward(x_TK)
        ctx.save_for_backward(*(() if s_TQ is None else (x_TK, s_TQ)))
        return ys

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, None]:
        x_TK, s_TQ = ctx.saved_tensors or (None, None)
        dys = [gradient.contiguous() for gradient in gradients]
        return ctx.group.backward(dys, x_TK, s_TQ, needs_dx=ctx.needs_input_grad[0]), None, None


def grouped_lora_linear(
    x_TK: Tensor,
    anchor: Tensor,
    bases: Sequence[FrozenLayer],
    operands: LoraOperands,
    schedule: TokenSchedule,
    ops: ModuleType,
) -> tuple[Tensor, ...]:
    """Compute ``y[i] = base(x[i]) + scale_i · dropout_i(x[i]) a_i b_i`` for the tokens of every slot ``i`` in every
    member.

    The backward pass accumulates ``da`` and ``db`` into the bank and returns the input's gradient; the frozen weights
    get none. If no slot of the schedule has an adapter in this group, only the frozen layers run. Otherwise each frozen
    layer adds its product to the adapters' output within its own GEMM.

    Args:
        anchor: A tensor that requires grad, so that autograd also runs the backward pass of layers whose input needs no
            gradient.

    Returns:
        ``y_TN`` of every member, in the dtype of ``x_TK``.
    """
    group = GroupedLinear(bases=tuple(bases), operands=operands, schedule=schedule, ops=ops)
    result: tuple[Tensor, ...] = _GroupedLoraLinear.apply(x_TK, anchor, group)
    return result
