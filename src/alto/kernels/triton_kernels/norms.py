"""The norms of rows of the bank, with an order of summation that depends only on the row's own size."""

from __future__ import annotations

import triton
import triton.language as tl

from alto.kernels.triton_kernels.rows import load_columns

__all__ = ["square_sums_kernel", "summed_norms_kernel", "total_norms_kernel"]


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
