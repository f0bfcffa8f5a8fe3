"""``narrow[i] = wide[i] @ weight_i``: the tokens of every slot through its own matrix, down to its own rank."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["shrink_kernel"]


@triton.jit
def shrink_kernel(
    wide_TW,
    weight_ZWR,
    narrow_TR,
    blocks_B3,
    scales_Z,
    ranks_Z,
    num_wide,
    stride_wide_t,
    stride_wide_w,
    stride_weight_z,
    stride_weight_w,
    stride_weight_r,
    stride_narrow_t,
    SCALED: tl.constexpr,
    RANK_TILE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_W: tl.constexpr,
    OPERAND: tl.constexpr,
    ACCUMULATOR: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid: blocks of tokens, tiles of ``RANK_TILE`` ranks. Columns past a slot's rank are left unwritten."""
    block = tl.program_id(0)
    slot = tl.load(blocks_B3 + 3 * block).to(tl.int64)
    first = tl.load(blocks_B3 + 3 * block + 1)
    end = tl.load(blocks_B3 + 3 * block + 2)
    first_rank = tl.program_id(1) * RANK_TILE
    rank = tl.minimum(tl.load(ranks_Z + slot) - first_rank, RANK_TILE)
    if rank <= 0:
        return
    scale = 1.0
    if SCALED:
        scale = tl.load(scales_Z + slot)
    wide_TW += first.to(tl.int64) * stride_wide_t
    weight_ZWR += slot * stride_weight_z + first_rank * stride_weight_r
    narrow_TR += first.to(tl.int64) * stride_narrow_t + first_rank
    # The smallest tile that holds the slot's own rank: a slot of rank 16 does not pay for a neighbour of rank 128.
    for exponent in tl.static_range(4, 8):
        if 2**exponent <= RANK_TILE:
            if (rank <= 2**exponent) and (rank > 2**exponent // 2 or exponent == 4):
                _shrink(
                    wide_TW,
                    weight_ZWR,
                    narrow_TR,
                    end - first,
                    rank,
                    scale,
                    num_wide,
                    stride_wide_t,
                    stride_wide_w,
                    stride_weight_w,
                    stride_weight_r,
                    stride_narrow_t,
                    2**exponent,
                    BLOCK_T,
                    BLOCK_W,
                    OPERAND,
                    ACCUMULATOR,
                    PRECISION,
                )


@triton.jit
def _shrink(
    wide_TW,
    weight_WR,
    narrow_TR,
    num_tokens,
    rank,
    scale,
    num_wide,
    stride_wide_t,
    stride_wide_w,
    stride_weight_w,
    stride_weight_r,
    stride_narrow_t,
    BLOCK_R: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_W: tl.constexpr,
    OPERAND: tl.constexpr,
    ACCUMULATOR: tl.constexpr,
    PRECISION: tl.constexpr,
):
    t = tl.arange(0, BLOCK_T)[:, None]
    r = tl.arange(0, BLOCK_R)[None, :]
    columns = tl.arange(0, BLOCK_W)
    total = tl.zeros((BLOCK_T, BLOCK_R), dtype=ACCUMULATOR)
    for first_wide in range(0, num_wide, BLOCK_W):
        w = first_wide + columns
        wide = tl.load(
            wide_TW + t * stride_wide_t + w[None, :] * stride_wide_w,
            mask=(t < num_tokens) & (w[None, :] < num_wide),
            other=0.0,
        )
        weight = tl.load(
            weight_WR + w[:, None] * stride_weight_w + r * stride_weight_r,
            mask=(w[:, None] < num_wide) & (r < rank),
            other=0.0,
        )
        total = tl.dot(wide.to(OPERAND), weight.to(OPERAND), total, input_precision=PRECISION, out_dtype=ACCUMULATOR)
    total *= scale
    tl.store(
        narrow_TR + t * stride_narrow_t + r,
        total.to(narrow_TR.dtype.element_ty),
        mask=(t < num_tokens) & (r < rank),
    )
