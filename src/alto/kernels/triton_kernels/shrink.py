"""``narrow[i] = wide[i] @ weight_i``: the product of every slot's tokens with its own matrix, down to its own ranks.

A few blocks of tokens alone would leave most of a GPU idle. So each part of ``SPLIT`` wide columns has its own program,
which writes its sum to its own plane. The last program to finish, found with an atomic counter, adds all planes in
order. The sums depend neither on which program finishes last nor on the number of blocks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from alto.kernels.triton_kernels.common import is_kept, token_keys


@triton.jit(do_not_specialize=["number", "stride_z", "stride_planes_t", "stride_place"])
def shrink_kernel(
    x_TK,
    params_ZP,
    s_TQ,
    planes_TCQ,
    counters,
    blocks_B6,
    factors_Z2,
    places_Z,
    number,
    num_features,
    stride_x_t,
    stride_x_k,
    stride_z,
    stride_s_t,
    stride_planes_t,
    stride_place,
    DROPOUT: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_W: tl.constexpr,
    SPLIT: tl.constexpr,
    OPERAND: tl.constexpr,
    ACCUMULATOR: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute ``s[i] = dropout_i(x[i]) @ a_i``; columns past a slot's own are left uninitialised.

    Grid: blocks of tokens, tiles of ``TILE`` columns of ``Q``, parts of ``SPLIT`` features.

    Args:
        planes_TCQ: A row for every token and part, as far apart as the rows of ``s_TQ``, in the dtype of sums; any
            tensor without ``IS_SPLIT``.
        counters: A zero for every block and tile, int32, left as zeros.
        IS_SPLIT: Whether there is more than one part.
    """
    block = blocks_B6 + 6 * tl.program_id(0)
    slot = tl.load(block).to(tl.int64)
    first = tl.load(block + 1)
    place = places_Z + slot * stride_place
    width = tl.multiple_of(tl.load(place).to(tl.int32), ALIGNMENT)
    a_start = tl.multiple_of(slot * stride_z + tl.load(place + 1), ALIGNMENT)
    first_column = tl.program_id(1) * TILE
    num_columns = tl.multiple_of(tl.minimum(width - first_column, TILE), ALIGNMENT)
    if num_columns <= 0:
        return
    shrink_by_own_tile(
        x_TK + first.to(tl.int64) * stride_x_t,
        params_ZP + a_start + first_column,
        s_TQ + first.to(tl.int64) * stride_s_t + first_column,
        planes_TCQ,
        counters,
        block,
        tl.load(factors_Z2 + 2 * slot + 1),
        number,
        tl.program_id(2),
        first_column,
        1,
        num_features,
        num_columns,
        stride_x_t,
        stride_x_k,
        width,
        1,
        stride_s_t,
        stride_planes_t,
        DROPOUT,
        IS_SPLIT,
        TILE,
        BLOCK_T,
        BLOCK_W,
        SPLIT,
        OPERAND,
        ACCUMULATOR,
        PRECISION,
    )


