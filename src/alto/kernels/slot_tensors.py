"""Access to one extra tensor of every slot, such as a bias, in the rows of a bank.

Shapes: ``Z`` slots, ``P`` elements of a row, ``S`` segments of a token schedule, ``n`` elements of the tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from alto.kernels.forward_table import upload
from alto.kernels.schedule import TokenSchedule


@dataclass(kw_only=True, eq=False)
class SlotTensors:
    """The view that a layer has of one extra tensor of all adapters; a slot may be without it.

    The bank updates the view when a slot is assigned or freed.

    Attributes:
        params_ZP, grads_ZP: The bank, contiguous.
    """

    params_ZP: Tensor
    grads_ZP: Tensor
    shape: Sequence[int]
    _starts: dict[int, int] = field(default_factory=dict, init=False)
    _starts_Z: Tensor | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        assert self.params_ZP.is_contiguous()
        assert self.grads_ZP.is_contiguous()
        self.shape = tuple(self.shape)

    @property
    def num_numbers(self) -> int:
        """``n``."""
        return math.prod(self.shape)

    def of_slot(self, slot: int) -> tuple[Tensor, Tensor]:
        """Return views of the tensor of ``slot`` and of its gradient. The slot must have the tensor."""
        part = slice(self._starts[slot], self._starts[slot] + self.num_numbers)
        return self.params_ZP[slot, part].view(self.shape), self.grads_ZP[slot, part].view(self.shape)

    def assign(self, slot: int, start: int) -> None:
        """Set the offset of the tensor in the row of ``slot``."""
        self._starts[slot], self._starts_Z = start, None

    def clear(self, slot: int) -> None:
        """Mark ``slot`` as free, or as a slot without the tensor."""
        self._starts.pop(slot, None)
        self._starts_Z = None

    def is_in(self, schedule: TokenSchedule) -> bool:
        """Return whether any slot with tokens has the tensor."""
        return any(slot in self._starts for slot in schedule.slots)

    def __contains__(self, slot: int) -> bool:
        """Return whether ``slot`` has the tensor."""
        return slot in self._starts

    def has_tensor(self, slots: Tensor) -> Tensor:
        """Return whether each of ``slots``, int64, has the tensor, as bool of the same shape."""
        return self._starts_of_slots()[slots] >= 0

    def gather(self, fallback: Tensor) -> Tensor:
        """Return the tensor of every slot, ``[Z, *shape]``, in a fixed number of launches and in the wider of the two
        dtypes.

        Args:
            fallback: Value for slots without the tensor, ``[*shape]`` or a scalar.
        """
        values_Zn = self.params_ZP.view(-1)[self._indices()].view(-1, *self.shape)
        has_it_Z = (self._starts_of_slots() >= 0).view(-1, *(1 for _ in self.shape))
        return torch.where(has_it_Z, values_Zn, fallback)

    def accumulate(self, gradients: Tensor, schedule: TokenSchedule) -> None:
        """Add the gradient of every segment, ``[S, *shape]``, to that of its slot, if the slot has the tensor.

        No element of the bank is added to twice, so the result does not depend on the order of the additions.
        """
        slots_S = schedule.slots_of_segments(self.params_ZP.device)
        starts_S1 = self._starts_of_slots()[slots_S, None]
        added_Sn = torch.where(starts_S1 >= 0, gradients.reshape(len(slots_S), -1).to(self.grads_ZP.dtype), 0.0)
        self.grads_ZP.view(-1).index_add_(0, self._indices()[slots_S].flatten(), added_Sn.flatten())

    def _indices(self) -> Tensor:
        """Return the index of every element in the whole bank, ``[Z, n]``; slots without the tensor get indices of
        other elements in their row."""
        starts_Z = self._starts_of_slots()
        rows_Z = torch.arange(len(starts_Z), device=starts_Z.device) * self.params_ZP.shape[1]
        return (rows_Z + starts_Z.clamp(min=0))[:, None] + torch.arange(self.num_numbers, device=starts_Z.device)

    def _starts_of_slots(self) -> Tensor:
        """Return the tensor's offset in every slot's row, ``[Z]`` int64; -1 for slots without the tensor."""
        if self._starts_Z is None:
            starts = [self._starts.get(slot, -1) for slot in range(self.params_ZP.shape[0])]
            self._starts_Z = upload(starts, torch.int64, self.params_ZP.device)
        return self._starts_Z


# A bias per slot, added to the slot's own tokens.
#
# One PyTorch implementation serves all backends, because it moves each element once, in a number of launches that does
# not depend on the jobs. A slot's results are bit-identical for any set of other slots.
#
# Shapes: ``T`` tokens, ``S`` segments, ``Z`` slots, ``N`` features.


class _SlotBiasChange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, biases: SlotTensors, base_N: Tensor, schedule: TokenSchedule, dtype: torch.dtype
    ) -> Tensor:
        ctx.biases, ctx.schedule = biases, schedule
        change_ZN = biases.gather(base_N).to(dtype) - base_N.to(dtype)
        return change_ZN.index_select(0, schedule.slots_of_tokens(base_N.device))

    @staticmethod
    def backward(ctx: Any, gradient_TN: Tensor) -> tuple[None, None, None, None, None]:
        ctx.biases.accumulate(segment_sums(gradient_TN, ctx.schedule), ctx.schedule)
        return None, None, None, None, None


def slot_bias_change(
    anchor: Tensor, biases: SlotTensors, base_N: Tensor, schedule: TokenSchedule, dtype: torch.dtype
) -> Tensor:
    """Return the difference between every token's own bias and the frozen one, ``[T, N]``; zero if a slot has no own
    bias.

    The backward pass adds the gradient of each bias, summed over the tokens of its slot, to the bank.

    Args:
        anchor: A tensor that requires grad, so that autograd runs the backward pass.
        biases: The slots' biases, each ``[N]``.
        dtype: Dtype of the output that the result is added to. Biases are rounded to it first, as PEFT does when it
            loads them.
    """
    change_TN: Tensor = _SlotBiasChange.apply(anchor, biases, base_N, schedule, dtype)
    return change_TN


def segment_sums(values_TN: Tensor, schedule: TokenSchedule) -> Tensor:
    """Return the sum of every segment's rows, ``[S, N]``, at least float32, in one launch for all segments.

    Each segment is summed token by token, so the same inputs give the same bits.
    """
    values_TN = values_TN.to(torch.promote_types(values_TN.dtype, torch.float32)).contiguous()
    lengths_S = schedule.lengths_of_segments(values_TN.device)
    # unsafe=True skips the check of the lengths, which are valid; it would synchronise host and device.
    return torch.segment_reduce(values_TN, "sum", lengths=lengths_S, axis=0, unsafe=True)
