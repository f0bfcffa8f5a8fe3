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
    adapters = a_ZKR.unbind(0)
    for slot, x, s in zip(schedule.slots, x_TK.split(schedule.lengths), s_TR.split(schedule.lengths), strict=True):
        rank = ranks[slot]
        if rank:
            torch.mm(x, adapters[slot][:, :rank], out=s[:, :rank])
    return s_TR


def fused_expand_add(
    s_TR: Tensor, b_ZRN: Tensor, y_TN: Tensor, schedule: TokenSchedule, ranks: Sequence[int]
) -> Tensor:
    """See :func:`alto.kernels.reference.fused_expand_add`."""
    adapters = b_ZRN.unbind(0)
    parts = zip(
        schedule.slots, schedule.scales, s_TR.split(schedule.lengths), y_TN.split(schedule.lengths), strict=True
    )
    for slot, scale, s, y in parts:
        rank = ranks[slot]
        if rank:
            _add_product(y, s[:, :rank], adapters[slot][:rank], scale)
    return y_TN


def grouped_backward_input(
    dy_TN: Tensor, a_ZKR: Tensor, b_ZRN: Tensor, dx_TK: Tensor | None, schedule: TokenSchedule, ranks: Sequence[int]
) -> Tensor:
    """See :func:`alto.kernels.reference.grouped_backward_input`; columns past a slot's rank are left unwritten."""
    dy_TN = dy_TN.to(b_ZRN.dtype)
    ds_TR = b_ZRN.new_empty(dy_TN.shape[0], b_ZRN.shape[1])
    a_adapters, b_adapters = a_ZKR.unbind(0), b_ZRN.unbind(0)
    dx_parts = dx_TK.split(schedule.lengths) if dx_TK is not None else [None] * len(schedule.segments)
    parts = zip(
        schedule.slots,
        schedule.scales,
        dy_TN.split(schedule.lengths),
        ds_TR.split(schedule.lengths),
        dx_parts,
        strict=True,
    )
    for slot, scale, dy, ds, dx in parts:
        rank = ranks[slot]
        if rank:
            ds = ds[:, :rank]
            torch.mm(dy, b_adapters[slot][:rank].T, out=ds)
            ds.mul_(scale)
            if dx is not None:
                _add_product(dx, ds, a_adapters[slot][:, :rank].T)
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
    da_adapters, db_adapters = da_ZKR.unbind(0), db_ZRN.unbind(0)
    tokens = (x_TK.to(da_ZKR.dtype), s_TR, dy_TN.to(db_ZRN.dtype), ds_TR)
    parts = zip(schedule.slots, schedule.scales, *(t.split(schedule.lengths) for t in tokens), strict=True)
    for slot, scale, x, s, dy, ds in parts:
        rank = ranks[slot]
        if rank:
            _add_product(da_adapters[slot][:, :rank], x.T, ds[:, :rank])
            _add_product(db_adapters[slot][:rank], s[:, :rank].T, dy, scale)


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
    """See :func:`alto.kernels.reference.bank_adamw`. PyTorch's fused AdamW, one call per row, or one for each
    of its two rates.

    A row is megabytes, so a call per row costs nothing against the memory it moves, and each row is read once.
    """
    for index, slot in enumerate(slots):
        grads_ZP[slot].mul_(grad_scales[index])
        for rate, spans in _spans_by_rate(learning_rates[index], b_spans, params_ZP.shape[1]):
            params, grads, exp_avg, exp_avg_sq = (
                [tensor_ZP[slot, start:end] for start, end in spans]
                for tensor_ZP in (params_ZP, grads_ZP, exp_avg_ZP, exp_avg_sq_ZP)
            )
            adamw(
                params,
                grads,
                exp_avg,
                exp_avg_sq,
                [],
                [torch.tensor(float(steps[index] - 1), device=params_ZP.device) for _ in spans],
                fused=True,
                amsgrad=False,
                maximize=False,
                lr=rate,
                beta1=betas[index][0],
                beta2=betas[index][1],
                eps=epsilons[index],
                weight_decay=weight_decays[index],
            )


def _spans_by_rate(
    rates: tuple[float, float], b_spans: Sequence[tuple[int, int]], row_size: int
) -> list[tuple[float, Sequence[tuple[int, int]]]]:
    """The columns each rate is for; the whole row where the rates of ``A`` and ``B`` are one."""
    rate_of_a, rate_of_b = rates
    if rate_of_a == rate_of_b:
        return [(rate_of_a, [(0, row_size)])]
    borders = [0, *(border for span in b_spans for border in span), row_size]
    a_spans = [(start, end) for start, end in zip(borders[::2], borders[1::2], strict=True) if start < end]
    return [(rate_of_a, a_spans), (rate_of_b, b_spans)]


def _add_product(target: Tensor, left: Tensor, right: Tensor, scale: float = 1.0) -> None:
    """``target += scale * left @ right`` in place, in one GEMM where the dtypes agree."""
    if target.dtype == left.dtype:
        target.addmm_(left, right, alpha=scale)
    else:
        target += torch.mm(left, right).mul_(scale)
