"""Device functions that several kernels call."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def token_keys(stream_key, number, tokens):
    """Return the hash of everything except the feature, uint32.

    Args:
        stream_key: Key of the segment, 32 bits as int32.
    """
    group_key = hashed(stream_key.to(tl.uint32, bitcast=True) + number.to(tl.uint32) + 1)
    return hashed(group_key + tokens.to(tl.uint32))


@triton.jit
def is_kept(token_keys, features, threshold):
    """Return whether each element is kept; ``threshold`` is 32 bits as int32."""
    return hashed(token_keys + features.to(tl.uint32)) >= threshold.to(tl.uint32, bitcast=True)


@triton.jit
def hashed(x):
    """Return the hash of 32 bits, uint32."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def of_member(member, of_0, of_1, of_2):
    """Return the value that belongs to ``member``, out of three."""
    return tl.where(member == 2, of_2, tl.where(member == 1, of_1, of_0))


@triton.jit
def tile_of_members(tile, num_0, num_1, BLOCK_W: tl.constexpr):
    """Return the member that owns ``tile``, and the tile's first wide column; tiles are numbered through all
    members."""
    tiles_0 = tl.cdiv(num_0, BLOCK_W)
    tiles_1 = tiles_0 + tl.cdiv(num_1, BLOCK_W)
    member = (tile >= tiles_0).to(tl.int32) + (tile >= tiles_1).to(tl.int32)
    return member, (tile - of_member(member, 0, tiles_0, tiles_1)) * BLOCK_W


@triton.jit
def load_columns(row_P, columns, end, IS_FULL: tl.constexpr):
    """Return ``row[columns]``, zero from ``end`` on.

    Args:
        IS_FULL: Whether all columns are known to lie before ``end``.
    """
    if IS_FULL:
        return tl.load(row_P + columns)
    else:
        return tl.load(row_P + columns, mask=columns < end, other=0.0)


@triton.jit
def store_columns(row_P, columns, values, end, IS_FULL: tl.constexpr):
    """Write ``row[columns] = values`` before ``end``."""
    if IS_FULL:
        tl.store(row_P + columns, values)
    else:
        tl.store(row_P + columns, values, mask=columns < end)


@triton.jit
def random_bits(key, start, columns):
    """Return 32 bits for every position in the adapter, uint32: the lower half for the first moment, the upper for the
    second.

    Args:
        key: Key of the job and its step, 32 bits as int64.
        start: The first of ``columns``.
        columns: Positions, int64. Their number is a power of two that divides ``start``, so all have the same upper
            word.
    """
    return hashed(hashed((key + (start >> 32)).to(tl.uint32)) + columns.to(tl.uint32))


@triton.jit
def rounded(values, bits):
    """Round ``values``, float32, to numbers that bfloat16 can represent, away from zero or towards it, using 16 random
    ``bits``."""
    as_bits = (values.to(tl.uint32, bitcast=True) + bits) & 0xFFFF0000
    # The added bits could carry over and turn a NaN into a number.
    return tl.where(values == values, as_bits.to(tl.float32, bitcast=True), values)
