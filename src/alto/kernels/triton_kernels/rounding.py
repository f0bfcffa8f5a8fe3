"""The rounding of :mod:`alto.kernels.stochastic_rounding`, bit by bit."""

from __future__ import annotations

import triton
import triton.language as tl

from alto.kernels.triton_kernels.dropout import hashed

__all__ = ["random_bits", "rounded"]


@triton.jit
def random_bits(key, start, columns):
    """32 bits for every place in the adapter, uint32: the lower half for the first moment, the upper for the second.

    Args:
        key: Of the job and its step, 32 bits as int64.
        start: The first of ``columns``.
        columns: Places, int64, as many as a power of two that divides ``start``: all have the same upper words.
    """
    return hashed(hashed((key + (start >> 32)).to(tl.uint32)) + columns.to(tl.uint32))


@triton.jit
def rounded(values, bits):
    """``values``, float32, as numbers that bfloat16 can hold: away from zero or towards it, by 16 random ``bits``."""
    as_bits = (values.to(tl.uint32, bitcast=True) + bits) & 0xFFFF0000
    # A carry would make a NaN of some bits another number.
    return tl.where(values == values, as_bits.to(tl.float32, bitcast=True), values)
