"""Sums of runs of losses, each run by itself.

Shapes: ``S`` trained tokens, ``R`` runs of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["run_sums", "to_device"]


def run_sums(values_S: Tensor, lengths: Sequence[int]) -> Tensor:
    """Sum every run of ``values_S``, ``[R]`` float64, all runs in one launch.

    Each run is summed separately, in an order that depends only on its length, so its bits depend on no other run. The
    sums are in float64, because on a CPU they add one value after the other.
    """
    # `unsafe`: the lengths are valid, and checking them would synchronise host and device.
    return torch.segment_reduce(values_S.double(), "sum", lengths=to_device(lengths, values_S.device), unsafe=True)


def to_device(numbers: Sequence[Any], device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Return a tensor of ``numbers``, copied to ``device`` without synchronisation.

    Args:
        numbers: The numbers, or rows of numbers.
    """
    return torch.tensor(numbers, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)
