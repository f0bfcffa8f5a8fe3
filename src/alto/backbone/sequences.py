"""Where the sequences of one pass lie, as attention asks for it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

__all__ = ["Sequences"]


class Sequences:
    """Sequences laid end to end; made once per pass and read by every layer.

    Attributes:
        lengths: Tokens of each sequence.
        longest: The largest of them.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = list(lengths)
        self.longest = max(self.lengths)
        self._offsets: dict[torch.device, Tensor] = {}

    def offsets(self, device: torch.device) -> Tensor:
        """First token of each sequence and the end of the last, int32 on ``device``.

        Sent when the first layer asks, from pinned memory, so that the host never waits for the device.
        """
        if device not in self._offsets:
            offsets = torch.tensor([0, *accumulate(self.lengths)], dtype=torch.int32, pin_memory=device.type == "cuda")
            self._offsets[device] = offsets.to(device, non_blocking=True)
        return self._offsets[device]
