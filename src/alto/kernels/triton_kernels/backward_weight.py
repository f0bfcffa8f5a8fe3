"""``gradient_i += wide[i]ᵀ @ narrow[i]``: the gradient of every slot's own matrix from its own tokens."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["backward_weight_kernel"]


@triton.jit
def backward_weight_kernel(
    wide_TW,
    narrow_TR,
    gradient_ZWR,
    segments_S3,
    scales_Z,
    ranks_Z,
    num_wide,
    stride_wide_t,
    stride_wide_w,
    stride_narrow_t,
    stride_gradient_z,
    stride_gradient_w,
    stride_gradient_r,
    SCALED: tl.constexpr,
    RANK_TILE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_W: tl.constexpr,
    OPERAND: tl.constexpr,
    ACCUMULATOR: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid: tiles of ``BLOCK_W`` wide columns, segments, tiles of ``RANK_TILE`` ranks.

    One program owns its part of the gradient and takes the slot's tokens in their order: no atomics, the same bits
    every time and in any company.
    """
    first_wide = tl.program_id(0) * BLOCK_W
    segment = tl.program_id(1)
    slot = tl.load(segments_S3 + 3 * segment).to(tl.int64)
    first = tl.load(segments_S3 + 3 * segment + 1)
    end = tl.load(segments_S3 + 3 * segment + 2)
    first_rank = tl.program_id(2) * RANK_TILE
    rank = tl.minimum(tl.load(ranks_Z + slot) - first_rank, RANK_TILE)
    if rank <= 0:
        return
    scale = 1.0
    if SCALED:
        scale = tl.load(scales_Z + slot)
    wide_TW += first.to(tl.int64) * stride_wide_t + first_wide * stride_wide_w
    narrow_TR += first.to(tl.int64) * stride_narrow_t + first_rank
    gradient_ZWR += slot * stride_gradient_z + first_wide * stride_gradient_w + first_rank * stride_gradient_r
    # The smallest tile that holds the slot's own rank.
    for exponent in tl.static_range(4, 8):
        if 2**exponent <= RANK_TILE:
            if (rank <= 2**exponent) and (rank > 2**exponent // 2 or exponent == 4):
                _accumulate(
                    wide_TW,
                    narrow_TR,
                    gradient_ZWR,
                    end - first,
                    rank,
                    scale,
                    num_wide - first_wide,
                    stride_wide_t,
                    stride_wide_w,
                    stride_narrow_t,
                    stride_gradient_w,
                    stride_gradient_r,
                    2**exponent,
                    BLOCK_T,
                    BLOCK_W,
                    OPERAND,
                    ACCUMULATOR,
                    PRECISION,
                )


@triton.jit
def _accumulate(
    wide_TW,
    narrow_TR,
    gradient_WR,
    num_tokens,
    rank,
    scale,
    num_wide,
    stride_wide_t,
    stride_wide_w,
    stride_narrow_t,
    stride_gradient_w,
    stride_gradient_r,
    BLOCK_R: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_W: tl.constexpr,
    OPERAND: tl.constexpr,
    ACCUMULATOR: tl.constexpr,
    PRECISION: tl.constexpr,
):
    w = tl.arange(0, BLOCK_W)[:, None]
    r = tl.arange(0, BLOCK_R)[None, :]
    tokens = tl.arange(0, BLOCK_T)
    total = tl.zeros((BLOCK_W, BLOCK_R), dtype=ACCUMULATOR)
    for first_token in range(0, num_tokens, BLOCK_T):
        t = first_token + tokens
        offsets = t.to(tl.int64)
        wide = tl.load(
            wide_TW + offsets[None, :] * stride_wide_t + w * stride_wide_w,
            mask=(t[None, :] < num_tokens) & (w < num_wide),
            other=0.0,
        )
        narrow = tl.load(
            narrow_TR + offsets[:, None] * stride_narrow_t + r,
            mask=(t[:, None] < num_tokens) & (r < rank),
            other=0.0,
        )
        total = tl.dot(wide.to(OPERAND), narrow.to(OPERAND), total, input_precision=PRECISION, out_dtype=ACCUMULATOR)
    gradient_WR += w * stride_gradient_w + r * stride_gradient_r
    mask = (w < num_wide) & (r < rank)
    gradient = tl.load(gradient_WR, mask=mask, other=0.0).to(ACCUMULATOR) + total * scale
    tl.store(gradient_WR, gradient.to(gradient_WR.dtype.element_ty), mask=mask)
