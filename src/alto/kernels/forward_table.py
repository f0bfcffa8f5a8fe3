"""Tables of a forward pass for GPU kernels: which block of tokens belongs to which slot.

Shapes: ``B`` blocks of tokens, ``C`` chunks of tokens, ``S`` segments, ``Z`` slots. The tables are built once per
forward pass and device; the kernels of every layer read the same memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from alto.kernels.dropout import DropoutKey, kept_factor, stream_key, threshold

BLOCK_TOKENS = 64
"""Largest number of tokens per block. All kernels use the same number, so they share one table: 64 rows fill the matrix
unit of a Hopper or Blackwell GPU, and more would leave the blocks of short segments mostly empty."""

CHUNK_TOKENS = 4 * BLOCK_TOKENS
"""Largest number of tokens per chunk. One program of ``expand`` or ``dx`` processes the blocks of a chunk one after the
other. Larger chunks would leave multiprocessors idle when few slots train."""


def upload(values: Sequence[float] | Sequence[Sequence[float]], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return ``values`` as a tensor on ``device``, copied without host-device synchronisation."""
    return torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)


class ForwardTable:
    """The segments of one forward pass in device memory.

    Attributes:
        num_blocks: ``B``.
        num_chunks: ``C``.
        num_segments: ``S``.
        blocks_B6: One row per block, int32: its slot; its first token and end in the forward pass; the position of its
            first token in the job's batch; stream key and threshold of the segment's dropout, 32 bits each, where a
            threshold of 0 keeps everything. A block lies in one segment.
        chunks_C6: The same for every chunk.
        segments_S6: The same for every segment.
        factors_Z2: One row per slot, up to the largest slot of the forward pass, float64: ``lora_alpha / r``, and the
            factor of elements that dropout keeps. Zero for slots without tokens.
    """

    def __init__(
        self,
        segments: Sequence[tuple[int, int, int]],
        scales: Sequence[float],
        dropout: Sequence[DropoutKey | None],
        device: torch.device,
    ) -> None:
        blocks: list[tuple[int, ...]] = []
        chunks: list[tuple[int, ...]] = []
        whole = []
        factors_Z2 = [(0.0, 0.0)] * (1 + max((slot for slot, _, _ in segments), default=-1))
        for (slot, start, end), scale, key in zip(segments, scales, dropout, strict=True):
            bits = (_signed(stream_key(key)), _signed(threshold(key))) if key else (0, 0)
            place = key.first_token if key else 0
            whole.append((slot, start, end, place, *bits))
            for rows, most in ((blocks, BLOCK_TOKENS), (chunks, CHUNK_TOKENS)):
                for first in range(start, end, most):
                    rows.append((slot, first, min(first + most, end), place + first - start, *bits))
            factors_Z2[slot] = (scale, kept_factor(key) if key else 1.0)
        self.num_blocks = len(blocks)
        self.num_chunks = len(chunks)
        self.num_segments = len(segments)
        self.has_dropout = any(dropout)
        self.blocks_B6 = upload(blocks, torch.int32, device)
        self.chunks_C6 = upload(chunks, torch.int32, device)
        self.segments_S6 = upload(whole, torch.int32, device)
        self.factors_Z2 = upload(factors_Z2, torch.float64, device)
        self._segments = segments
        self._flags: dict[tuple[bool, ...], Tensor] = {}
        self._items: dict[tuple[int, int], Tensor] = {}

    def flags(self, of_segments: tuple[bool, ...]) -> Tensor:
        """Return one flag per segment, ``[S]`` int32, copied to the device once for all layers with the same flags."""
        if of_segments not in self._flags:
            self._flags[of_segments] = upload(of_segments, torch.int32, self.segments_S6.device)
        return self._flags[of_segments]

    def items(self, block_tokens: int, num_tiles: int) -> Tensor:
        """Return the work items of the programs of ``dy_kernel``, in the order in which they start, ``[I, 6]`` int32;
        cached for all layers.

        For every segment, first its blocks of ``block_tokens`` tokens, then ``num_tiles`` tiles of columns; 0 means
        none. A row holds the tile, or -1 for a block; the segment; the slot; first token and end; and a zero.
        """
        if (block_tokens, num_tiles) not in self._items:
            items = []
            for segment, (slot, start, end) in enumerate(self._segments):
                for first in range(start, end, block_tokens) if block_tokens else ():
                    items.append((-1, segment, slot, first, min(first + block_tokens, end), 0))
                items += [(tile, segment, slot, start, end, 0) for tile in range(num_tiles)]
            self._items[block_tokens, num_tiles] = upload(items, torch.int32, self.segments_S6.device)
        return self._items[block_tokens, num_tiles]


def _signed(bits: int) -> int:
    """Return the int32 that has these 32 bits."""
    return bits - (bits >> 31 << 32)
