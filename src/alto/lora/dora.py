"""DoRA (``use_dora``) for linear layers that read the same input: each row of an adapted weight has a trained
magnitude.

Shapes as in :mod:`alto.kernels.dora`.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from alto.kernels import (
    FrozenMatrix,
    LoraOperands,
    SlotTensors,
    TokenSchedule,
    adapted_norms,
    dropped_inputs,
    frozen_product,
    grouped_lora_linear,
    scaled_by_magnitude,
)
from alto.lora.bank import AdapterBank


class Dora:
    """The magnitudes of linear layers that read the same input.

    Args:
        magnitudes: For each layer, the magnitude vectors of the slots and the row norms of its frozen weight; None if
            no job has magnitudes there.
    """

    def __init__(
        self,
        bases: Sequence[FrozenMatrix],
        bank: AdapterBank,
        operands: LoraOperands,
        magnitudes: Sequence[tuple[SlotTensors, Tensor] | None],
    ) -> None:
        self._bases = tuple(bases)
        self._bank = bank
        self._operands = operands
        self._magnitudes = tuple(magnitudes)

    @property
    def has_magnitudes(self) -> bool:
        """Whether a job may have magnitudes."""
        return any(magnitudes is not None for magnitudes in self._magnitudes)

    def outputs(self, x_TK: Tensor, schedule: TokenSchedule) -> tuple[Tensor, ...]:
        """Return the output ``[T, N]`` of every layer, including its frozen bias.

        With dropout, the scaled weight sees the dropped input, and the frozen product of the dropped part is added
        unscaled (PEFT 0.21, ``DoraLinearVariant.forward``).
        """
        vectors = [magnitudes[0] for magnitudes in self._magnitudes if magnitudes is not None]
        slots = frozenset(slot for slot in schedule.slots if any(slot in vector for vector in vectors))
        if not slots:
            return self._plain(x_TK, schedule)
        is_dropped = any(
            key is not None and slot in slots for slot, key in zip(schedule.slots, schedule.dropout, strict=True)
        )
        if not is_dropped:
            return self._scaled(self._plain(x_TK, schedule), schedule)
        kept_TK = dropped_inputs(x_TK, schedule, slots, self._operands.number)
        ys = self._scaled(self._plain(kept_TK, schedule.without_dropout(slots)), schedule)
        left_out_TK = x_TK - kept_TK
        return tuple(y_TN + frozen_product(left_out_TK, base) for y_TN, base in zip(ys, self._bases, strict=True))

    def _plain(self, x_TK: Tensor, schedule: TokenSchedule) -> tuple[Tensor, ...]:
        return grouped_lora_linear(x_TK, self._bank.anchor, self._bases, self._operands, schedule, self._bank.ops)

    def _scaled(self, ys: Sequence[Tensor], schedule: TokenSchedule) -> tuple[Tensor, ...]:
        return tuple(self._scaled_member(member, y_TN, schedule) for member, y_TN in enumerate(ys))

    def _scaled_member(self, member: int, y_TN: Tensor, schedule: TokenSchedule) -> Tensor:
        magnitudes, base = self._magnitudes[member], self._bases[member]
        if magnitudes is None or not magnitudes[0].is_in(schedule):
            return y_TN
        vectors, base_norms_N = magnitudes
        scale_of = {
            slot: scale * self._operands.scale_ratio(slot, member)
            for slot, scale in zip(schedule.slots, schedule.scales, strict=True)
            if slot in vectors
        }
        norms_ZN = adapted_norms(self._operands, member, base.weight, base_norms_N, scale_of)
        return scaled_by_magnitude(y_TN, base.bias, vectors, norms_ZN, schedule)
