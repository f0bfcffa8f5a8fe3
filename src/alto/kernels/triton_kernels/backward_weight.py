"""``gradient_i += scale_i * wide[i]ᵀ @ narrow[i]``: the gradient of every slot's own matrix from its own tokens.

The first product of a slot's step overwrites what its last step has left, which is not even read.

One program owns its part of a gradient and reads the slot's tokens in order: no atomics, the same bits every time and
for any other slots. A segment is one program's loop, at any length. Splitting long ones over programs would take
a workspace and a second pass; with tiles of 64 columns one slot of an 8B model already makes 64 to 224 programs, and
every further slot as many again.
"""

from __future__ import annotations

import triton
import triton.language as tl

from alto.kernels.triton_kernels.dropout import is_kept, token_keys
from alto.kernels.triton_kernels.members import of_member, tile_of_members

__all__ = ["da_kernel", "db_kernel"]


@triton.jit(do_not_specialize=["number", "stride_z", "stride_place"])
def da_kernel(
    x_TK,
    ds_TQ,
    grads_ZP,
    segments_S6,
    adds_S,
    factors_Z2,
    places_Z,
    number,
    num_features,
    stride_x_t,
    stride_x_k,
    stride_ds_t,
    stride_z,
    stride_place,
    DROPOUT: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_W: tl.constexpr,
    OPERAND: tl.constexpr,
    ACCUMULATOR: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """``da_i += scale_i * dropout_i(x[i])ᵀ @ ds[i]``.

    Grid: tiles of ``BLOCK_W`` features, segments, tiles of ``TILE`` columns of ``Q``.

    Args:
        adds_S: Of every segment 1 where the product is added to what is there, 0 where it overwrites it, int32.
    """
    first_wide = tl.program_id(0) * BLOCK_W
    segment = segments_S6 + 6 * tl.program_id(1)
    slot = tl.load(segment).to(tl.int64)
    first = tl.load(segment + 1)
    place = places_Z + slot * stride_place
    width = tl.multiple_of(tl.load(place).to(tl.int32), ALIGNMENT)
    first_column = tl.program_id(2) * TILE
    num_columns = tl.multiple_of(tl.minimum(width - first_column, TILE), ALIGNMENT)
    if num_columns <= 0:
        return
    a_start = tl.multiple_of(slot * stride_z + tl.load(place + 1), ALIGNMENT)
    _accumulate_by_own_tile(
        x_TK + first.to(tl.int64) * stride_x_t,
        ds_TQ + first.to(tl.int64) * stride_ds_t + first_column,
        grads_ZP + a_start + first_wide * width + first_column,
        segment,
        adds_S + tl.program_id(1),
        tl.load(factors_Z2 + 2 * slot) * tl.load(factors_Z2 + 2 * slot + 1),
        number,
        first_wide,
        num_features,
        num_columns,
        stride_x_t,
        stride_x_k,
        stride_ds_t,
        width,
        1,
        DROPOUT,
        TILE,
        BLOCK_T,
        BLOCK_W,
        OPERAND,
        ACCUMULATOR,
        PRECISION,
    )


@triton.jit(do_not_specialize=["stride_z", "stride_place", "first_place"])
def db_kernel(
    dy_0,
    dy_1,
    dy_2,
    s_TQ,
    grads_ZP,
    segments_S6,
    adds_S,
    factors_Z2,
    places_Z,
    num_0,
    num_1,
    num_2,
    stride_0_t,
    stride_1_t,
    stride_2_t,
    stride_0_n,
    stride_1_n,
    stride_2_n,
    stride_s_t,
    stride_z,
    stride_place,
    first_place,
    ALIGNMENT: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_W: tl.constexpr,
    OPERAND: tl.constexpr,
    ACCUMULATOR: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """``db_i += scale_i * s[i]ᵀ @ dy[i]`` of up to three members.

    Grid: tiles of ``BLOCK_W`` out-features of all members, segments, tiles of ``TILE`` ranks.

    Args:
        first_place: Where the first of the members begins in a row of ``places_Z``.
    """
    member, first_wide = tile_of_members(tl.program_id(0), num_0, num_1, BLOCK_W)
    segment = segments_S6 + 6 * tl.program_id(1)
    slot = tl.load(segment).to(tl.int64)
    first = tl.load(segment + 1)
    place = places_Z + slot * stride_place + first_place + 3 * member
    column = tl.multiple_of(tl.load(place), ALIGNMENT)
    first_rank = tl.program_id(2) * TILE
    num_ranks = tl.multiple_of(tl.minimum(tl.load(place + 1).to(tl.int32) - first_rank, TILE), ALIGNMENT)
    if num_ranks <= 0:
        return
    b_start = tl.multiple_of(slot * stride_z + tl.load(place + 2), ALIGNMENT)
    num_wide = of_member(member, num_0, num_1, num_2)
    stride_dy_t = of_member(member, stride_0_t, stride_1_t, stride_2_t)
    _accumulate_by_own_tile(
        of_member(member, dy_0, dy_1, dy_2) + first.to(tl.int64) * stride_dy_t,
        s_TQ + first.to(tl.int64) * stride_s_t + column + first_rank,
        grads_ZP + b_start + first_rank * num_wide + first_wide,
        segment,
        adds_S + tl.program_id(1),
        tl.load(factors_Z2 + 2 * slot),
        0,
        first_wide,
        num_wide,
        num_ranks,
        stride_dy_t,
        of_member(member, stride_0_n, stride_1_n, stride_2_n),
        stride_s_t,
        1,
        num_wide,
        False,
        TILE,
        BLOCK_T,
        BLOCK_W,
        OPERAND,
        ACCUMULATOR,
        PRECISION,
    )


@triton.jit
def _accumulate_by_own_tile(
    wide_TW,
    narrow_TR,
    gradient_WR,
    segment,
    adds,
    factor,
    number,
    first_wide,
    num_wide,
    num_narrow,
    stride_wide_t,
    stride_wide_w,
    stride_narrow_t,
    stride_gradient_w,
    stride_gradient_r,
    DROPOUT: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_W: tl.constexpr,
    OPERAND: tl.constexpr,
    ACCUMULATOR: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # The smallest tile that holds the slot's own ranks; the widest take half the step, to fit in shared memory.
    for exponent in tl.static_range(5, 9):
        if 2**exponent <= TILE:
            if (num_narrow <= 2**exponent) and (num_narrow > 2**exponent // 2 or exponent == 5):
                _accumulate(
                    wide_TW,
                    narrow_TR,
                    gradient_WR,
                    segment,
                    adds,
                    factor,
                    number,
                    first_wide,
                    num_wide,
                    num_narrow,
                    stride_wide_t,
                    stride_wide_w,
                    stride_narrow_t,
                    stride_gradient_w,
                    stride_gradient_r,
                    DROPOUT,
                    2**exponent,
                    BLOCK_T if exponent <= 6 else BLOCK_T // 2,
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
    segment,
    adds,
    factor,
    number,
    first_wide,
    num_wide,
    num_narrow,
    stride_wide_t,
    stride_wide_w,
    stride_narrow_t,
    stride_gradient_w,
    stride_gradient_r,
    DROPOUT: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_W: tl.constexpr,
    OPERAND: tl.constexpr,
    ACCUMULATOR: tl.constexpr,
    PRECISION: tl.constexpr,
):
    num_tokens = tl.load(segment + 2) - tl.load(segment + 1)
    rows = tl.arange(0, BLOCK_W)[:, None]
    w = first_wide + rows
    r = tl.arange(0, BLOCK_R)[None, :]
    tokens = tl.arange(0, BLOCK_T)
    total = tl.zeros((BLOCK_W, BLOCK_R), dtype=ACCUMULATOR)
    if DROPOUT:
        place = tl.load(segment + 3)
        stream_key = tl.load(segment + 4)
        threshold = tl.load(segment + 5)
    for first_token in range(0, num_tokens, BLOCK_T):
        t = first_token + tokens
        start = tl.cast(first_token, tl.int64)
        wide = tl.load(
            wide_TW + start * stride_wide_t + (tokens[None, :] * stride_wide_t + w * stride_wide_w),
            mask=(t[None, :] < num_tokens) & (w < num_wide),
            other=0.0,
        )
        narrow = tl.load(
            narrow_TR + start * stride_narrow_t + (tokens[:, None] * stride_narrow_t + r),
            mask=(t[:, None] < num_tokens) & (r < num_narrow),
            other=0.0,
        )
        if DROPOUT:
            wide = tl.where(is_kept(token_keys(stream_key, number, place + t[None, :]), w, threshold), wide, 0.0)
        total = tl.dot(wide.to(OPERAND), narrow.to(OPERAND), total, input_precision=PRECISION, out_dtype=ACCUMULATOR)
    gradient_WR += rows * stride_gradient_w + r * stride_gradient_r
    mask = (w < num_wide) & (r < num_narrow)
    num_added = num_narrow * tl.load(adds)
    gradient = tl.load(gradient_WR, mask=(w < num_wide) & (r < num_added), other=0.0).to(ACCUMULATOR)
    gradient += total * factor.to(ACCUMULATOR)
    tl.store(gradient_WR, gradient.to(gradient_WR.dtype.element_ty), mask=mask)
