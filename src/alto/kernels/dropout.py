"""Dropout whose mask depends on the job alone.

The mask of a job's tokens is drawn from a generator keyed by the job's seed, its own step and the module, so it is
the same in any company and is drawn again in the backward pass instead of being stored.
"""

from __future__ import annotations

import torch
from torch import Tensor

from alto.kernels.schedule import DropoutKey, TokenSchedule

__all__ = ["apply_dropout", "dropout_factor"]

_MIX = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9)


def dropout_factor(key: DropoutKey, module: int, num_tokens: int, num_features: int, device: torch.device) -> Tensor:
    """``[num_tokens, num_features]`` float32: 0 where dropped, ``1 / (1 - probability)`` elsewhere."""
    mixed = sum(value * factor for value, factor in zip((key.seed + 1, key.step + 1, module + 1), _MIX, strict=True))
    generator = torch.Generator(device=device).manual_seed(mixed % (1 << 63))
    keep = torch.rand(num_tokens, num_features, generator=generator, device=device) >= key.probability
    return keep.to(torch.float32).div_(1.0 - key.probability)


def apply_dropout(x_TK: Tensor, schedule: TokenSchedule, module: int) -> Tensor:
    """``x_TK`` with every segment's own mask applied; ``x_TK`` itself when no segment has dropout."""
    if not any(schedule.dropout):
        return x_TK
    dropped_TK = x_TK.clone()
    for (_, start, end), key in zip(schedule.segments, schedule.dropout, strict=True):
        if key is not None:
            factor = dropout_factor(key, module, end - start, x_TK.shape[1], x_TK.device)
            dropped_TK[start:end] *= factor.to(x_TK.dtype)
    return dropped_TK
