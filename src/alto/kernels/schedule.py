"""The schedule of a forward pass: which tokens belong to which slot.

It is built on the host once per forward and backward pass; every layer reads the same object.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from alto.errors import ShapeError
from alto.kernels.dropout import DropoutKey, send
from alto.kernels.forward_table import ForwardTable, upload

T = TypeVar("T")


class HeadTokens(Protocol):
    """The trained tokens of a forward pass, job after job; see :class:`alto.data.TokenBatch`."""

    @property
    def slots(self) -> Sequence[int]: ...

    @property
    def job_tokens(self) -> Sequence[int]: ...

    @property
    def job_targets(self) -> Sequence[int]: ...

    @property
    def loss_positions_S(self) -> Tensor: ...  # noqa: N802  # a shape


class Segment(NamedTuple):
    """The contiguous token range ``[start, end)`` of one slot."""

    slot: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSchedule:
    """The token ranges of all slots of a forward pass.

    Attributes:
        num_tokens: ``T``, tokens of all slots.
        segments: One segment per slot with tokens, in token order, covering ``[0, T)`` without gaps.
        scales: ``lora_alpha / r`` of every segment.
        dropout: Key of every segment's dropout mask; None if a segment has no dropout.
    """

    num_tokens: int
    segments: tuple[Segment, ...]
    scales: tuple[float, ...]
    dropout: tuple[DropoutKey | None, ...]
    slots: tuple[int, ...] = field(init=False, repr=False, compare=False)
    lengths: tuple[int, ...] = field(init=False, repr=False, compare=False)
    _tables: dict[torch.device, ForwardTable] = field(default_factory=dict, init=False, repr=False, compare=False)
    _copies: dict[tuple[str, torch.device], Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    _undropped: dict[frozenset[int], TokenSchedule] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Computed once, because every launch reads them.
        object.__setattr__(self, "slots", tuple(segment.slot for segment in self.segments))
        object.__setattr__(self, "lengths", tuple(segment.end - segment.start for segment in self.segments))

    def table(self, device: torch.device) -> ForwardTable:
        """Return the segments in the memory of ``device``, copied there at the first use."""
        if device not in self._tables:  # apart from other copies, because every kernel launch reads it
            self._tables[device] = ForwardTable(self.segments, self.scales, self.dropout, device)
        return self._tables[device]

    def slots_of_tokens(self, device: torch.device) -> Tensor:
        """Return the slot of every token, ``[T]`` int64, in the memory of ``device``, copied there at the first use."""

        def of_tokens() -> Tensor:
            return send(torch.tensor(self.slots).repeat_interleave(torch.tensor(self.lengths)), device)

        return self._copy("slots_of_tokens", device, of_tokens)

    def slots_of_segments(self, device: torch.device) -> Tensor:
        """Return the slot of every segment, ``[S]`` int64, in the memory of ``device``, copied there at the first
        use."""
        return self._copy("slots_of_segments", device, lambda: upload(self.slots, torch.int64, device))

    def lengths_of_segments(self, device: torch.device) -> Tensor:
        """Return the number of tokens of every segment, ``[S]`` int64, in the memory of ``device``, copied there at the
        first use."""
        return self._copy("lengths_of_segments", device, lambda: upload(self.lengths, torch.int64, device))

    def copy_as(self, other: TokenSchedule) -> None:
        """Copy to every device now everything that ``other`` has copied there."""
        for device in other._tables:
            self.table(device)
        for method, device in other._copies:
            getattr(self, method)(device)

    def _copy(self, method: str, device: torch.device, make: Callable[[], T]) -> T:
        if (method, device) not in self._copies:
            self._copies[method, device] = make()
        found: T = self._copies[method, device]
        return found

    def without_dropout(self, slots: frozenset[int]) -> TokenSchedule:
        """Return a schedule of the same tokens without dropout for ``slots``; cached, because every layer reads it."""
        if slots not in self._undropped:
            keys = (None if slot in slots else key for slot, key in zip(self.slots, self.dropout, strict=True))
            self._undropped[slots] = replace(self, dropout=tuple(keys))
        return self._undropped[slots]

    @classmethod
    def build(
        cls,
        slots: Sequence[int],
        num_tokens: Sequence[int],
        scales: Sequence[float],
        dropout: Sequence[DropoutKey | None] | None = None,
    ) -> TokenSchedule:
        """Build a schedule in which the tokens of each slot are contiguous, in the order of ``slots``.

        Slots with zero tokens are omitted.

        Args:
            dropout: Key of each slot's mask; None for no dropout.

        Raises:
            ShapeError: ``slots``, ``num_tokens``, ``scales`` and ``dropout`` do not have the same length, or a slot
                appears twice.
        """
        dropout = dropout if dropout is not None else [None] * len(slots)
        if not len(slots) == len(num_tokens) == len(scales) == len(dropout):
            raise ShapeError(
                f"expected one token count, scale and dropout key for each of {len(slots)} slots, "
                f"found {len(num_tokens)}, {len(scales)} and {len(dropout)}"
            )
        if len(set(slots)) != len(slots):
            raise ShapeError(f"expected every slot at most once in a forward pass, found {list(slots)}")
        segments, kept_scales, kept_dropout, start = [], [], [], 0
        for slot, count, scale, key in zip(slots, num_tokens, scales, dropout, strict=True):
            if count == 0:
                continue
            segments.append(Segment(slot, start, start + count))
            kept_scales.append(scale)
            kept_dropout.append(key if key is not None and key.probability > 0.0 else None)
            start += count
        return cls(num_tokens=start, segments=tuple(segments), scales=tuple(kept_scales), dropout=tuple(kept_dropout))
