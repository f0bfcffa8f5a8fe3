"""One AdamW step of many rows of the bank, each with its own settings, in one launch."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["adamw_kernel"]


@triton.jit
def adamw_kernel(
    params_ZP,
    grads_ZP,
    exp_avg_ZP,
    exp_avg_sq_ZP,
    rows_U,
    grad_scales_U,
    settings_U10,
    spans_C3,
    stride_z,
    ALIGNMENT: tl.constexpr,
    BLOCK: tl.constexpr,
    ACCUMULATOR: tl.constexpr,
):
    """Grid: spans of at most ``BLOCK`` columns, updated rows ``U``.

    Args:
        settings_U10: Per row the rates of ``A`` and of ``B``, β₁, 1 - β₁, β₂, 1 - β₂, ε, weight decay, 1 - β₁ᵗ and
            1 - β₂ᵗ. The differences come from the host's float64: formed here they would lose half their digits.
        spans_C3: First column, end, and whether the span belongs to a ``B``, int64.
        ALIGNMENT: A power of two that divides every border of the spans.
    """
    span = tl.program_id(0)
    update = tl.program_id(1)
    start = tl.multiple_of(tl.load(spans_C3 + 3 * span), ALIGNMENT)
    end = tl.multiple_of(tl.load(spans_C3 + 3 * span + 1), ALIGNMENT)
    is_b = tl.load(spans_C3 + 3 * span + 2)
    settings = settings_U10 + 10 * update
    rate = tl.load(settings + is_b)
    columns = start + tl.arange(0, BLOCK)
    mask = columns < end
    offsets = tl.load(rows_U + update).to(tl.int64) * stride_z + columns
    gradient = tl.load(grads_ZP + offsets, mask=mask, other=0.0).to(ACCUMULATOR) * tl.load(grad_scales_U + update)
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
