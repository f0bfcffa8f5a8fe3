"""Dropout whose mask depends on the job alone.

Every element's bits are a hash of the job's seed, its own step, the group of modules, the token's place in the job's
batch and the feature: the same for any other jobs in the batch, on any device and from every backend. The mask is made
    again in the backward pass instead of being stored. Modules that read the same input see the same mask.

``triton_kernels/dropout.py`` computes the same bits on a GPU. There a forward pass copies every segment's
``stream_key``, ``threshold`` and ``kept_factor`` once for all layers; hashing in the group's number is left to the
kernel.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = [
    "DropoutKey",
    "dropout_factor",
    "dropped",
    "group_key",
    "hash_",
    "hash_int",
    "hashed",
    "kept_factor",
    "stream_key",
    "threshold",
]

# The finaliser with low bias that Chris Wellons found by search (hash-prospector, "lowbias32").
_SHIFTS, _FACTORS = (16, 15, 16), (0x7FEB352D, 0x846CA68B)
_MASK = 0xFFFFFFFF


class DropoutKey(NamedTuple):
    """What a slot's dropout mask depends on, besides the module: the job alone, never the other jobs in the batch.

    Attributes:
        first_token: Place of the micro-batch's first token in the job's batch. Not 0 where the rows of a batch are
            split over micro-batches, whose masks then equal those of an unsplit batch.
    """

    probability: float
    seed: int
    step: int
    first_token: int = 0


def stream_key(key: DropoutKey) -> int:
    """32 bits from the job's seed and step; group, token and feature are hashed in after them."""
    mixed = 0
    for word in (key.seed & _MASK, key.seed >> 32 & _MASK, key.step):
        mixed = hash_int((mixed + word + 1) & _MASK)
    return mixed


def group_key(key: DropoutKey, number: int) -> int:
    """32 bits from the job's seed and step and the number of the group of modules."""
    return hash_int((stream_key(key) + number + 1) & _MASK)


def threshold(key: DropoutKey) -> int:
    """An element is kept where its 32 bits are at least this."""
    return min(round(key.probability * 2**32), _MASK)


def kept_factor(key: DropoutKey) -> float:
    """The factor of a kept element, a float32 for every backend."""
    return torch.tensor(1.0 / (1.0 - key.probability), dtype=torch.float32).item()


def dropped(x_TK: Tensor, key: DropoutKey | None, number: int) -> Tensor:
    """The tokens of one segment with its mask applied; themselves where the job has no dropout.

    Args:
        x_TK: Tokens of the segment.
        key: Key of the mask; None without dropout.
        number: Number of the group of modules.
    """
    if key is None:
        return x_TK
    return x_TK * dropout_factor(key, number, x_TK.shape[0], x_TK.shape[1], x_TK.device).to(x_TK.dtype)


def dropout_factor(key: DropoutKey, number: int, num_tokens: int, num_features: int, device: torch.device) -> Tensor:
    """``[num_tokens, num_features]`` float32: 0 where dropped, ``kept_factor`` elsewhere; ``number`` is the
    group's.

    Args:
        key: Key of the mask.
        number: Number of the group of modules.
        num_tokens: Tokens of the segment.
        num_features: ``K``.
        device: Device of the result.
    """
    tokens_T1 = torch.arange(key.first_token, key.first_token + num_tokens, device=device)[:, None]
    features_K = torch.arange(num_features, device=device)
    rows_T1 = hash_((tokens_T1 + group_key(key, number)).bitwise_and_(_MASK))
    keep = hash_((rows_T1 + features_K).bitwise_and_(_MASK)) >= threshold(key)
    return keep.to(torch.float32).mul_(kept_factor(key))


def hashed(words: Tensor) -> Tensor:
    """The hash of the lower 32 bits of ``words``, int64."""
    return hash_(words.bitwise_and(_MASK))


def hash_(x: Tensor, scratch: Tensor | None = None) -> Tensor:
    """The hash of 32-bit values in int64, in place.

    Args:
        x: Values.
        scratch: Memory as large as ``x``; None allocates it.
    """
    for shift, factor in zip(_SHIFTS[:2], _FACTORS, strict=True):
        x.bitwise_xor_(torch.bitwise_right_shift(x, shift, out=scratch)).mul_(factor).bitwise_and_(_MASK)
    return x.bitwise_xor_(torch.bitwise_right_shift(x, _SHIFTS[2], out=scratch))


def hash_int(x: int) -> int:
    """The hash of 32 bits."""
    for shift, factor in zip(_SHIFTS[:2], _FACTORS, strict=True):
        x = (x ^ x >> shift) * factor & _MASK
    return x ^ x >> _SHIFTS[2]
