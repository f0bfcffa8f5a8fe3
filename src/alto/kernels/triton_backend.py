"""The ops as Triton kernels: launches per op do not grow with the number of slots. Runs on CUDA.

Shapes as in :mod:`alto.kernels.reference`, which documents every op. No op waits for the device, none uses atomics:
the same inputs give the same bits, and a slot's bits do not depend on its company.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

import torch
import triton
from torch import Tensor

from alto.kernels.pass_table import upload
from alto.kernels.schedule import TokenSchedule
from alto.kernels.triton_config import (
    ADAMW_BLOCK,
    adamw_config,
    backward_weight_config,
    expand_config,
    shrink_config,
)
from alto.kernels.triton_kernels.adamw import adamw_kernel
from alto.kernels.triton_kernels.backward_weight import backward_weight_kernel
from alto.kernels.triton_kernels.expand import expand_kernel
from alto.kernels.triton_kernels.shrink import shrink_kernel

__all__ = [
    "bank_adamw",
    "fused_expand_add",
    "grouped_backward_input",
    "grouped_backward_weight",
    "grouped_shrink",
]


def grouped_shrink(x_TK: Tensor, a_ZKR: Tensor, schedule: TokenSchedule, ranks: Sequence[int]) -> Tensor:
    """See :func:`alto.kernels.reference.grouped_shrink`; columns past a slot's rank are left unwritten."""
    return _shrink(x_TK, a_ZKR, schedule, ranks, scaled=False)


def fused_expand_add(
    s_TR: Tensor, b_ZRN: Tensor, y_TN: Tensor, schedule: TokenSchedule, ranks: Sequence[int]
) -> Tensor:
    """See :func:`alto.kernels.reference.fused_expand_add`; the sum is rounded once, to the dtype of ``y_TN``."""
    _expand_add(s_TR, b_ZRN, y_TN, schedule, ranks, scaled=True)
    return y_TN


def grouped_backward_input(
    dy_TN: Tensor, a_ZKR: Tensor, b_ZRN: Tensor, dx_TK: Tensor | None, schedule: TokenSchedule, ranks: Sequence[int]
) -> Tensor:
    """See :func:`alto.kernels.reference.grouped_backward_input`; columns past a slot's rank are left unwritten."""
    ds_TR = _shrink(dy_TN, b_ZRN.transpose(1, 2), schedule, ranks, scaled=True)
    if dx_TK is not None:
        _expand_add(ds_TR, a_ZKR.transpose(1, 2), dx_TK, schedule, ranks, scaled=False)
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
    _accumulate_gradient(x_TK, ds_TR, da_ZKR, schedule, ranks, scaled=False)
    _accumulate_gradient(dy_TN, s_TR, db_ZRN.transpose(1, 2), schedule, ranks, scaled=True)


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
    """See :func:`alto.kernels.reference.bank_adamw`; all rows in one launch."""
    banks = (params_ZP, grads_ZP, exp_avg_ZP, exp_avg_sq_ZP)
    assert {bank_ZP.stride() for bank_ZP in banks} == {(params_ZP.stride(0), 1)}
    if not slots:
        return
    spans_C3, alignment = _column_spans(tuple(b_spans), params_ZP.shape[1], params_ZP.device)
    settings = [
        (*rates, beta1, 1.0 - beta1, beta2, 1.0 - beta2, epsilon, decay, 1.0 - beta1**step, 1.0 - beta2**step)
        for rates, (beta1, beta2), epsilon, decay, step in zip(
            learning_rates, betas, epsilons, weight_decays, steps, strict=True
        )
    ]
    exact = torch.float64 if params_ZP.dtype == torch.float64 else torch.float32
    adamw_kernel[(len(spans_C3), len(slots))](
        *banks,
        upload(slots, torch.int32, params_ZP.device),
        grad_scales.to(exact),
        upload(settings, exact, params_ZP.device),
        spans_C3,
        params_ZP.stride(0),
        **adamw_config(params_ZP.dtype, alignment).arguments,
    )