@triton.jit
def shrink_by_own_tile(
    wide_TW,
    weight_WR,
    narrow_TR,
    planes_TCQ,
    counters,
    block,
    factor,
    number,
    part,
    column,
    num_tiles,
    num_wide,
    num_narrow,
    stride_wide_t,
    stride_wide_w,
    stride_weight_w,
    stride_weight_r,
    stride_narrow_t,
    stride_planes_t,
    DROPOUT: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_W: tl.constexpr,
    SPLIT: tl.constexpr,
    OPERAND: tl.constexpr,
    ACCUMULATOR: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Multiply a block of tokens with the ``num_narrow`` columns of its slot.

    Args:
        counters: Number of finished parts for every block and tile, int32; zero before and after.
        column: First column of the narrow tensor that is written, used to find its position in a plane.
        num_tiles: Number of tiles in the third dimension of the grid, each for all parts.
    """
    # Use the smallest tile that holds the slot's own ranks, so that a slot of rank 16 does not pay for another slot of
    # rank 128. The widest tiles take half as many columns per iteration, to fit in shared memory.
    for exponent in tl.static_range(5, 9):
        if 2**exponent <= TILE:
            if (num_narrow <= 2**exponent) and (num_narrow > 2**exponent // 2 or exponent == 5):
                _shrink(
                    wide_TW,
                    weight_WR,
                    narrow_TR,
                    planes_TCQ,
                    counters,
                    block,
                    factor,
                    number,
                    part,
                    column,
                    num_tiles,
                    num_wide,
                    num_narrow,
                    stride_wide_t,
                    stride_wide_w,
                    stride_weight_w,
                    stride_weight_r,
                    stride_narrow_t,
                    stride_planes_t,
                    DROPOUT,
                    IS_SPLIT,
                    2**exponent,
                    BLOCK_T,
                    BLOCK_W if exponent <= 6 else BLOCK_W // 2,
                    SPLIT,
                    OPERAND,
                    ACCUMULATOR,
                    PRECISION,
                )


@triton.jit
def _shrink(
    wide_TW,
    weight_WR,
    narrow_TR,
    planes_TCQ,
    counters,
    block,
    factor,
    number,
    part,
    column,
    num_tiles,
    num_wide,
    num_narrow,
    stride_wide_t,
    stride_wide_w,
    stride_weight_w,
    stride_weight_r,
    stride_narrow_t,
    stride_planes_t,
    DROPOUT: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_W: tl.constexpr,
    SPLIT: tl.constexpr,
    OPERAND: tl.constexpr,
    ACCUMULATOR: tl.constexpr,
    PRECISION: tl.constexpr,
):
    num_tokens = tl.load(block + 2) - tl.load(block + 1)
    t = tl.arange(0, BLOCK_T)[:, None]
    r = tl.arange(0, BLOCK_R)[None, :]
    columns = tl.arange(0, BLOCK_W)
    total = tl.zeros((BLOCK_T, BLOCK_R), dtype=ACCUMULATOR)
    if DROPOUT:
        keys = token_keys(tl.load(block + 4), number, tl.load(block + 3) + t)
        threshold = tl.load(block + 5)
    first_of_part = part * SPLIT if IS_SPLIT else 0
    end_of_part = tl.minimum(first_of_part + SPLIT, num_wide) if IS_SPLIT else num_wide
    for first_wide in range(first_of_part, end_of_part, BLOCK_W):
        w = first_wide + columns
        wide = tl.load(
            wide_TW + t * stride_wide_t + w[None, :] * stride_wide_w,
            mask=(t < num_tokens) & (w[None, :] < num_wide),
            other=0.0,
        )
        weight = tl.load(
            weight_WR + w[:, None] * stride_weight_w + r * stride_weight_r,
            mask=(w[:, None] < num_wide) & (r < num_narrow),
            other=0.0,
        )
        if DROPOUT:
            wide = tl.where(is_kept(keys, w[None, :], threshold), wide, 0.0)
        total = tl.dot(wide.to(OPERAND), weight.to(OPERAND), total, input_precision=PRECISION, out_dtype=ACCUMULATOR)
    mask = (t < num_tokens) & (r < num_narrow)
    if not IS_SPLIT:
        _store(narrow_TR + t * stride_narrow_t + r, total, factor, mask, DROPOUT, ACCUMULATOR)
    else:
        # Computed after the loop, where registers are free.
        planes_TCR = planes_TCQ + tl.load(block + 1).to(tl.int64) * stride_planes_t + column
        counter = counters + tl.program_id(0) * tl.num_programs(1) * num_tiles
        counter += tl.program_id(1) * num_tiles + tl.program_id(2) % num_tiles
        tl.store(planes_TCR + t * stride_planes_t + part * stride_narrow_t + r, total, mask=mask)
        tl.debug_barrier()  # write the whole plane before the counter is increased
        num_parts = tl.cdiv(num_wide, SPLIT)
        if tl.atomic_add(counter, 1, sem="acq_rel") == num_parts - 1:
            _add_planes(
                planes_TCR,
                narrow_TR,
                factor,
                num_tokens,
                num_narrow,
                num_parts,
                stride_planes_t,
                stride_narrow_t,
                DROPOUT,
                BLOCK_R,
                ACCUMULATOR,
            )
            tl.store(counter, 0)


@triton.jit
def _add_planes(
    planes_TCR,
    narrow_TR,
    factor,
    num_tokens,
    num_narrow,
    num_parts,
    stride_planes_t,
    stride_narrow_t,
    DROPOUT: tl.constexpr,
    BLOCK_R: tl.constexpr,
    ACCUMULATOR: tl.constexpr,
):
    # Add a few tokens at a time, to use few registers.
    NUM_TOKENS: tl.constexpr = 16
    r = tl.arange(0, BLOCK_R)[None, :]
    for first in range(0, num_tokens, NUM_TOKENS):
        t = first + tl.arange(0, NUM_TOKENS)[:, None]
        mask = (t < num_tokens) & (r < num_narrow)
        total = tl.zeros((NUM_TOKENS, BLOCK_R), dtype=ACCUMULATOR)
        for part in range(0, num_parts):
            # Bypass the L1 cache of this multiprocessor, which may hold outdated values.
            plane = planes_TCR + t * stride_planes_t + part * stride_narrow_t + r
            total += tl.load(plane, mask=mask, other=0.0, cache_modifier=".cg")
        _store(narrow_TR + t * stride_narrow_t + r, total, factor, mask, DROPOUT, ACCUMULATOR)


@triton.jit
def _store(narrow_TR, total, factor, mask, DROPOUT: tl.constexpr, ACCUMULATOR: tl.constexpr):
    if DROPOUT:
        total *= factor.to(ACCUMULATOR)
    tl.store(narrow_TR, total.to(narrow_TR.dtype.element_ty), mask=mask)
