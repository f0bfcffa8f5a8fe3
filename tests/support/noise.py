"""The noise of NEFTune in the oracle: transformers' own hook, with the draws of ALTO's jobs."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from unittest import mock

import torch
from oracle import SoloJob
from torch import Tensor
from transformers.integrations.neftune import activate_neftune

from alto.kernels import NoiseKey, TokenNoise

__all__ = ["same_noise", "unit_noise"]


def unit_noise(key: NoiseKey, lengths: list[int], width: int) -> Tensor:
    """Return the draws of a job from ±1: with ``alpha`` √(L H), the amplitude is 1."""
    parts, first = [], key.first_token
    for length in lengths:
        of_row = key._replace(alpha=math.sqrt(length * width), first_token=first)
        noise = TokenNoise.build([of_row], [[length]], torch.device("cpu"))
        assert noise is not None
        parts.append(noise.add_to(torch.zeros(length, width)))
        first += length
    return torch.cat(parts)


@contextlib.contextmanager
def same_noise(solo: SoloJob) -> Iterator[None]:
    """Give a step of ``solo`` on one row the noise of its job inside the context; no noise if the job has none."""
    alpha = solo.config.neftune_noise_alpha
    if alpha is None:
        yield
        return
    activate_neftune(solo.model, alpha)
    key = NoiseKey(1.0, solo.config.seed, solo.step)

    def uniform(zeros: Tensor, low: float, high: float) -> Tensor:
        assert high == -low
        assert len(zeros) == 1, "a token's place in a padded batch differs from its place in the job's"
        return (high * unit_noise(key, [zeros.shape[1]], zeros.shape[2])[None]).to(zeros.dtype)

    with mock.patch.object(Tensor, "uniform_", uniform):
        yield
