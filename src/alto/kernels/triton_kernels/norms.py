"""The norms of rows of the bank, in an order of summation that depends on the row's own size alone."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["square_sums_kernel", "total_norms_kernel"]


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
    """The sum of squares of every ``BLOCK * TURNS`` numbers. Grid: such spans of the longest row, rows ``U``.

    Args:
        rows_U2: Row of the bank and how many of its numbers count, int64.
    """
    span = tl.program_id(0)
    row = rows_U2 + 2 * tl.program_id(1)
    size = tl.multiple_of(tl.load(row + 1), ALIGNMENT)
    start = span.to(tl.int64) * BLOCK * TURNS
    if start >= size:
        return
    base = tl.multiple_of(tl.load(row) * stride_z, ALIGNMENT)
    squares = tl.zeros((BLOCK,), dtype=ACCUMULATOR)
    for turn in tl.static_range(TURNS):
        columns = start + turn * BLOCK + tl.arange(0, BLOCK)
        gradient = tl.load(grads_ZP + base + columns, mask=columns < size, other=0.0).to(ACCUMULATOR)
        squares += gradient * gradient
    tl.store(sums_UC + tl.program_id(1) * stride_u + span, tl.sum(squares))


@triton.jit(do_not_specialize=["stride_u"])
def total_norms_kernel(
    sums_UC, norms_U, rows_U2, stride_u, BLOCK: tl.constexpr, SPAN: tl.constexpr, ACCUMULATOR: tl.constexpr
):
    """The root of every row's sums. Grid: rows ``U``.

    Args:
        SPAN: Numbers that one sum is of.
    """
    row = tl.program_id(0)
    num_sums = tl.cdiv(tl.load(rows_U2 + 2 * row + 1), SPAN)
    total = tl.zeros((BLOCK,), dtype=ACCUMULATOR)
    for first in range(0, num_sums, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        total += tl.load(sums_UC + row * stride_u + columns, mask=columns < num_sums, other=0.0)
    tl.store(norms_U + row, tl.sqrt(tl.sum(total)))
