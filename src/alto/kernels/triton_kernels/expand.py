"""``wide[i] += narrow[i] @ weight_i``: every slot's own ranks back up, added to what the base has left there."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["expand_kernel"]


@triton.jit
def expand_kernel(
    narrow_TR,
    weight_ZRW,
    wide_TW,
    blocks_B3,
    scales_Z,
    ranks_Z,
    num_wide,
    stride_narrow_t,
    stride_weight_z,
    stride_weight_r,
    stride_weight_w,
    stride_wide_t,
    stride_wide_w,
    SCALED: tl.constexpr,
    RANK_TILE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_W: tl.constexpr,
    OPERAND: tl.constexpr,
    ACCUMULATOR: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid: tiles of ``BLOCK_W`` wide columns, blocks of tokens."""
    first_wide = tl.program_id(0) * BLOCK_W
    block = tl.program_id(1)
    slot = tl.load(blocks_B3 + 3 * block).to(tl.int64)
    first = tl.load(blocks_B3 + 3 * block + 1)
    end = tl.load(blocks_B3 + 3 * block + 2)
    rank = tl.load(ranks_Z + slot)
    if rank == 0:
        return
    scale = 1.0
    if SCALED:
        scale = tl.load(scales_Z + slot)
    narrow_TR += first.to(tl.int64) * stride_narrow_t
    weight_ZRW += slot * stride_weight_z + first_wide * stride_weight_w
    wide_TW += first.to(tl.int64) * stride_wide_t + first_wide * stride_wide_w
    # The smallest tile that holds the slot's own rank; the largest is repeated where the rank is above it.
    for exponent in tl.static_range(4, 7):
        if 2**exponent <= RANK_TILE:
            if (rank <= 2**exponent or 2**exponent == RANK_TILE) and (rank > 2**exponent // 2 or exponent == 4):
                _expand(
                    narrow_TR,
                    weight_ZRW,
                    wide_TW,
                    end - first,
                    rank,
                    scale,
                    num_wide - first_wide,
                    stride_narrow_t,
                    stride_weight_r,
                    stride_weight_w,
                    stride_wide_t,
                    stride_wide_w,
                    2**exponent,
                    BLOCK_T,
                    BLOCK_W,
                    OPERAND,
                    ACCUMULATOR,
                    PRECISION,
                )


@triton.jit
def _expand(
    narrow_TR,
    weight_RW,
    wide_TW,
    num_tokens,
    rank,
    scale,
    num_wide,
    stride_narrow_t,
    stride_weight_r,
    stride_weight_w,
    stride_wide_t,
    stride_wide_w,
    BLOCK_R: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_W: tl.constexpr,
    OPERAND: tl.constexpr,
    ACCUMULATOR: tl.constexpr,
    PRECISION: tl.constexpr,
):
    t = tl.arange(0, BLOCK_T)[:, None]
    w = tl.arange(0, BLOCK_W)[None, :]
    columns = tl.arange(0, BLOCK_R)
    total = tl.zeros((BLOCK_T, BLOCK_W), dtype=ACCUMULATOR)
    for first_rank in range(0, rank, BLOCK_R):
        r = first_rank + columns
        # Both sides are masked: a zero times the NaN of unwritten memory would be NaN.
        narrow = tl.load(
            narrow_TR + t * stride_narrow_t + r[None, :], mask=(t < num_tokens) & (r[None, :] < rank), other=0.0
        )
        weight = tl.load(
            weight_RW + r[:, None] * stride_weight_r + w * stride_weight_w,
            mask=(r[:, None] < rank) & (w < num_wide),
            other=0.0,
        )
        total = tl.dot(narrow.to(OPERAND), weight.to(OPERAND), total, input_precision=PRECISION, out_dtype=ACCUMULATOR)
    wide_TW += t * stride_wide_t + w * stride_wide_w
    mask = (t < num_tokens) & (w < num_wide)
    wide = tl.load(wide_TW, mask=mask, other=0.0).to(ACCUMULATOR) + total * scale
    tl.store(wide_TW, wide.to(wide_TW.dtype.element_ty), mask=mask)
