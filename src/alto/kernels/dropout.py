"""Dropout whose mask depends only on the job.

Each element's random bits are a hash of the job's seed, its own step, the group of modules, the token's position in the
job's batch and the feature. They are the same with any other jobs in the batch, on any device and in every backend. The
backward pass recomputes the mask instead of storing it. Modules that read the same input use the same mask.

``triton_kernels/dropout.py`` computes the same bits on a GPU. There, a forward pass copies every segment's
``stream_key``, ``threshold`` and ``kept_factor`` once for all layers, and the kernel hashes in the group's number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

# Chris Wellons' low-bias hash finalizer (hash-prospector, "lowbias32").
_SHIFTS, _FACTORS = (16, 15, 16), (0x7FEB352D, 0x846CA68B)
_MASK = 0xFFFFFFFF


class DropoutKey(NamedTuple):
    """The key of a slot's dropout mask. The mask depends only on the module and the job, never on other jobs in
    the batch.

    Attributes:
        first_token: Position of the micro-batch's first token in the job's batch. It is not 0 if a batch is split into
            micro-batches; their masks then equal the masks of the unsplit batch.
    """

    probability: float
    seed: int
    step: int
    first_token: int = 0


def stream_key(key: DropoutKey) -> int:
    """Return 32 bits from the job's seed and step; group, token and feature are hashed in later."""
    mixed = 0
    for word in (key.seed & _MASK, key.seed >> 32 & _MASK, key.step):
        mixed = hash_int((mixed + word + 1) & _MASK)
    return mixed


def group_key(key: DropoutKey, number: int) -> int:
    """Return 32 bits from the job's seed and step and the number of the group of modules."""
    return hash_int((stream_key(key) + number + 1) & _MASK)


def threshold(key: DropoutKey) -> int:
    """Return the smallest 32-bit value for which an element is kept."""
    return min(round(key.probability * 2**32), _MASK)


def kept_factor(key: DropoutKey) -> float:
    """Return the factor of a kept element, rounded to float32 for every backend."""
    return torch.tensor(1.0 / (1.0 - key.probability), dtype=torch.float32).item()


def dropped(x_TK: Tensor, key: DropoutKey | None, number: int) -> Tensor:
    """Return the tokens of one segment with its mask applied, or unchanged if the job has no dropout.

    Args:
        key: Key of the mask; None for no dropout.
    """
    if key is None:
        return x_TK
    return x_TK * dropout_factor(key, number, x_TK.shape[0], x_TK.shape[1], x_TK.device).to(x_TK.dtype)


def dropout_factor(key: DropoutKey, number: int, num_tokens: int, num_features: int, device: torch.device) -> Tensor:
    """Return the factor of every element, ``[num_tokens, num_features]`` float32: 0 if dropped, ``kept_factor``
    otherwise."""
    tokens_T1 = torch.arange(key.first_token, key.first_token + num_tokens, device=device)[:, None]
    features_K = torch.arange(num_features, device=device)
    rows_T1 = hash_((tokens_T1 + group_key(key, number)).bitwise_and_(_MASK))
    keep = hash_((rows_T1 + features_K).bitwise_and_(_MASK)) >= threshold(key)
    return keep.to(torch.float32).mul_(kept_factor(key))


def hashed(words: Tensor) -> Tensor:
    """Return the hash of the lower 32 bits of ``words``, int64."""
    return hash_(words.bitwise_and(_MASK))


def hash_(x: Tensor, scratch: Tensor | None = None) -> Tensor:
    """Hash 32-bit values stored as int64, in place.

    Args:
        scratch: Memory as large as ``x``; None allocates it.
    """
    for shift, factor in zip(_SHIFTS[:2], _FACTORS, strict=True):
        x.bitwise_xor_(torch.bitwise_right_shift(x, shift, out=scratch)).mul_(factor).bitwise_and_(_MASK)
    return x.bitwise_xor_(torch.bitwise_right_shift(x, _SHIFTS[2], out=scratch))


def hash_int(x: int) -> int:
    """Return the hash of 32 bits."""
    for shift, factor in zip(_SHIFTS[:2], _FACTORS, strict=True):
        x = (x ^ x >> shift) * factor & _MASK
    return x ^ x >> _SHIFTS[2]


# Noise on token embeddings (NEFTune, arXiv:2310.05914) that depends only on the job.
#
# As for the masks of :mod:`alto.kernels.dropout`, every noise value is a hash of the job's seed, its own step, the
# token's position in the job's batch and the feature. Other jobs in the batch and the split into micro-batches do not
# change it.

_RANGE = 2.0**32


class NoiseKey(NamedTuple):
    """The key of a job's noise.

    Attributes:
        alpha: ``neftune_noise_alpha``.
        step: Number of steps that the job has done.
        first_token: Position of the micro-batch's first token in the job's batch.
    """

    alpha: float
    seed: int
    step: int
    first_token: int = 0


@dataclass(frozen=True, slots=True)
class TokenNoise:
    """The noise of one micro-batch, for its ``N`` tokens that get noise.

    Attributes:
        positions_N: Indices of these tokens in the micro-batch.
        keys_N1: Hash of each token's job, step and position in the job's batch.
        amplitudes_N1: ``alpha / sqrt(L)`` of each token, float32; ``L`` is the length of its sequence.
    """

    positions_N: Tensor
    keys_N1: Tensor
    amplitudes_N1: Tensor

    @classmethod
    def build(
        cls, keys: Sequence[NoiseKey | None], lengths: Sequence[Sequence[int]], device: torch.device
    ) -> TokenNoise | None:
        """Return the noise of a micro-batch; None if no job uses noise.

        Args:
            keys: Key of every job, in token order; None for no noise.
            lengths: Number of tokens of every sequence of each job.
        """
        positions, streams, places, amplitudes, start = [], [], [], [], 0
        for key, of_job in zip(keys, lengths, strict=True):
            count = sum(of_job)
            if key is not None:
                positions.append(torch.arange(start, start + count))
                places.append(torch.arange(key.first_token, key.first_token + count))
                streams.append(torch.full((count,), stream_key(DropoutKey(0.0, key.seed, key.step))))
                amplitudes += [key.alpha / math.sqrt(length) for length in of_job for _ in range(length)]
            start += count
        if not positions:
            return None
        keys_N = hashed(torch.cat(places) + hashed(torch.cat(streams)))
        amplitudes_N1 = torch.tensor(amplitudes, dtype=torch.float32)[:, None]
        tensors = (torch.cat(positions), keys_N[:, None], amplitudes_N1)
        return cls(*(send(tensor, device) for tensor in tensors))

    def add_to(self, embedded_TH: Tensor) -> Tensor:
        """Return a copy of ``embedded_TH`` with noise on some tokens; the other tokens stay bit-identical.

        The noise is uniform over ``± alpha / sqrt(L H)``.
        """
        num_features = embedded_TH.shape[1]
        bits_NH = hashed(self.keys_N1 + torch.arange(num_features, device=embedded_TH.device))
        unit_NH = (bits_NH.to(torch.float32) + 0.5).mul_(2.0 / _RANGE).sub_(1.0)
        noise_NH = unit_NH.mul_(self.amplitudes_N1 / math.sqrt(num_features)).to(embedded_TH.dtype)
        return embedded_TH.index_add(0, self.positions_N, noise_NH)


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the host's memory on ``device``; on a GPU the host does not wait for the copy."""
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
