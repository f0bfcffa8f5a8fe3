"""The rounding of :mod:`alto.kernels.stochastic_rounding`, with identical bits."""

from __future__ import annotations

import triton
import triton.language as tl

from alto.kernels.triton_kernels.dropout import hashed

__all__ = ["random_bits", "rounded"]


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
