"""Kernels of an optimizer step: gradient norms and AdamW."""

from __future__ import annotations

import triton
import triton.language as tl

from alto.kernels.triton_kernels.common import load_columns, random_bits, rounded, store_columns


@triton.jit(do_not_specialize=["stride_z"])
def adamw_kernel(
    params_ZP,
    grads_ZP,
    exp_avg_ZP,
    exp_avg_sq_ZP,
    working_ZP,
    grad_scales_U,
    rows_U7,
    settings_U10,
    stride_z,
    HAS_WORKING: tl.constexpr,
    ROUNDS_AT_RANDOM: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    BLOCK: tl.constexpr,
    ACCUMULATOR: tl.constexpr,
):
    """Take one AdamW step. Grid: blocks of ``BLOCK`` columns of the longest row, rows ``U``.

    Args:
        rows_U7: Row of the bank, ends of its parts (:class:`alto.kernels.RowParts`), whether its gradient is set to
            zero, and the key of its rounding, 32 bits, int64.
        settings_U10: Per row the learning rates of ``A`` and of ``B``, β₁, 1 - β₁, β₂, 1 - β₂, ε, weight decay, 1 - β₁ᵗ
            and 1 - β₂ᵗ. The host computes the differences in float64, because here they would lose half their digits.
        working_ZP: Copies of the parameters in another dtype; any tensor without ``HAS_WORKING``.
        ROUNDS_AT_RANDOM: Whether the moments are rounded to bfloat16 with the row's key; otherwise they are rounded to
            nearest.
        ALIGNMENT: A power of two that divides the distance between rows.
    """
    row = rows_U7 + 7 * tl.program_id(1)
    start = tl.program_id(0).to(tl.int64) * BLOCK
    end = tl.load(row + 4)
    if start >= end:
        return
    base = tl.multiple_of(tl.load(row) * stride_z, ALIGNMENT)
    grad_scale = tl.load(grad_scales_U + tl.program_id(1))
    settings = settings_U10 + 10 * tl.program_id(1)
    # A full block has no mask, because a mask would keep the compiler from moving whole vectors.
    if start + BLOCK <= end:
        _update(
            params_ZP + base,
            grads_ZP + base,
            exp_avg_ZP + base,
            exp_avg_sq_ZP + base,
            working_ZP + base,
            grad_scale,
            settings,
            row,
            start,
            end,
            HAS_WORKING,
            ROUNDS_AT_RANDOM,
            True,
            BLOCK,
            ACCUMULATOR,
        )
    else:
        _update(
            params_ZP + base,
            grads_ZP + base,
            exp_avg_ZP + base,
            exp_avg_sq_ZP + base,
            working_ZP + base,
            grad_scale,
            settings,
            row,
            start,
            end,
            HAS_WORKING,
            ROUNDS_AT_RANDOM,
            False,
            BLOCK,
            ACCUMULATOR,
        )


@triton.jit
def _update(
    params_P,
    grads_P,
    exp_avg_P,
    exp_avg_sq_P,
    working_P,
    grad_scale,
    settings,
    row,
    start,
    end,
    HAS_WORKING: tl.constexpr,
    ROUNDS_AT_RANDOM: tl.constexpr,
    IS_FULL: tl.constexpr,
    BLOCK: tl.constexpr,
    ACCUMULATOR: tl.constexpr,
):
    columns = start + tl.arange(0, BLOCK)
    has_rate_of_a = (columns < tl.load(row + 1)) | (columns >= tl.load(row + 3))
    rate = tl.where(has_rate_of_a, tl.load(settings), tl.load(settings + 1))
    has_no_decay = (columns >= tl.load(row + 2)) & (columns < tl.load(row + 3))
    decay = tl.where(has_no_decay, 0.0, tl.load(settings + 7))
    gradient = load_columns(grads_P, columns, end, IS_FULL).to(ACCUMULATOR)
    gradient *= grad_scale
    exp_avg = load_columns(exp_avg_P, columns, end, IS_FULL).to(ACCUMULATOR) * tl.load(settings + 2)
    exp_avg += gradient * tl.load(settings + 3)
    exp_avg_sq = load_columns(exp_avg_sq_P, columns, end, IS_FULL).to(ACCUMULATOR) * tl.load(settings + 4)
    exp_avg_sq += gradient * gradient * tl.load(settings + 5)
    mean = exp_avg / tl.load(settings + 8)
    deviation = tl.sqrt(exp_avg_sq / tl.load(settings + 9)) + tl.load(settings + 6)
    params = load_columns(params_P, columns, end, IS_FULL).to(ACCUMULATOR)
    params -= params * (rate * decay)
    params -= rate * (mean / deviation)
    store_columns(params_P, columns, params.to(params_P.dtype.element_ty), end, IS_FULL)
    if HAS_WORKING:
        store_columns(working_P, columns, params.to(working_P.dtype.element_ty), end, IS_FULL)
    if ROUNDS_AT_RANDOM:
        bits = random_bits(tl.load(row + 6), start, columns)
        exp_avg = rounded(exp_avg, bits & 0xFFFF)
        exp_avg_sq = rounded(exp_avg_sq, bits >> 16)
    store_columns(exp_avg_P, columns, exp_avg.to(exp_avg_P.dtype.element_ty), end, IS_FULL)
    store_columns(exp_avg_sq_P, columns, exp_avg_sq.to(exp_avg_sq_P.dtype.element_ty), end, IS_FULL)
    if tl.load(row + 5):
        store_columns(grads_P, columns, tl.zeros((BLOCK,), dtype=grads_P.dtype.element_ty), end, IS_FULL)


