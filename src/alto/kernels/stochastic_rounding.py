"""Stochastic rounding of AdamW's moments to bfloat16: up or down at random, so that the mean of the results is exact.

With rounding to nearest, a second moment would not change: a step with a decay of 0.999 moves it by a thousandth of the
squared gradient, but a bfloat16 has only 8 bits of precision. With random rounding, such a step is sometimes rounded up
to a full bfloat16 step.

The random bits are a hash of the job's seed, its own step and the element's position in the adapter, as in
:mod:`alto.kernels.dropout`: they are the same in any slot, with any other jobs in the batch, on any rank and in every
backend. ``triton_kernels/rounding.py`` computes the same bits on a GPU. A float32 has 16 bits more than a bfloat16, so
one 32-bit hash is enough for both moments, and the probabilities are exact.
"""

from __future__ import annotations

import torch
from torch import Tensor

from alto.kernels.dropout import DropoutKey, group_key, hash_, hash_int, hashed

_NUMBER = -2
"""Number in the hash that identifies rounding. Dropout uses the numbers of groups, from 0, and noise uses -1."""

_CHUNK = 1 << 16
"""Number of elements that are rounded at a time, so that intermediate results stay in the caches of a CPU."""

_LOWER = 0xFFFF
_WORD = 0xFFFFFFFF


def rounding_key(seed: int, step: int) -> int:
    """Return 32 bits from the job's seed and the number of its step."""
    return group_key(DropoutKey(0.0, seed, step), _NUMBER)


def random_bits(key: int, columns: Tensor) -> Tensor:
    """Return 32 bits for every position in the adapter, int64: the lower half for the first moment, the upper for the
    second.

    Args:
        key: Result of :func:`rounding_key`.
    """
    return hashed(hashed((columns >> 32) + key) + columns)


def rounded(values: Tensor, bits: Tensor) -> Tensor:
    """Return ``values``, float32, as bfloat16, rounded away from zero with the probability that keeps the mean, else
    towards zero.

    Values that bfloat16 can represent stay unchanged, including zero, signs stay the same, and non-finite values stay
    non-finite.

    Args:
        bits: 16 random bits for each value, int64.
    """
    as_bits = (values.view(torch.int32) + bits.to(torch.int32)).bitwise_and_(~_LOWER)
    # The added bits could carry over and turn a NaN into a number.
    return torch.where(values.isnan(), values, as_bits.view(torch.float32)).to(torch.bfloat16)


class MomentRounding:
    """In-place :func:`rounded` for the two moments of rows of any length; all memory is allocated in the
    constructor."""

    def __init__(self, device: torch.device) -> None:
        self._places = torch.arange(_CHUNK, device=device)
        self._bits, self._shifted = torch.empty_like(self._places), torch.empty_like(self._places)
        self._added = torch.empty(_CHUNK, dtype=torch.int32, device=device)
        self._is_nan = torch.empty(_CHUNK, dtype=torch.bool, device=device)

    def round_(self, exp_avg_P: Tensor, exp_avg_sq_P: Tensor, key: int) -> None:
        """Round both moments to numbers that bfloat16 can represent.

        Args:
            key: Result of :func:`rounding_key`.
        """
        for first in range(0, exp_avg_P.numel(), _CHUNK):
            exp_avg, exp_avg_sq = exp_avg_P[first : first + _CHUNK], exp_avg_sq_P[first : first + _CHUNK]
            size = exp_avg.numel()
            bits, shifted = self._bits[:size], self._shifted[:size]
            start = hash_int((key + (first >> 32)) & _WORD) + (first & _WORD)
            hash_(torch.add(self._places[:size], start, out=bits).bitwise_and_(_WORD), shifted)
            self._round_(exp_avg, torch.bitwise_and(bits, _LOWER, out=shifted))
            self._round_(exp_avg_sq, torch.bitwise_right_shift(bits, 16, out=shifted))

    def _round_(self, values: Tensor, bits: Tensor) -> None:
        added, is_nan = self._added[: values.numel()], self._is_nan[: values.numel()]
        torch.ne(values, values, out=is_nan)
        values.view(torch.int32).add_(added.copy_(bits)).bitwise_and_(~_LOWER)
        values.masked_fill_(is_nan, float("nan"))
