"""AdamW over the whole bank: every row with its own settings, step count and clipping norm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from alto.kernels import choose_backend
from alto.lora.bank import AdapterBank, AdapterWeights
from alto.spec import JobConfig

__all__ = ["OptimizerState", "SlotAdamW", "SlotUpdate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotUpdate:
    """What one slot's next step needs: its settings and the learning rate of this step (of ``A``, with LoRA+)."""

    slot: int
    config: JobConfig
    learning_rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerState:
    """One adapter's AdamW state, shaped as the adapter itself."""

    step: int
    exp_avg: AdapterWeights
    exp_avg_sq: AdapterWeights


class SlotAdamW:
    """Clips and updates the rows it is told to; a row that is not named does not change by one bit."""

    def __init__(self, bank: AdapterBank) -> None:
        self._bank = bank
        self._b_spans = bank.layout.b_spans()
        self._ops = choose_backend()
        self.exp_avg_ZP = torch.zeros_like(bank.params_ZP)
        self.exp_avg_sq_ZP = torch.zeros_like(bank.params_ZP)
        self.steps = [0] * bank.num_slots

    def step(self, updates: Sequence[SlotUpdate]) -> Tensor:
        """One step of every named slot on the gradients in the bank.

        Clipping is ``torch.nn.utils.clip_grad_norm_`` over one adapter; ``max_grad_norm`` of None or 0 turns it off.

        Returns:
            Gradient norms before clipping, ``[len(updates)]``.
        """
        slots = [update.slot for update in updates]
        norms = torch.stack([torch.linalg.vector_norm(self._bank.grads_ZP[slot]) for slot in slots])
        limits = norms.new_tensor([update.config.max_grad_norm or float("inf") for update in updates])
        for slot in slots:
            self.steps[slot] += 1
        self._ops.bank_adamw(
            self._bank.params_ZP,
            self._bank.grads_ZP,
            self.exp_avg_ZP,
            self.exp_avg_sq_ZP,
            slots,
            steps=[self.steps[slot] for slot in slots],
            learning_rates=[
                (update.learning_rate, update.learning_rate * update.config.loraplus_lr_ratio) for update in updates
            ],
            b_spans=self._b_spans,
            betas=[(update.config.adam_beta1, update.config.adam_beta2) for update in updates],
            epsilons=[update.config.adam_epsilon for update in updates],
            weight_decays=[update.config.weight_decay for update in updates],
            grad_scales=(limits / (norms + 1e-6)).clamp(max=1.0),
        )
        return norms

    def reset(self, slot: int) -> None:
        """Forget everything about ``slot``."""
        self.steps[slot] = 0
        self.exp_avg_ZP[slot].zero_()
        self.exp_avg_sq_ZP[slot].zero_()

    def read(self, slot: int) -> OptimizerState:
        """A copy of ``slot``'s state on the CPU."""
        return OptimizerState(
            step=self.steps[slot],
            exp_avg=_read(self._bank, self.exp_avg_ZP, slot),
            exp_avg_sq=_read(self._bank, self.exp_avg_sq_ZP, slot),
        )

    def write(self, slot: int, state: OptimizerState) -> None:
        """Put ``state`` into ``slot``, which the bank has given to an adapter of the same shape."""
        self.reset(slot)
        self.steps[slot] = state.step
        for rows_ZP, weights in ((self.exp_avg_ZP, state.exp_avg), (self.exp_avg_sq_ZP, state.exp_avg_sq)):
            for module, a, b in self._bank.matrices(rows_ZP, slot):
                a.copy_(weights[module.name][0])
                b.copy_(weights[module.name][1])


def _read(bank: AdapterBank, rows_ZP: Tensor, slot: int) -> AdapterWeights:
    return {module.name: (a.cpu().clone(), b.cpu().clone()) for module, a, b in bank.matrices(rows_ZP, slot)}
