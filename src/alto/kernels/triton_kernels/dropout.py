"""The masks of :mod:`alto.kernels.dropout`, with identical bits, computed where they are used."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["hashed", "is_kept", "token_keys"]


@triton.jit
def token_keys(stream_key, number, tokens):
    """Return the hash of everything except the feature, uint32.

    Args:
        stream_key: Key of the segment, 32 bits as int32.
        number: Number of the group.
        tokens: Positions in the job's batch.
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
