"""The assignment of a pass's tokens to adapters, in the form that the kernels of ``lorafusion`` read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["BlockTable", "Segment", "TokenBlocks"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """The tokens of one job.

    Attributes:
        first, length: Position and number of the tokens.
        row, rank: First row and number of rows of the job among those of the pass.
        scale: ``lora_alpha / r``.
    """

    first: int
    length: int
    row: int
    rank: int
    scale: float


class BlockTable(NamedTuple):
    """Blocks of at most one size: first token, number of tokens, first row and rank; and the scale of each block."""

    blocks_B4: Tensor
    scales_B: Tensor


class TokenBlocks:
    """The segments of a pass, and their tables of blocks, which are sent to the device at their first use.

    Attributes:
        segments: One for each job.
        num_ranks: Number of ranks that the kernels multiply: a power of two, at least every rank.
    """

    def __init__(self, segments: Sequence[Segment], *, num_ranks: int, device: torch.device) -> None:
        self.segments = tuple(segments)
        self.num_ranks = num_ranks
        self._device = device
        self._tables: dict[int, BlockTable] = {}

    def table(self, size: int) -> BlockTable:
        """Return blocks of ``size`` tokens; the last block of a job has the remaining tokens, and a job without tokens
        has none."""
        if size not in self._tables:
            blocks = [
                (segment.first + start, min(size, segment.length - start), segment.row, segment.rank, segment.scale)
                for segment in self.segments
                for start in range(0, segment.length, size)
            ]
            self._tables[size] = BlockTable(
                torch.tensor([block[:4] for block in blocks], dtype=torch.int32).to(self._device, non_blocking=True),
                torch.tensor([block[4] for block in blocks], dtype=torch.float32).to(self._device, non_blocking=True),
            )
        return self._tables[size]
