"""Every op in plain PyTorch, one slot at a time, written to be read: the truth other backends are tested against.

Shapes: ``T`` tokens of a pass, ``Z`` slots, ``R`` largest rank of the bank, ``K`` in-features, ``N`` out-features,
``P`` parameters of a slot. ``ranks`` holds a module's rank in every slot; with rank 0 the slot leaves the module alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from alto.kernels.schedule import TokenSchedule

__all__ = [
    "bank_adamw",
    "fused_expand_add",
    "grouped_backward_input",
    "grouped_backward_weight",
    "grouped_shrink",
]


def grouped_shrink(x_TK: Tensor, a_ZKR: Tensor, schedule: TokenSchedule, ranks: Sequence[int]) -> Tensor:
    """``s[i] = x[i] @ a_i`` for the tokens ``i`` of every slot.

    Returns:
        ``s_TR`` in the dtype of ``a_ZKR``; columns past a slot's own rank are zero.
    """
    s_TR = a_ZKR.new_zeros(x_TK.shape[0], a_ZKR.shape[2])
    for slot, start, end in schedule.segments:
        rank = ranks[slot]
        s_TR[start:end, :rank] = x_TK[start:end].to(a_ZKR.dtype) @ a_ZKR[slot, :, :rank]
    return s_TR


def fused_expand_add(
    s_TR: Tensor, b_ZRN: Tensor, y_TN: Tensor, schedule: TokenSchedule, ranks: Sequence[int]
) -> Tensor:
    """Add every slot's LoRA output to the base output in place: ``y[i] += scale_i * s[i] @ b_i``.

    Columns of ``s_TR`` past a slot's own rank are never read.
    """
    for (slot, start, end), scale in zip(schedule.segments, schedule.scales, strict=True):
        rank = ranks[slot]
        y_TN[start:end] += (scale * (s_TR[start:end, :rank] @ b_ZRN[slot, :rank])).to(y_TN.dtype)
    return y_TN


def grouped_backward_input(
    dy_TN: Tensor, a_ZKR: Tensor, b_ZRN: Tensor, dx_TK: Tensor | None, schedule: TokenSchedule, ranks: Sequence[int]
) -> Tensor:
    """``ds[i] = scale_i * dy[i] @ b_iᵀ``, and in place ``dx[i] += ds[i] @ a_iᵀ``.

    Args:
        dx_TK: The base's input gradient to add to; None where nobody asks for the input's gradient.

    Returns:
        ``ds_TR``; columns past a slot's own rank are zero.
    """
    ds_TR = b_ZRN.new_zeros(dy_TN.shape[0], b_ZRN.shape[1])
    for (slot, start, end), scale in zip(schedule.segments, schedule.scales, strict=True):
        rank = ranks[slot]
        ds_TR[start:end, :rank] = scale * (dy_TN[start:end].to(b_ZRN.dtype) @ b_ZRN[slot, :rank].T)
        if dx_TK is not None:
            dx_TK[start:end] += (ds_TR[start:end, :rank] @ a_ZKR[slot, :, :rank].T).to(dx_TK.dtype)
    return ds_TR


def grouped_backward_weight(
    x_TK: Tensor,
    s_TR: Tensor,
    dy_TN: Tensor,
    ds_TR: Tensor,
    da_ZKR: Tensor,
    db_ZRN: Tensor,
    schedule: TokenSchedule,
    ranks: Sequence[int],
) -> None:
    """Accumulate in place ``da_i += x[i]ᵀ @ ds[i]`` and ``db_i += s[i]ᵀ @ (scale_i * dy[i])``."""
    for (slot, start, end), scale in zip(schedule.segments, schedule.scales, strict=True):
        rank = ranks[slot]
        da_ZKR[slot, :, :rank] += x_TK[start:end].to(da_ZKR.dtype).T @ ds_TR[start:end, :rank]
        db_ZRN[slot, :rank] += scale * (s_TR[start:end, :rank].T @ dy_TN[start:end].to(db_ZRN.dtype))


def bank_adamw(
    params_ZP: Tensor,
    grads_ZP: Tensor,
    exp_avg_ZP: Tensor,
    exp_avg_sq_ZP: Tensor,
    slots: Sequence[int],
    *,
    steps: Sequence[int],
    learning_rates: Sequence[tuple[float, float]],
    b_spans: Sequence[tuple[int, int]],
    betas: Sequence[tuple[float, float]],
    epsilons: Sequence[float],
    weight_decays: Sequence[float],
    grad_scales: Tensor,
) -> None:
    """One AdamW step of every listed row, in place; other rows are not touched.

    The update is that of ``torch.optim.AdamW`` with each row's own settings.

    Args:
        slots: Rows to update.
        steps: Number of this step in each row's own count, 1 for the first.
        learning_rates: Each row's rates for its ``A`` and its ``B`` matrices.
        b_spans: Columns ``[start, end)`` that hold the ``B`` matrices of a row.
        grad_scales: ``[len(slots)]``, factor on each row's gradient (clipping).
    """
    for index, slot in enumerate(slots):
        beta1, beta2 = betas[index]
        gradient = grads_ZP[slot] * grad_scales[index]
        rate_of_a, rate_of_b = learning_rates[index]
        rate_P = torch.full_like(params_ZP[slot], rate_of_a)
        for start, end in b_spans:
            rate_P[start:end] = rate_of_b
        params_ZP[slot] *= 1.0 - rate_P * weight_decays[index]
        exp_avg_ZP[slot] = beta1 * exp_avg_ZP[slot] + (1.0 - beta1) * gradient
        exp_avg_sq_ZP[slot] = beta2 * exp_avg_sq_ZP[slot] + (1.0 - beta2) * gradient * gradient
        mean = exp_avg_ZP[slot] / (1.0 - beta1 ** steps[index])
        deviation = torch.sqrt(exp_avg_sq_ZP[slot] / (1.0 - beta2 ** steps[index]))
        params_ZP[slot] -= rate_P * mean / (deviation + epsilons[index])
