"""Noise on token embeddings (NEFTune, arXiv:2310.05914) that depends only on the job.

As for the masks of :mod:`alto.kernels.dropout`, every noise value is a hash of the job's seed, its own step, the
token's position in the job's batch and the feature. Other jobs in the batch and the split into micro-batches do not
change it.
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
        return cls(*(_sent(tensor, device) for tensor in tensors))

    def add_to(self, embedded_TH: Tensor) -> Tensor:
        """Return a copy of ``embedded_TH`` with noise on some tokens; the other tokens stay bit-identical.

        The noise is uniform over ``± alpha / sqrt(L H)``.
        """
        num_features = embedded_TH.shape[1]
        bits_NH = hashed(self.keys_N1 + torch.arange(num_features, device=embedded_TH.device))
        unit_NH = (bits_NH.to(torch.float32) + 0.5).mul_(2.0 / _RANGE).sub_(1.0)
        noise_NH = unit_NH.mul_(self.amplitudes_N1 / math.sqrt(num_features)).to(embedded_TH.dtype)
        return embedded_TH.index_add(0, self.positions_N, noise_NH)


def _sent(tensor: Tensor, device: torch.device) -> Tensor:
    """Return ``tensor`` on ``device``, copied without host-device synchronisation."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
