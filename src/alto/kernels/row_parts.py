"""The parts of a bank's row that AdamW treats differently."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

__all__ = ["RowParts"]


class RowParts(NamedTuple):
    """Ends of the parts of an adapter's row; each part begins where the previous one ends, and may be empty.

    Attributes:
        a_end: End of ``A``: weight decay and the learning rate of ``A``.
        decayed_end: End of ``B`` and vectors with weight decay; the learning rate of ``B`` (LoRA+).
        vectors_end: End of vectors without weight decay; the learning rate of ``B``.
        end: End of all other tensors: weight decay and the learning rate of ``A``. Equals the number of parameters of
            the adapter.
    """

    a_end: int
    decayed_end: int
    vectors_end: int
    end: int

    def spans(self, rates: tuple[float, float], weight_decay: float) -> Iterator[tuple[int, int, float, float]]:
        """Yield start, end, learning rate and weight decay of as few runs of elements as possible.

        Args:
            rates: Learning rates of ``A`` and of ``B``.
            weight_decay: Weight decay of the parts that have it.
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
