"""The optimizers of a bank's rows: every row with its own settings, step count and clipping norm."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from alto.kernels import choose_backend, rounding_key, upload
from alto.lora.bank import AdapterBank
from alto.lora.eight_bit import EightBitAdamW
from alto.lora.gradient_norms import gradient_norms
from alto.lora.row_optimizer import RowOptimizer
from alto.lora.torch_optimizers import TORCH_OPTIMIZERS, TorchOptimizer
from alto.spec import JobConfig
from alto.spec.optimizers import OptimizerName

__all__ = ["OptimizerState", "SlotAdamW", "SlotUpdate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotUpdate:
    """Settings of one slot's next step, and its learning rate (of ``A``, with LoRA+).

    Attributes:
        slot: Local slot.
        config: Configuration of its job.
        learning_rate: Rate of this step.
    """

    slot: int
    config: JobConfig
    learning_rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerState:
    """The state of one adapter's optimizer, on the CPU.

    Attributes:
        step: Steps done.
        tensors: State of every matrix, by ``<module>.<A or B>.<part>``, and of every further tensor, by
            ``<name>.<part>``. The parts of ``adamw_torch`` are ``exp_avg`` and ``exp_avg_sq``, of the shape that the
            tensor has in :class:`alto.lora.weights.AdapterWeights`; those of others are bitsandbytes', torch's and
            transformers' own.
    """

    step: int
    tensors: Mapping[str, Tensor]


class SlotAdamW:
    """Clips and updates the given rows; other rows do not change by one bit.

    Rows of ``adamw_torch`` are updated together; every row of another optimizer has one of its own.

    Args:
        optims: Optimizers that the slots may use. With ``adamw_torch`` among them, its two moments are allocated for
            all slots.
        state_dtype: Of these moments. ``bfloat16`` is rounded at random
            (:mod:`alto.kernels.stochastic_rounding`); None is the dtype of the bank, rounded to the nearest, as
            torch's AdamW has them.

    Attributes:
        steps: Steps that every slot's adapter has taken.
        rounds_at_random: Whether the moments of ``adamw_torch`` are rounded at random.
    """

    def __init__(
        self, bank: AdapterBank, optims: Collection[OptimizerName], state_dtype: torch.dtype | None = None
    ) -> None:
        self._bank = bank
        self._optims = frozenset(optims)
        self._ops = choose_backend(device=bank.params_ZP.device)
        shape = bank.params_ZP.shape if "adamw_torch" in optims else (0, 0)
        self.exp_avg_ZP = bank.params_ZP.new_zeros(shape, dtype=state_dtype)
        self.exp_avg_sq_ZP = torch.zeros_like(self.exp_avg_ZP)
        self.rounds_at_random = state_dtype == torch.bfloat16
        self.steps = [0] * bank.num_slots
        self._own: dict[int, RowOptimizer] = {}
        self._left_paged: list[EightBitAdamW] = []

    def gradient_norms(self, slots: Sequence[int]) -> Tensor:
        """Norm ``[len(slots)]`` of every named slot's gradient in the bank."""
        return gradient_norms(self._ops, self._bank, slots)

    def step(self, updates: Sequence[SlotUpdate], norms: Tensor) -> None:
        """One step of every given slot on the gradients in the bank, which are of no use afterwards.

        Clipping is ``torch.nn.utils.clip_grad_norm_`` over one adapter; ``max_grad_norm`` of None or 0 turns it off.
        Where there is no memory for it, every slot has either taken its step, which :attr:`steps` counts, or is
        unchanged, including its gradient: these slots can be tried again.

        Args:
            norms: Result of :meth:`gradient_norms` for these slots.
        """
        limits = upload([update.config.max_grad_norm or float("inf") for update in updates], norms.dtype, norms.device)
        grad_scales = (limits / (norms + 1e-6)).clamp(max=1.0)
        for update in updates:
            assert (update.slot in self._own) == (update.config.optim != "adamw_torch")
        together = [index for index, update in enumerate(updates) if update.slot not in self._own]
        if len(together) == len(updates):
            self._step_together(updates, grad_scales)
        else:
            # A list as an index would be copied from memory that is not pinned, which synchronises host and device.
            scales = grad_scales.index_select(0, upload(together, torch.int64, grad_scales.device))
            self._step_together([updates[index] for index in together], scales)
            for index, update in enumerate(updates):
                if update.slot in self._own:
                    self._step_own(update, grad_scales[index])

    def reset(self, slot: int, optim: OptimizerName) -> None:
        """Start ``optim`` in ``slot``, which the bank has assigned to an adapter; clear its earlier state."""
        assert optim in self._optims
        self.steps[slot] = 0
        for rows_ZP in (self.exp_avg_ZP, self.exp_avg_sq_ZP):
            rows_ZP[slot : slot + 1].zero_()
        left = self._own.pop(slot, None)
        if isinstance(left, EightBitAdamW) and left.is_paged:
            self._left_paged.append(left)
        if optim in TORCH_OPTIMIZERS:
            self._own[slot] = TorchOptimizer(optim, undecayed=self._undecayed(slot))
        elif optim != "adamw_torch":
            self._own[slot] = self._new_eight_bit(slot, paged=optim == "paged_adamw_8bit")

    def read(self, slot: int) -> OptimizerState:
        """A copy of ``slot``'s state."""
        if slot in self._own:
            return OptimizerState(step=self.steps[slot], tensors=self._own[slot].read())
        tensors = {
            name: part.to("cpu", copy=True, memory_format=torch.contiguous_format)
            for name, part in self._moments(slot).items()
        }
        return OptimizerState(step=self.steps[slot], tensors=tensors)

    def write(self, slot: int, optim: OptimizerName, state: OptimizerState) -> None:
        """Restore ``optim`` from ``state`` in ``slot``, which the bank has assigned to an adapter of the same shape."""
        self.reset(slot, optim)
        self.steps[slot] = state.step
        if slot in self._own:
            self._own[slot].write(state.step, state.tensors)
        else:
            for name, part in self._moments(slot).items():
                part.copy_(state.tensors[name])

    def _step_together(self, updates: Sequence[SlotUpdate], grad_scales: Tensor) -> None:
        if not updates:
            return
        slots = [update.slot for update in updates]
        places = [self._bank.places(slot) for slot in slots]
        self._ops.bank_adamw(
            self._bank.params_ZP,
            self._bank.grads_ZP,
            self.exp_avg_ZP,
            self.exp_avg_sq_ZP,
            self._bank.working_ZP,
            slots,
            parts=[place.parts for place in places],
            steps=[self.steps[slot] + 1 for slot in slots],
            learning_rates=[
                (update.learning_rate, update.learning_rate * update.config.loraplus_lr_ratio) for update in updates
            ],
            betas=[(update.config.adam_beta1, update.config.adam_beta2) for update in updates],
            epsilons=[update.config.adam_epsilon for update in updates],
            weight_decays=[update.config.weight_decay for update in updates],
            grad_scales=grad_scales,
            clears=[self._bank.is_cleared(slot) for slot in slots],
            rounding_keys=[rounding_key(update.config.seed, self.steps[update.slot] + 1) for update in updates]
            if self.rounds_at_random
            else None,
        )
        self._bank.end_gradients(slots)
        for slot in slots:
            self.steps[slot] += 1

    def _step_own(self, update: SlotUpdate, grad_scale: Tensor) -> None:
        bank, slot = self._bank, update.slot
        self._own[slot].step(
            _as_in_peft(bank, bank.params_ZP, slot),
            _as_in_peft(bank, bank.grads_ZP, slot),
            grad_scale=grad_scale,
            config=update.config,
            learning_rate=update.learning_rate,
        )
        bank.copy_weights(slot)
        if bank.is_cleared(slot):
            bank.grads_ZP[slot, : bank.places(slot).end].zero_()
        bank.end_gradients([slot])
        self.steps[slot] += 1

    def _new_eight_bit(self, slot: int, *, paged: bool) -> EightBitAdamW:
        """An optimizer that has taken no step.

        bitsandbytes never releases paged memory, so jobs reuse the optimizers of ended jobs with their shape.
        """
        matrices = _as_in_peft(self._bank, self._bank.params_ZP, slot)
        if paged:
            for index, left in enumerate(self._left_paged):
                if left.fits(matrices):
                    left.reset()
                    return self._left_paged.pop(index)
        return EightBitAdamW(matrices, undecayed=self._undecayed(slot), paged=paged)

    def _undecayed(self, slot: int) -> list[str]:
        """Names of the tensors of ``slot`` without weight decay."""
        return [extra.name for extra, _ in self._bank.places(slot).extras if not extra.has_decay]

    def _moments(self, slot: int) -> dict[str, Tensor]:
        """Views of the state of ``adamw_torch``."""
        rows = {"exp_avg": self.exp_avg_ZP, "exp_avg_sq": self.exp_avg_sq_ZP}
        matrices = {
            f"{module.name}.{which}.{part}": matrix
            for part, rows_ZP in rows.items()
            for module, *pair in self._bank.matrices(rows_ZP, slot)
            for which, matrix in zip("AB", pair, strict=True)
        }
        return matrices | {
            f"{extra.name}.{part}": tensor
            for part, rows_ZP in rows.items()
            for extra, tensor in self._bank.extras(rows_ZP, slot)
        }


def _as_in_peft(bank: AdapterBank, rows_ZP: Tensor, slot: int) -> dict[str, Tensor]:
    """Views of ``slot``'s matrices in PEFT's orientation, by ``<module>.A`` (``[r, K]``) and ``<module>.B``
    (``[N, r]``), and of its further tensors by their names."""
    matrices = {
        f"{module.name}.{which}": matrix.T
        for module, *pair in bank.matrices(rows_ZP, slot)
        for which, matrix in zip("AB", pair, strict=True)
    }
    return matrices | {extra.name: tensor for extra, tensor in bank.extras(rows_ZP, slot)}
