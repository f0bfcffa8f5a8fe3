"""The adapter bank: every resident adapter of an executor in one flat tensor, a row per slot.

Shapes: ``Z`` slots, ``P`` parameters of a slot, ``R`` largest rank, ``K`` in-features, ``N`` out-features.
A slot of smaller rank uses the first columns of ``A`` and the first rows of ``B``; the rest is zero and stays zero.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from alto.kernels import LoraOperands
from alto.lora.layout import BankLayout, TargetModule
from alto.spec.job_config import InitLoraWeights

__all__ = ["AdapterBank", "AdapterShape", "AdapterWeights"]

AdapterWeights = dict[str, tuple[Tensor, Tensor]]
"""One adapter by module name: ``A`` as ``[K, r]`` and ``B`` as ``[r, N]``, without padding, on the CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterShape:
    """Rank and targets of one adapter."""

    rank: int
    targets: tuple[TargetModule, ...]

    @property
    def num_parameters(self) -> int:
        return sum(self.rank * (module.in_features + module.out_features) for module in self.targets)


class AdapterBank:
    """Weights and gradients of all slots.

    Attributes:
        layout: Where each module lies in a row.
        params_ZP: Adapter weights.
        grads_ZP: Their gradients; written by the backward pass, zeroed by :meth:`zero_grads`.
        anchor: A scalar that requires grad; see :func:`alto.kernels.grouped_lora_linear`.
    """

    def __init__(
        self,
        layout: BankLayout,
        num_slots: int,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.layout = layout
        self.num_slots = num_slots
        self.params_ZP = torch.zeros(num_slots, layout.row_size, device=device, dtype=dtype)
        self.grads_ZP = torch.zeros_like(self.params_ZP)
        self.anchor = torch.zeros((), device=device, requires_grad=True)
        self._shapes: list[AdapterShape | None] = [None] * num_slots
        self._ranks_MZ = [[0] * num_slots for _ in layout.modules]
        self._views = [
            (self._a_view(self.params_ZP, index), self._b_view(self.params_ZP, index))
            for index in range(len(layout.modules))
        ]

    def operands(self, module_index: int, number: int) -> LoraOperands:
        """Module ``module_index``'s view of the bank; stays valid as jobs come and go.

        Args:
            number: The module's number among all linear modules of the model.
        """
        a_ZKR, b_ZRN = self._views[module_index]
        return LoraOperands(
            module=number,
            a_ZKR=a_ZKR,
            b_ZRN=b_ZRN,
            da_ZKR=self._a_view(self.grads_ZP, module_index),
            db_ZRN=self._b_view(self.grads_ZP, module_index),
            ranks=self._ranks_MZ[module_index],
        )

    def occupy(self, slot: int, shape: AdapterShape) -> None:
        """Give ``slot`` to an adapter of ``shape``; its weights and gradients start as zeros."""
        assert shape.rank <= self.layout.max_rank
        names = {module.name for module in shape.targets}
        assert names <= {module.name for module in self.layout.modules}
        self.params_ZP[slot].zero_()
        self.grads_ZP[slot].zero_()
        self._shapes[slot] = shape
        for index, module in enumerate(self.layout.modules):
            self._ranks_MZ[index][slot] = shape.rank if module.name in names else 0

    def release(self, slot: int) -> None:
        """Take ``slot`` back."""
        self._shapes[slot] = None
        for ranks in self._ranks_MZ:
            ranks[slot] = 0

    def zero_grads(self, slots: list[int]) -> None:
        """Forget the gradients of ``slots``."""
        for slot in slots:
            self.grads_ZP[slot].zero_()

    def initialise(self, slot: int, seed: int, init: InitLoraWeights = "default") -> None:
        """Fill ``slot`` as PEFT does: ``B`` zero, ``A`` Kaiming-uniform (a = √5), or normal with deviation ``1 / r``
        where ``init`` is ``gaussian``.

        The draw depends on the seed and the adapter's own shape, not on the slot.
        """
        generator = torch.Generator().manual_seed(seed)
        for module, a, b in self.matrices(self.params_ZP, slot):
            drawn = torch.empty(a.shape)
            if init == "gaussian":
                drawn.normal_(std=1.0 / a.shape[1], generator=generator)
            else:
                bound = 1.0 / math.sqrt(module.in_features)
                drawn.uniform_(-bound, bound, generator=generator)
            a.copy_(drawn)
            b.zero_()

    def read(self, slot: int) -> AdapterWeights:
        """A copy of the adapter in ``slot``."""
        return {module.name: (_copy(a), _copy(b)) for module, a, b in self.matrices(self.params_ZP, slot)}

    def write(self, slot: int, weights: AdapterWeights) -> None:
        """Put ``weights`` into ``slot``, which must be occupied by an adapter of the same shape."""
        for module, a, b in self.matrices(self.params_ZP, slot):
            a.copy_(weights[module.name][0])
            b.copy_(weights[module.name][1])

    def matrices(self, rows_ZP: Tensor, slot: int) -> Iterator[tuple[TargetModule, Tensor, Tensor]]:
        """Views of ``slot``'s own ``A`` (``[K, r]``) and ``B`` (``[r, N]``) in any tensor laid out as the bank."""
        shape = self._shapes[slot]
        assert shape is not None, f"slot {slot} is empty"
        for index, module in enumerate(self.layout.modules):
            rank = self._ranks_MZ[index][slot]
            if rank:
                yield module, self._a_view(rows_ZP, index)[slot, :, :rank], self._b_view(rows_ZP, index)[slot, :rank]

    def _a_view(self, rows_ZP: Tensor, index: int) -> Tensor:
        module, start, rank = self.layout.modules[index], self.layout.offsets()[index][0], self.layout.max_rank
        flat = rows_ZP[:, start : start + module.in_features * rank]
        return flat.unflatten(1, (module.in_features, rank))

    def _b_view(self, rows_ZP: Tensor, index: int) -> Tensor:
        module, start, rank = self.layout.modules[index], self.layout.offsets()[index][1], self.layout.max_rank
        flat = rows_ZP[:, start : start + rank * module.out_features]
        return flat.unflatten(1, (rank, module.out_features))


def _copy(matrix: Tensor) -> Tensor:
    return matrix.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
