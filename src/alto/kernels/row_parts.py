"""The parts of a bank's row that AdamW treats each in one way."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

__all__ = ["RowParts"]


class RowParts(NamedTuple):
    """Where the parts of an adapter's row end; each begins where the one before it ends, and may be empty.

    Attributes:
        a_end: ``A``: weight decay.
        decayed_end: ``B`` and vectors with weight decay; the rate of ``B`` (LoRA+).
        vectors_end: Vectors without weight decay; the rate of ``B``.
        end: Other tensors; weight decay and the rate of ``A``. The number of parameters of the adapter.
    """

    a_end: int
    decayed_end: int
    vectors_end: int
    end: int

    def spans(self, rates: tuple[float, float], weight_decay: float) -> Iterator[tuple[int, int, float, float]]:
        """Start, end, rate and weight decay of runs of numbers, as few as there can be.

        Args:
            rates: Of ``A`` and of ``B``.
            weight_decay: Of what has weight decay.
        """
        rate_of_a, rate_of_b = rates
        first, settings = 0, (rate_of_a, weight_decay)
        parts = ((rate_of_a, weight_decay), (rate_of_b, weight_decay), (rate_of_b, 0.0), (rate_of_a, weight_decay))
        start = 0
        for end, of_part in zip(self, parts, strict=True):
            if end > start and of_part != settings:
                if start > first:
                    yield first, start, *settings
                first, settings = start, of_part
            start = end
        if start > first:
            yield first, start, *settings
