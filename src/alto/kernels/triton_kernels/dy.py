"""``ds[i] = dy[i] @ b_iᵀ`` and ``db_i += scale_i * s[i]ᵀ @ dy[i]`` in one launch, because both read the upstream
gradient.

A program computes a part of one of the two. Programs that read the same tokens and columns of ``dy`` start one after
the other, so that ``dy`` is read from device memory once and then from the L2 cache: for every slot, first the blocks
of its tokens (``ds``), then the tiles of ``SPLIT`` columns (``db``); after all slots, the next ``SPLIT`` columns.
"""

from __future__ import annotations

import triton
import triton.language as tl

from alto.kernels.triton_kernels.backward_weight import accumulate_by_own_tile
from alto.kernels.triton_kernels.common import of_member
from alto.kernels.triton_kernels.shrink import shrink_by_own_tile


@triton.jit(
    do_not_specialize=[
        *("stride_z", "stride_planes_t", "stride_sums_z", "stride_place"),
        *("first_place", "first_sum"),
    ]
)
def dy_kernel(
    dy_0,
    dy_1,
    dy_2,
    params_ZP,
    s_TQ,
    ds_TQ,
    planes_TCQ,
    counters,
    grads_ZP,
    sums_ZC,
    items_I6,
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
    stride_z,
    stride_s_t,
    stride_ds_t,
    stride_planes_t,
    stride_sums_z,
    stride_place,
    first_place,
    first_sum,
    num_tiles,
    IS_SPLIT: tl.constexpr,
    HAS_SUMS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_W: tl.constexpr,
    SPLIT: tl.constexpr,
    GRADIENT_T: tl.constexpr,
    GRADIENT_W: tl.constexpr,
    OPERAND: tl.constexpr,
    ACCUMULATOR: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute ``ds`` and ``db`` for up to three members.

    Grid: items, members, tiles of ``TILE`` ranks for each part of ``SPLIT`` out-features.

    Args:
        planes_TCQ, IS_SPLIT: See :func:`shrink_kernel`.
        counters: A zero for every item, member and tile, int32, left as zeros.
        sums_ZC, adds_S, HAS_SUMS: See :func:`da_kernel`.
        items_I6: See :meth:`alto.kernels.forward_table.ForwardTable.items`.
        first_place: Index of the first member's entries in a row of ``places_Z``.
        first_sum: Index, in a row of ``places_Z``, of the offset of the sums of the first member's ``B``.
        BLOCK_T, BLOCK_W: Tokens per program of ``ds``, and columns per iteration of its loop.
        GRADIENT_T, GRADIENT_W: Tokens per iteration of a program of ``db``, and columns per program.
    """
    item = items_I6 + 6 * tl.program_id(0)
    gradient_tile = tl.load(item)
    tokens = item + 2
    slot = tl.load(tokens).to(tl.int64)
    first = tl.load(tokens + 1).to(tl.int64)
    member = tl.program_id(1)
    place = places_Z + slot * stride_place + first_place + 3 * member
    column = tl.multiple_of(tl.load(place), ALIGNMENT)
    part = tl.program_id(2) // num_tiles
    tile = tl.program_id(2) % num_tiles
    first_rank = tile * TILE
    rank = tl.load(place + 1).to(tl.int32)
    num_ranks = tl.multiple_of(tl.minimum(rank - first_rank, TILE), ALIGNMENT)
    num_wide = of_member(member, num_0, num_1, num_2)
    first_wide = part * SPLIT + tl.maximum(gradient_tile, 0) * GRADIENT_W
    if (num_ranks <= 0) | (first_wide >= num_wide):
        return
    b_start = tl.multiple_of(slot * stride_z + tl.load(place + 2), ALIGNMENT)
    stride_dy_t = of_member(member, stride_0_t, stride_1_t, stride_2_t)
    stride_dy_n = of_member(member, stride_0_n, stride_1_n, stride_2_n)
    dy_TN = of_member(member, dy_0, dy_1, dy_2) + first * stride_dy_t
    if gradient_tile < 0:
        shrink_by_own_tile(
            dy_TN,
            params_ZP + b_start + first_rank * num_wide,
            ds_TQ + first * stride_ds_t + column + first_rank,
            planes_TCQ,
            counters,
            tokens,
            1.0,
            0,
            part,
            (column + first_rank).to(tl.int32),
            num_tiles,
            num_wide,
            num_ranks,
            stride_dy_t,
            stride_dy_n,
            1,
            num_wide,
            stride_ds_t,
            stride_planes_t,
            False,
            IS_SPLIT,
            TILE,
            BLOCK_T,
            BLOCK_W,
            SPLIT,
            OPERAND,
            ACCUMULATOR,
            PRECISION,
        )
    else:
        accumulate_by_own_tile(
            dy_TN,
            s_TQ + first * stride_s_t + column + first_rank,
            grads_ZP + b_start + first_rank * num_wide + first_wide,
            tokens,
            adds_S + tl.load(item + 1),
            sums_ZC + slot * stride_sums_z + first_wide // GRADIENT_W * tl.cdiv(rank, TILE) + tile,
            places_Z + slot * stride_place + first_sum + member,
            tl.load(factors_Z2 + 2 * slot),
            0,
            first_wide,
            num_wide,
            num_ranks,
            stride_dy_t,
            stride_dy_n,
            stride_s_t,
            1,
            num_wide,
            False,
            HAS_SUMS,
            TILE,
            GRADIENT_T,
            GRADIENT_W,
            OPERAND,
            ACCUMULATOR,
            PRECISION,
        )
