"""``gradient_i += scale_i * wide[i]ᵀ @ narrow[i]``: the gradient of every slot's own matrix from its own tokens.

The first product of a slot's step overwrites the previous step's gradient, which is not even read. The sum of squares
of every written tile is stored, too, so that the norm of a gradient needs no pass over it.

One program owns its part of a gradient and reads the slot's tokens in order, so it needs no atomics and gives the same
bits every time, for any set of other slots. A segment of any length is one program's loop. Splitting long
segments over programs would need a workspace and a second pass; with tiles of 128 columns, one slot of an 8B model
already starts 32 to 112 programs, and each further slot adds as many.
"""

from __future__ import annotations

import triton
import triton.language as tl

from alto.kernels.triton_kernels.common import is_kept, token_keys


@triton.jit(do_not_specialize=["number", "stride_z", "stride_sums_z", "stride_place", "first_sum"])
def da_kernel(
    x_TK,
    ds_TQ,
    grads_ZP,
    sums_ZC,
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
    stride_sums_z,
    stride_place,
    first_sum,
    DROPOUT: tl.constexpr,
    HAS_SUMS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_W: tl.constexpr,
    OPERAND: tl.constexpr,
    ACCUMULATOR: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute ``da_i += scale_i * dropout_i(x[i])ᵀ @ ds[i]``.

    Grid: tiles of ``BLOCK_W`` features, segments, tiles of ``TILE`` columns of ``Q``.

    Args:
        sums_ZC: Sums of squares of gradient tiles; any tensor without ``HAS_SUMS``.
        adds_S: For every segment 1 to add the product to the current value, 0 to overwrite it, int32.
        first_sum: Index, in a row of ``places_Z``, of the offset of the sums of ``A``.
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
    accumulate_by_own_tile(
        x_TK + first.to(tl.int64) * stride_x_t,
        ds_TQ + first.to(tl.int64) * stride_ds_t + first_column,
        grads_ZP + a_start + first_wide * width + first_column,
        segment,
        adds_S + tl.program_id(1),
        sums_ZC + slot * stride_sums_z + tl.program_id(0) * tl.cdiv(width, TILE) + tl.program_id(2),
        place + first_sum,
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
        HAS_SUMS,
        TILE,
        BLOCK_T,
        BLOCK_W,
        OPERAND,
        ACCUMULATOR,
        PRECISION,
    )


@triton.jit
def accumulate_by_own_tile(
    wide_TW,
    narrow_TR,
    gradient_WR,
    segment,
    adds,
    sums,
    start_of_sums,
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
    HAS_SUMS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_W: tl.constexpr,
    OPERAND: tl.constexpr,
    ACCUMULATOR: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Accumulate the tokens of a segment into a tile of their slot's gradient.

    Args:
        adds: Address of 1 to add the product to the current value, or of 0 to overwrite it.
        sums: Address at which to store the sum of squares, relative to the offset of the matrix's sums.
        start_of_sums: Address of that offset.
    """
    # Use the smallest tile that holds the slot's own ranks; the widest tiles take half as many tokens per iteration, to
    # fit in shared memory.
    for exponent in tl.static_range(5, 9):
        if 2**exponent <= TILE:
            if (num_narrow <= 2**exponent) and (num_narrow > 2**exponent // 2 or exponent == 5):
                _accumulate(
                    wide_TW,
                    narrow_TR,
                    gradient_WR,
                    segment,
                    adds,
                    sums,
                    start_of_sums,
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
                    HAS_SUMS,
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
    sums,
    start_of_sums,
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
    HAS_SUMS: tl.constexpr,
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
    written = gradient.to(gradient_WR.dtype.element_ty)
    tl.store(gradient_WR, written, mask=mask)
    if HAS_SUMS:
        # Elements outside of the mask are zero, because both factors were loaded as zero there.
        rounded = written.to(ACCUMULATOR)
        tl.store(sums + tl.load(start_of_sums), tl.sum(rounded * rounded))
