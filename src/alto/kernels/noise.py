"""Noise on token embeddings (NEFTune, arXiv:2310.05914) that depends on the job alone.

As the masks of :mod:`alto.kernels.dropout`: every number is a hash of the job's seed, its own step, the token's place
in the job's batch and the feature, whatever other jobs and micro-batches there are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from alto.kernels.dropout import DropoutKey, hashed, stream_key

__all__ = ["NoiseKey", "TokenNoise"]

_RANGE = 2.0**32


class NoiseKey(NamedTuple):
    """What a job's noise depends on.

    Attributes:
        alpha: ``neftune_noise_alpha``.
        seed: The job's seed.
        step: Steps that it has done.
        first_token: Place of the micro-batch's first token in the job's batch.
    """

    alpha: float
    seed: int
    step: int
    first_token: int = 0


@dataclass(frozen=True, slots=True)
class TokenNoise:
    """The noise of one micro-batch, for those of its tokens that have any, ``N`` of them.

    Attributes:
        positions_N: Their indices in the micro-batch.
        keys_N1: The hash of each one's job, step and place in the job's batch.
        amplitudes_N1: ``alpha / sqrt(L)`` of each, float32; ``L`` is the length of its sequence.
    """

    positions_N: Tensor
    keys_N1: Tensor
    amplitudes_N1: Tensor

    @classmethod
    def build(
        cls, keys: Sequence[NoiseKey | None], lengths: Sequence[Sequence[int]], device: torch.device
    ) -> TokenNoise | None:
        """The noise of a micro-batch; None where no job has any.

        Args:
            keys: Of every job, in token order; None without noise.
            lengths: Tokens of every sequence of each job.
            device: Device of the noise.
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
        return cls(*(_sent(tensor, device) for tensor in tensors))

    def add_to(self, embedded_TH: Tensor) -> Tensor:
        """A copy of ``embedded_TH`` with noise from the uniform distribution over ``± alpha / sqrt(L H)`` on the tokens
        that have any; the others are equal to the last bit."""
        num_features = embedded_TH.shape[1]
        bits_NH = hashed(self.keys_N1 + torch.arange(num_features, device=embedded_TH.device))
        unit_NH = (bits_NH.to(torch.float32) + 0.5).mul_(2.0 / _RANGE).sub_(1.0)
        noise_NH = unit_NH.mul_(self.amplitudes_N1 / math.sqrt(num_features)).to(embedded_TH.dtype)
        return embedded_TH.index_add(0, self.positions_N, noise_NH)


def _sent(tensor: Tensor, device: torch.device) -> Tensor:
    """``tensor`` on ``device``, copied without host-device synchronisation."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
