"""Selection of the member, out of up to three members of a group, that a program works for."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["of_member", "tile_of_members"]


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