def _shrink(
    wide_TW: Tensor, weight_ZWR: Tensor, schedule: TokenSchedule, ranks: Sequence[int], *, scaled: bool
) -> Tensor:
    """``wide[i] @ weight_i``, times the slot's scale where ``scaled``, in the dtype of the weight."""
    num_wide, max_rank = weight_ZWR.shape[1:]
    assert wide_TW.shape == (schedule.num_tokens, num_wide)
    narrow_TR = weight_ZWR.new_empty(schedule.num_tokens, max_rank)
    table = schedule.table(wide_TW.device)
    config = shrink_config(max_rank, wide_TW.dtype, weight_ZWR.dtype, scaled=scaled)
    if table.num_blocks:
        shrink_kernel[(table.num_blocks, triton.cdiv(max_rank, config.constants["RANK_TILE"]))](
            wide_TW,
            weight_ZWR,
            narrow_TR,
            table.blocks_B3,
            table.scales_Z,
            table.ranks(ranks),
            num_wide,
            *wide_TW.stride(),
            *weight_ZWR.stride(),
            narrow_TR.stride(0),
            **config.arguments,
        )
    return narrow_TR


def _expand_add(
    narrow_TR: Tensor,
    weight_ZRW: Tensor,
    wide_TW: Tensor,
    schedule: TokenSchedule,
    ranks: Sequence[int],
    *,
    scaled: bool,
) -> None:
    """``wide[i] += narrow[i] @ weight_i``, the product times the slot's scale where ``scaled``."""
    max_rank, num_wide = weight_ZRW.shape[1:]
    assert wide_TW.shape == (schedule.num_tokens, num_wide)
    assert narrow_TR.shape == (schedule.num_tokens, max_rank)
    assert narrow_TR.stride(1) == 1
    table = schedule.table(wide_TW.device)
    config = expand_config(max_rank, wide_TW.dtype, weight_ZRW.dtype, scaled=scaled)
    if table.num_blocks:
        expand_kernel[(triton.cdiv(num_wide, config.constants["BLOCK_W"]), table.num_blocks)](
            narrow_TR,
            weight_ZRW,
            wide_TW,
            table.blocks_B3,
            table.scales_Z,
            table.ranks(ranks),
            num_wide,
            narrow_TR.stride(0),
            *weight_ZRW.stride(),
            *wide_TW.stride(),
            **config.arguments,
        )


def _accumulate_gradient(
    wide_TW: Tensor,
    narrow_TR: Tensor,
    gradient_ZWR: Tensor,
    schedule: TokenSchedule,
    ranks: Sequence[int],
    *,
    scaled: bool,
) -> None:
    """``gradient_i += wide[i]ᵀ @ narrow[i]``, the product times the slot's scale where ``scaled``.

    A segment is one program's loop, whatever its length. Splitting long ones over programs would take a workspace and
    a second pass; with tiles of 64 columns one slot of an 8B model already makes 64 to 224 programs, and every further
    slot as many again.
    """
    num_wide, max_rank = gradient_ZWR.shape[1:]
    assert wide_TW.shape == (schedule.num_tokens, num_wide)
    assert narrow_TR.shape == (schedule.num_tokens, max_rank)
    assert narrow_TR.stride(1) == 1
    table = schedule.table(wide_TW.device)
    config = backward_weight_config(max_rank, wide_TW.dtype, gradient_ZWR.dtype, scaled=scaled)
    if table.num_segments:
        rank_tiles = triton.cdiv(max_rank, config.constants["RANK_TILE"])
        backward_weight_kernel[(triton.cdiv(num_wide, config.constants["BLOCK_W"]), table.num_segments, rank_tiles)](
            wide_TW,
            narrow_TR,
            gradient_ZWR,
            table.segments_S3,
            table.scales_Z,
            table.ranks(ranks),
            num_wide,
            *wide_TW.stride(),
            narrow_TR.stride(0),
            *gradient_ZWR.stride(),
            **config.arguments,
        )


@lru_cache(maxsize=4)
def _column_spans(b_spans: tuple[tuple[int, int], ...], row_size: int, device: torch.device) -> tuple[Tensor, int]:
    """The columns of a row in spans of at most ``ADAMW_BLOCK`` that lie in ``A`` or in ``B`` matrices alone.

    Returns:
        First column, end, and whether it is of a ``B``, ``[C, 3]`` int64; and a power of two that divides all borders.
    """
    borders = [0, *(border for span in b_spans for border in span), row_size]
    spans = [
        (first, min(first + ADAMW_BLOCK, end), index % 2)
        for index, (start, end) in enumerate(pairwise(borders))
        for first in range(start, end, ADAMW_BLOCK)
    ]
    return upload(spans, torch.int64, device), math.gcd(16, *borders)
