"""The masks of :mod:`alto.kernels.dropout`, bit by bit, made where they are used."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["is_kept", "token_keys"]


@triton.jit
def token_keys(stream_key, number, tokens):
    """The hash of everything but the feature, uint32.

    Args:
        stream_key: Of the segment, 32 bits as int32.
        number: Of the group.
        tokens: Places in the job's batch.
    """
    group_key = _hash(stream_key.to(tl.uint32, bitcast=True) + number.to(tl.uint32) + 1)
    return _hash(group_key + tokens.to(tl.uint32))


@triton.jit
def is_kept(token_keys, features, threshold):
    """Whether each element is kept; ``threshold`` is 32 bits as int32."""
    return _hash(token_keys + features.to(tl.uint32)) >= threshold.to(tl.uint32, bitcast=True)


@triton.jit
def _hash(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)
