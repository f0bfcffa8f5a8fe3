"""The autograd function of a frozen linear layer with a LoRA adapter per slot.

Adapter gradients are written straight into the bank; autograd sees only activations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from alto.kernels.dropout import apply_dropout
from alto.kernels.schedule import TokenSchedule

__all__ = ["LoraOperands", "grouped_lora_linear"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraOperands:
    """One module's view of the bank.

    Attributes:
        module: Number of the module among the model's linear modules, part of the key of its dropout masks. Not its
            place in the bank, which depends on what other jobs target.
        a_ZKR, b_ZRN: Down- and up-projections of all slots, strided views of the bank.
        da_ZKR, db_ZRN: Where their gradients are accumulated.
        ranks: The module's rank in every slot.
    """

    module: int
    a_ZKR: Tensor
    b_ZRN: Tensor
    da_ZKR: Tensor
    db_ZRN: Tensor
    ranks: Sequence[int]


class _GroupedLoraLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TK: Tensor,
        anchor: Tensor,
        weight_NK: Tensor,
        bias_N: Tensor | None,
        operands: LoraOperands,
        schedule: TokenSchedule,
        ops: ModuleType,
    ) -> Tensor:
        y_TN = F.linear(x_TK, weight_NK, bias_N)
        s_TR = ops.grouped_shrink(
            apply_dropout(x_TK, schedule, operands.module), operands.a_ZKR, schedule, operands.ranks
        )
        ops.fused_expand_add(s_TR, operands.b_ZRN, y_TN, schedule, operands.ranks)
        ctx.save_for_backward(x_TK, s_TR, weight_NK)
        ctx.operands, ctx.schedule, ctx.ops = operands, schedule, ops
        return y_TN

    @staticmethod
    def backward(ctx: Any, dy_TN: Tensor) -> tuple[Tensor | None, None, None, None, None, None, None]:
        x_TK, s_TR, weight_NK = ctx.saved_tensors
        operands, schedule, ops = ctx.operands, ctx.schedule, ctx.ops
        dy_TN = dy_TN.contiguous()
        dx_TK = dy_TN @ weight_NK if ctx.needs_input_grad[0] else None
        # With dropout the adapters' share of dx passes through their masks, so it is formed apart.
        dx_lora_TK = torch.zeros_like(dx_TK) if dx_TK is not None and any(schedule.dropout) else dx_TK
        ds_TR = ops.grouped_backward_input(dy_TN, operands.a_ZKR, operands.b_ZRN, dx_lora_TK, schedule, operands.ranks)
        ops.grouped_backward_weight(
            apply_dropout(x_TK, schedule, operands.module),
            s_TR,
            dy_TN,
            ds_TR,
            operands.da_ZKR,
            operands.db_ZRN,
            schedule,
            operands.ranks,
        )
        if dx_TK is not None and dx_lora_TK is not None and dx_lora_TK is not dx_TK:
            dx_TK += apply_dropout(dx_lora_TK, schedule, operands.module)
        return dx_TK, None, None, None, None, None, None


def grouped_lora_linear(
    x_TK: Tensor,
    anchor: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None,
    operands: LoraOperands,
    schedule: TokenSchedule,
    ops: ModuleType,
) -> Tensor:
    """``y[i] = x[i] Wᵀ + bias + scale_i · dropout_i(x[i]) a_i b_i`` for the tokens of every slot ``i``.

    The backward pass accumulates ``da``/``db`` into the bank and returns the input's gradient; the frozen weight
    gets none.

    Args:
        anchor: A tensor that requires grad, so that autograd reaches layers whose input does not.
        ops: The backend that holds the ops.

    Returns:
        ``y_TN`` in the dtype of ``x_TK``.
    """
    result: Tensor = _GroupedLoraLinear.apply(x_TK, anchor, weight_NK, bias_N, operands, schedule, ops)
    return result
