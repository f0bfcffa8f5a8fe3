"""The tables by which GPU kernels find their work in a pass: which block of tokens belongs to which slot.

Shapes: ``B`` blocks of tokens, ``S`` segments, ``Z`` slots. Built once per pass and device; the kernels of every layer
read the same memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["BLOCK_TOKENS", "PassTable", "upload"]

BLOCK_TOKENS = 64
"""Most tokens of a block. One number for all kernels, so that one table serves them: 64 rows fill the matrix unit of a
Hopper or Blackwell GPU, and more would leave short segments mostly empty."""


def upload(values: Sequence[float] | Sequence[Sequence[float]], dtype: torch.dtype, device: torch.device) -> Tensor:
    """``values`` on ``device``, without waiting for what the device is doing."""
    return torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)


class PassTable:
    """The segments of one pass in device memory.

    Attributes:
        num_blocks: ``B``.
        num_segments: ``S``.
        blocks_B3: Slot, first token and end of every block, int32; a block lies in one segment.
        segments_S3: Slot, first token and end of every segment, int32.
        scales_Z: ``lora_alpha / r`` of every slot up to the largest of the pass, float32; zero where it has no tokens.
    """

    def __init__(self, segments: Sequence[tuple[int, int, int]], scales: Sequence[float], device: torch.device) -> None:
        blocks = [
            (slot, first, min(first + BLOCK_TOKENS, end))
            for slot, start, end in segments
            for first in range(start, end, BLOCK_TOKENS)
        ]
        scales_Z = [0.0] * (1 + max((slot for slot, _, _ in segments), default=-1))
        for (slot, _, _), scale in zip(segments, scales, strict=True):
            scales_Z[slot] = scale
        self.num_blocks = len(blocks)
        self.num_segments = len(segments)
        rows = upload([*blocks, *segments], torch.int32, device).view(-1, 3)
        self.blocks_B3, self.segments_S3 = rows[: len(blocks)], rows[len(blocks) :]
        self.scales_Z = upload(scales_Z, torch.float32, device)
        self._device = device
        self._ranks: dict[tuple[int, ...], Tensor] = {}

    def ranks(self, ranks: Sequence[int]) -> Tensor:
        """``ranks`` as ``[Z]`` int32; modules with the same ranks read the same memory."""
        key = tuple(ranks)
        if key not in self._ranks:
            self._ranks[key] = upload(key, torch.int32, self._device)
        return self._ranks[key]
