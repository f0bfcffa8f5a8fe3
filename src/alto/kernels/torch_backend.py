"""The ops on library GEMMs: no copies of adapter matrices, no columns past a slot's rank. Runs on CPU and CUDA.

Shapes as in :mod:`alto.kernels.reference`, which documents every op.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from alto.kernels.schedule import TokenSchedule

__all__ = [
    "bank_adamw",
    "fused_expand_add",
    "grouped_backward_input",
    "grouped_backward_weight",
    "grouped_shrink",
]


def grouped_shrink(x_TK: Tensor, a_ZKR: Tensor, schedule: TokenSchedule, ranks: Sequence[int]) -> Tensor:
    """See :func:`alto.kernels.reference.grouped_shrink`; columns past a slot's rank are left unwritten."""
    x_TK = x_TK.to(a_ZKR.dtype)
    s_TR = a_ZKR.new_empty(x_TK.shape[0], a_ZKR.shape[2])
    for slot, start, end in schedule.segments:
        rank = ranks[slot]
        if rank:
            torch.mm(x_TK[start:end], a_ZKR[slot, :, :rank], out=s_TR[start:end, :rank])
    return s_TR


def fused_expand_add(
    s_TR: Tensor, b_ZRN: Tensor, y_TN: Tensor, schedule: TokenSchedule, ranks: Sequence[int]
) -> Tensor:
    """See :func:`alto.kernels.reference.fused_expand_add`."""
    for (slot, start, end), scale in zip(schedule.segments, schedule.scales, strict=True):
        rank = ranks[slot]
        if rank and y_TN.dtype == b_ZRN.dtype:
            y_TN[start:end].addmm_(s_TR[start:end, :rank], b_ZRN[slot, :rank], alpha=scale)
        elif rank:
            y_TN[start:end] += torch.mm(s_TR[start:end, :rank], b_ZRN[slot, :rank]).mul_(scale)
    return y_TN


def grouped_backward_input(
    dy_TN: Tensor, a_ZKR: Tensor, b_ZRN: Tensor, dx_TK: Tensor | None, schedule: TokenSchedule, ranks: Sequence[int]
) -> Tensor:
    """See :func:`alto.kernels.reference.grouped_backward_input`; columns past a slot's rank are left unwritten."""
    dy_TN = dy_TN.to(b_ZRN.dtype)
    ds_TR = b_ZRN.new_empty(dy_TN.shape[0], b_ZRN.shape[1])
    for (slot, start, end), scale in zip(schedule.segments, schedule.scales, strict=True):
        rank = ranks[slot]
        if not rank:
            continue
        ds = ds_TR[start:end, :rank]
        torch.mm(dy_TN[start:end], b_ZRN[slot, :rank].T, out=ds)
        ds.mul_(scale)
        if dx_TK is None:
            continue
        if dx_TK.dtype == a_ZKR.dtype:
            dx_TK[start:end].addmm_(ds, a_ZKR[slot, :, :rank].T)
        else:
            dx_TK[start:end] += torch.mm(ds, a_ZKR[slot, :, :rank].T)
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
    """See :func:`alto.kernels.reference.grouped_backward_weight`."""
    x_TK, dy_TN = x_TK.to(da_ZKR.dtype), dy_TN.to(db_ZRN.dtype)
    for (slot, start, end), scale in zip(schedule.segments, schedule.scales, strict=True):
        rank = ranks[slot]
        if rank:
            da_ZKR[slot, :, :rank].addmm_(x_TK[start:end].T, ds_TR[start:end, :rank])
            db_ZRN[slot, :rank].addmm_(s_TR[start:end, :rank].T, dy_TN[start:end], alpha=scale)


def bank_adamw(
    params_ZP: Tensor,
    grads_ZP: Tensor,
    exp_avg_ZP: Tensor,
    exp_avg_sq_ZP: Tensor,
    slots: Sequence[int],
    *,
    steps: Sequence[int],
    learning_rates: Sequence[float],
    betas: Sequence[tuple[float, float]],
    epsilons: Sequence[float],
    weight_decays: Sequence[float],
    grad_scales: Tensor,
) -> None:
    """See :func:`alto.kernels.reference.bank_adamw`. PyTorch's fused AdamW, one call per row.

    A row is megabytes, so a call per row costs nothing against the memory it moves, and each row is read once.
    """
    for index, slot in enumerate(slots):
        gradient = grads_ZP[slot].mul_(grad_scales[index])
        adamw(
            [params_ZP[slot]],
            [gradient],
            [exp_avg_ZP[slot]],
            [exp_avg_sq_ZP[slot]],
            [],
            [torch.tensor(float(steps[index] - 1), device=params_ZP.device)],
            fused=True,
            amsgrad=False,
            maximize=False,
            lr=learning_rates[index],
            beta1=betas[index][0],
            beta2=betas[index][1],
            eps=epsilons[index],
            weight_decay=weight_decays[index],
        )
