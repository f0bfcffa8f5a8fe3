"""Token embeddings with an adapter per slot (``target_modules: [embed_tokens]``), or with a separate table per job
(``modules_to_save``)."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from alto.errors import UnsupportedModelError
from alto.kernels import LoraOperands, slot_embedding_change, slot_embeddings
from alto.lora.adapted_weight import AdaptedWeight
from alto.lora.bank import AdapterBank
from alto.lora.injected import InjectedModule
from alto.lora.linear import ForwardContext
from alto.lora.whole_modules import whole_name

__all__ = ["MultiLoraEmbedding"]


class MultiLoraEmbedding(InjectedModule):
    """Frozen embeddings with one adapter per slot. Outside of a schedule they act as the base embeddings.

    Args:
        name: Full name in the model.
        bank: Adapters of all slots, and the tables that jobs train in full.
        operands: Adapters of the embeddings; None if no job has one.
        ops: The kernel backend module.
    """

    def __init__(
        self,
        base: nn.Embedding,
        name: str,
        bank: AdapterBank,
        operands: LoraOperands | None,
        context: ForwardContext,
        ops: ModuleType,
    ) -> None:
        super().__init__()
        self.base = base
        self._name = name
        self._bank = bank
        self._operands = operands
        self._tables = bank.tensors(whole_name(name))  # tables trained in full; None if no job trains one
        self._context = context
        self._ops = ops
        # Some models, such as Gemma 3, scale embeddings in their own class.
        self._factor = float(getattr(base, "embed_scale", 1.0))

    def __getattr__(self, name: str) -> Any:
        """Return attributes of the base, because models read settings of their embeddings."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("base"), name)

    @property
    def weight(self) -> Tensor:
        """The frozen weight. Under a schedule it cannot be used in computations."""
        weight: Tensor = self.base.weight
        return AdaptedWeight.of(weight, self._name) if self._context.schedule is not None else weight

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # writes to the bank, which is outside of graphs
    def forward(self, input_ids: Tensor) -> Tensor:
        y: Tensor = self.base(input_ids)
        schedule = self._context.schedule
        if schedule is None or not any(self._is_trained(slot) for slot in schedule.slots):
            return y
        places, ids_T1 = self._context.places(), input_ids.reshape(-1, 1)
        num_positions = places.num_positions if places is not None else schedule.num_tokens
        if len(ids_T1) != num_positions:
            raise UnsupportedModelError(
                f"target_modules, modules_to_save: expected a model that looks up all {num_positions} tokens of a "
                f"forward pass at once, found {len(ids_T1)} in {self._name}; leave the embeddings out"
            )
        if places is not None:
            ids_T1 = places.collect(ids_T1)
        ids_T, settings = ids_T1[:, 0], {"factor": self._factor, "padding_idx": self.base.padding_idx}
        if self._tables is not None and self._tables.is_in(schedule):
            y_PH = y.reshape(-1, y.shape[-1])
            y_TH = y_PH if places is None else places.collect(y_PH)
            own_TH = slot_embeddings(self._bank.anchor, y_TH, ids_T, self._tables, schedule, **settings)
            if places is None:
                y = own_TH.view(y.shape)
            else:  # padding keeps the base embeddings
                is_token_P1 = places.spread(torch.ones_like(y_TH[:, :1])) > 0
                y = torch.where(is_token_P1, places.spread(own_TH), y_PH).view(y.shape)
        if self._operands is None:
            return y
        change = slot_embedding_change(self._bank.anchor, ids_T, self._operands, schedule, self._ops, **settings)
        if places is not None:
            change = places.spread(change)
        return (y + change.view(y.shape)).to(y.dtype)

    def _is_trained(self, slot: int) -> bool:
        has_matrices = self._operands is not None and slot in self._operands.slots
        return has_matrices or (self._tables is not None and slot in self._tables)