@triton.jit(do_not_specialize=["stride_z", "stride_u"])
def square_sums_kernel(
    grads_ZP,
    sums_UC,
    rows_U2,
    stride_z,
    stride_u,
    ALIGNMENT: tl.constexpr,
    BLOCK: tl.constexpr,
    TURNS: tl.constexpr,
    ACCUMULATOR: tl.constexpr,
):
    """Compute the sum of squares of every span of ``BLOCK * TURNS`` elements. Grid: spans of the longest row, rows
    ``U``.

    Args:
        rows_U2: Row of the bank and number of its elements that count, int64.
        ALIGNMENT: A power of two that divides the distance between rows. It does not depend on the rows' sizes, because
            it decides which thread adds which elements: the bits of a sum must not depend on the length of other rows.
    """
    span = tl.program_id(0)
    row = rows_U2 + 2 * tl.program_id(1)
    size = tl.load(row + 1)
    start = span.to(tl.int64) * BLOCK * TURNS
    if start >= size:
        return
    base = tl.multiple_of(tl.load(row) * stride_z, ALIGNMENT)
    # A full span has no mask, because a mask would keep the compiler from moving whole vectors.
    if start + BLOCK * TURNS <= size:
        squares = _squares(grads_ZP + base, start, size, True, BLOCK, TURNS, ACCUMULATOR)
    else:
        squares = _squares(grads_ZP + base, start, size, False, BLOCK, TURNS, ACCUMULATOR)
    tl.store(sums_UC + tl.program_id(1) * stride_u + span, tl.sum(squares))


@triton.jit
def _squares(
    grads_P,
    start,
    size,
    IS_FULL: tl.constexpr,
    BLOCK: tl.constexpr,
    TURNS: tl.constexpr,
    ACCUMULATOR: tl.constexpr,
):
    squares = tl.zeros((BLOCK,), dtype=ACCUMULATOR)
    for turn in tl.static_range(TURNS):
        columns = start + turn * BLOCK + tl.arange(0, BLOCK)
        gradient = load_columns(grads_P, columns, size, IS_FULL).to(ACCUMULATOR)
        squares += gradient * gradient
    return squares


@triton.jit(do_not_specialize=["stride_u"])
def total_norms_kernel(
    sums_UC, norms_U, rows_U2, stride_u, BLOCK: tl.constexpr, SPAN: tl.constexpr, ACCUMULATOR: tl.constexpr
):
    """Compute the square root of the sum of every row's sums. Grid: rows ``U``.

    Args:
        SPAN: Number of elements that each sum covers.
    """
    row = tl.program_id(0)
    num_sums = tl.cdiv(tl.load(rows_U2 + 2 * row + 1), SPAN)
    total = tl.zeros((BLOCK,), dtype=ACCUMULATOR)
    for first in range(0, num_sums, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        total += tl.load(sums_UC + row * stride_u + columns, mask=columns < num_sums, other=0.0)
    tl.store(norms_U + row, tl.sqrt(tl.sum(total)))


@triton.jit(do_not_specialize=["stride_z"])
def summed_norms_kernel(sums_ZC, norms_U, rows_U2, stride_z, BLOCK: tl.constexpr, ACCUMULATOR: tl.constexpr):
    """Compute the square root of the sum of a row's first elements. Grid: rows ``U``.

    Args:
        rows_U2: Row of ``sums_ZC`` and number of its elements that count, int64.
    """
    row = rows_U2 + 2 * tl.program_id(0)
    sums_C = sums_ZC + tl.load(row) * stride_z
    num_sums = tl.load(row + 1)
    total = tl.zeros((BLOCK,), dtype=ACCUMULATOR)
    for first in range(0, num_sums, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        total += tl.load(sums_C + columns, mask=columns < num_sums, other=0.0)
    tl.store(norms_U + tl.program_id(0), tl.sqrt(tl.sum(total)))
