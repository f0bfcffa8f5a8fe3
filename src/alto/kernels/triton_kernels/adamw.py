"""One AdamW step of many rows of the bank, each with its own settings, in one launch."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["adamw_kernel"]


@triton.jit(do_not_specialize=["stride_z"])
def adamw_kernel(
    params_ZP,
    grads_ZP,
    exp_avg_ZP,
    exp_avg_sq_ZP,
    grad_scales_U,
    rows_U3,
    settings_U10,
    stride_z,
    ALIGNMENT: tl.constexpr,
    BLOCK: tl.constexpr,
    ACCUMULATOR: tl.constexpr,
):
    """Grid: blocks of ``BLOCK`` columns of the longest row, rows ``U``. Gradients are left zero.

    Args:
        rows_U3: Row of the bank, where its ``A`` end, where its ``B`` end, int64.
        settings_U10: Per row the rates of ``A`` and of ``B``, β₁, 1 - β₁, β₂, 1 - β₂, ε, weight decay, 1 - β₁ᵗ and
            1 - β₂ᵗ. The differences come from the host's float64: formed here they would lose half their digits.
        ALIGNMENT: A power of two that divides the row size and every end.
    """
    row = rows_U3 + 3 * tl.program_id(1)
    start = tl.program_id(0).to(tl.int64) * BLOCK
    end = tl.multiple_of(tl.load(row + 2), ALIGNMENT)
    if start >= end:
        return
    settings = settings_U10 + 10 * tl.program_id(1)
    columns = start + tl.arange(0, BLOCK)
    mask = columns < end
    rate = tl.where(columns < tl.load(row + 1), tl.load(settings), tl.load(settings + 1))
    offsets = tl.multiple_of(tl.load(row) * stride_z, ALIGNMENT) + columns
    gradient = tl.load(grads_ZP + offsets, mask=mask, other=0.0).to(ACCUMULATOR)
    gradient *= tl.load(grad_scales_U + tl.program_id(1))
    exp_avg = tl.load(exp_avg_ZP + offsets, mask=mask, other=0.0).to(ACCUMULATOR) * tl.load(settings + 2)
    exp_avg += gradient * tl.load(settings + 3)
    exp_avg_sq = tl.load(exp_avg_sq_ZP + offsets, mask=mask, other=0.0).to(ACCUMULATOR) * tl.load(settings + 4)
    exp_avg_sq += gradient * gradient * tl.load(settings + 5)
    mean = exp_avg / tl.load(settings + 8)
    deviation = tl.sqrt(exp_avg_sq / tl.load(settings + 9)) + tl.load(settings + 6)
    params = tl.load(params_ZP + offsets, mask=mask, other=0.0).to(ACCUMULATOR)
    params -= params * (rate * tl.load(settings + 7))
    params -= rate * (mean / deviation)
    tl.store(params_ZP + offsets, params.to(params_ZP.dtype.element_ty), mask=mask)
    tl.store(exp_avg_ZP + offsets, exp_avg.to(exp_avg_ZP.dtype.element_ty), mask=mask)
    tl.store(exp_avg_sq_ZP + offsets, exp_avg_sq.to(exp_avg_sq_ZP.dtype.element_ty), mask=mask)
    tl.store(grads_ZP + offsets, tl.zeros((BLOCK,), dtype=grads_ZP.dtype.element_ty), mask=mask)
