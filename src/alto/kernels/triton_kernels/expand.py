"""``wide[i] = scale_i * narrow[i] @ weight_i``: every slot's up-projection.

The frozen GEMM adds its product to the result, so no kernel has to read and write all outputs once more. Tokens of a
slot without ranks get zeros. A program processes a chunk: several blocks of a slot's tokens, for which it reads its
part of the slot's matrix only once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from alto.kernels.triton_kernels.common import is_kept, of_member, tile_of_members, token_keys


@triton.jit(do_not_specialize=["stride_z", "stride_place", "first_place"])
def expand_kernel(
    s_TQ,
    params_ZP,
    y_0,
    y_1,
    y_2,
    chunks_C6,
    factors_Z2,
    places_Z,
    num_0,
    num_1,
    num_2,
    stride_s_t,
    stride_z,
    stride_0_t,
    stride_1_t,
    stride_2_t,
    stride_0_n,
    stride_1_n,
    stride_2_n,
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
    """Compute ``y[i] = scale_i * s[i] @ b_i`` for up to three members. Grid: tiles of all members, chunks of tokens.

    Args:
        first_place: Index of the first member's entries in a row of ``places_Z``.
    """
    member, first_wide = tile_of_members(tl.program_id(0), num_0, num_1, BLOCK_W)
    chunk = chunks_C6 + 6 * tl.program_id(1)
    slot = tl.load(chunk).to(tl.int64)
    first = tl.load(chunk + 1)
    place = places_Z + slot * stride_place + first_place + 3 * member
    column = tl.multiple_of(tl.load(place), ALIGNMENT)
    rank = tl.multiple_of(tl.load(place + 1).to(tl.int32), ALIGNMENT)
    b_start = tl.multiple_of(slot * stride_z + tl.load(place + 2), ALIGNMENT)
    num_wide = of_member(member, num_0, num_1, num_2)
    stride_y_t = of_member(member, stride_0_t, stride_1_t, stride_2_t)
    stride_y_n = of_member(member, stride_0_n, stride_1_n, stride_2_n)
    _expand_by_own_tile(
        s_TQ + first.to(tl.int64) * stride_s_t + column,
        params_ZP + b_start + first_wide,
        of_member(member, y_0, y_1, y_2) + first.to(tl.int64) * stride_y_t,
        chunk,
        tl.load(factors_Z2 + 2 * slot),
        0,
        rank,
        first_wide,
        num_wide,
        stride_s_t,
        num_wide,
        1,
        stride_y_t,
        stride_y_n,
        False,
        TILE,
        BLOCK_T,
        BLOCK_W,
        OPERAND,
        ACCUMULATOR,
        PRECISION,
    )


@triton.jit(do_not_specialize=["number", "stride_z", "stride_place"])
def dx_kernel(
    ds_TQ,
    params_ZP,
    dx_TK,
    chunks_C6,
    factors_Z2,
    places_Z,
    number,
    num_features,
    stride_ds_t,
    stride_z,
    stride_dx_t,
    stride_dx_k,
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
    """Compute ``dx[i] = dropout_i(scale_i * ds[i] @ a_iᵀ)``. Grid: tiles of ``BLOCK_W`` features, chunks of tokens."""
    first_wide = tl.program_id(0) * BLOCK_W
    chunk = chunks_C6 + 6 * tl.program_id(1)
    slot = tl.load(chunk).to(tl.int64)
    first = tl.load(chunk + 1)
    place = places_Z + slot * stride_place
    width = tl.multiple_of(tl.load(place).to(tl.int32), ALIGNMENT)
    a_start = tl.multiple_of(slot * stride_z + tl.load(place + 1), ALIGNMENT)
    _expand_by_own_tile(
        ds_TQ + first.to(tl.int64) * stride_ds_t,
        params_ZP + a_start + first_wide * width,
        dx_TK + first.to(tl.int64) * stride_dx_t,
        chunk,
        tl.load(factors_Z2 + 2 * slot) * tl.load(factors_Z2 + 2 * slot + 1),
        number,
        width,
        first_wide,
        num_features,
        stride_ds_t,
        1,
        width,
        stride_dx_t,
        stride_dx_k,
        DROPOUT,
        TILE,
        BLOCK_T,
        BLOCK_W,
        OPERAND,
        ACCUMULATOR,
        PRECISION,
    )


@triton.jit
def _expand_by_own_tile(
    narrow_TR,
    weight_RW,
    wide_TW,
    chunk,
    factor,
    number,
    num_narrow,
    first_wide,
    num_wide,
    stride_narrow_t,
    stride_weight_r,
    stride_weight_w,
    stride_wide_t,
    stride_wide_w,
    DROPOUT: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_W: tl.constexpr,
    OPERAND: tl.constexpr,
    ACCUMULATOR: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # Use the smallest tile that holds the slot's own ranks, or loop over the largest tile if there are more ranks.
    for exponent in tl.static_range(5, 7):
        if 2**exponent <= TILE:
            if (num_narrow <= 2**exponent) and (num_narrow > 2**exponent // 2 or exponent == 5):
                _expand(
                    narrow_TR,
                    weight_RW,
                    wide_TW,
                    chunk,
                    factor,
                    number,
                    num_narrow,
                    first_wide,
                    num_wide,
                    stride_narrow_t,
                    stride_weight_r,
                    stride_weight_w,
                    stride_wide_t,
                    stride_wide_w,
                    DROPOUT,
                    True,
                    2**exponent,
                    BLOCK_T,
                    BLOCK_W,
                    OPERAND,
                    ACCUMULATOR,
                    PRECISION,
                )
    if num_narrow > TILE:
        _expand(
            narrow_TR,
            weight_RW,
            wide_TW,
            chunk,
            factor,
            number,
            num_narrow,
            first_wide,
            num_wide,
            stride_narrow_t,
            stride_weight_r,
            stride_weight_w,
            stride_wide_t,
            stride_wide_w,
            DROPOUT,
            False,
            TILE,
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
    chunk,
    factor,
    number,
    num_narrow,
    first_wide,
    num_wide,
    stride_narrow_t,
    stride_weight_r,
    stride_weight_w,
    stride_wide_t,
    stride_wide_w,
    DROPOUT: tl.constexpr,
    IS_ONE_TILE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_W: tl.constexpr,
    OPERAND: tl.constexpr,
    ACCUMULATOR: tl.constexpr,
    PRECISION: tl.constexpr,
):
    num_tokens = tl.load(chunk + 2) - tl.load(chunk + 1)
    tokens = tl.arange(0, BLOCK_T)[:, None]
    columns = tl.arange(0, BLOCK_W)[None, :]
    w = first_wide + columns
    r = tl.arange(0, BLOCK_R)
    if DROPOUT:
        place = tl.load(chunk + 3)
        stream_key = tl.load(chunk + 4)
        threshold = tl.load(chunk + 5)
    weight_RW += r[:, None] * stride_weight_r + columns * stride_weight_w
    if IS_ONE_TILE:
        # Mask both sides, because zero times a NaN from uninitialised memory would be NaN.
        kept = tl.load(weight_RW, mask=(r[:, None] < num_narrow) & (w < num_wide), other=0.0).to(OPERAND)
    for first_token in range(0, num_tokens, BLOCK_T):
        t = first_token + tokens
        start = tl.cast(first_token, tl.int64)
        total = tl.zeros((BLOCK_T, BLOCK_W), dtype=ACCUMULATOR)
        narrow_TR_here = narrow_TR + start * stride_narrow_t + tokens * stride_narrow_t + r[None, :]
        if IS_ONE_TILE:
            narrow = tl.load(narrow_TR_here, mask=(t < num_tokens) & (r[None, :] < num_narrow), other=0.0)
            total = tl.dot(narrow.to(OPERAND), kept, total, input_precision=PRECISION, out_dtype=ACCUMULATOR)
        else:
            for first_rank in range(0, num_narrow, BLOCK_R):
                num_left = num_narrow - first_rank
                narrow = tl.load(
                    narrow_TR_here + first_rank, mask=(t < num_tokens) & (r[None, :] < num_left), other=0.0
                )
                weight = tl.load(
                    weight_RW + first_rank * stride_weight_r,
                    mask=(r[:, None] < num_left) & (w < num_wide),
                    other=0.0,
                )
                total = tl.dot(
                    narrow.to(OPERAND), weight.to(OPERAND), total, input_precision=PRECISION, out_dtype=ACCUMULATOR
                )
        if DROPOUT:
            total = tl.where(is_kept(token_keys(stream_key, number, place + t), w, threshold), total, 0.0)
        tl.store(
            wide_TW + start * stride_wide_t + (tokens * stride_wide_t + w * stride_wide_w),
            (total * factor.to(ACCUMULATOR)).to(wide_TW.dtype.element_ty),
            mask=(t < num_tokens) & (w < num_wide),
        )
