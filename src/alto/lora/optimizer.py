"""Optimizers for the rows of a bank; every row has its own settings, step count and clipping norm."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from alto.kernels import (
    DropoutKey,
    LoraOperands,
    RowParts,
    RowStep,
    TokenSchedule,
    rounding_key,
    upload,
)
from alto.lora.bank import AdapterBank
from alto.lora.row_optimizers import TORCH_OPTIMIZERS, EightBitAdamW, TorchOptimizer
from alto.spec import JobConfig, OptimizerName


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotUpdate:
    """Settings of the next optimizer step of one slot.

    Attributes:
        learning_rate: Learning rate of this step; with LoRA+, that of ``A``.
    """

    slot: int
    config: JobConfig
    learning_rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerState:
    """The state of one adapter's optimizer, on the CPU.

    Attributes:
        tensors: State of every matrix, by ``<module>.<A or B>.<part>``, and of every extra tensor, by
            ``<name>.<part>``. For ``adamw_torch`` the parts are ``exp_avg`` and ``exp_avg_sq``, shaped like the tensor
            in :class:`alto.lora.layout.AdapterWeights`; other optimizers use the parts of bitsandbytes, torch or
            transformers.
    """

    step: int
    tensors: Mapping[str, Tensor]


class BankOptimizer:
    """Gradient clipping and optimizer steps for chosen rows; other rows stay bit-identical.

    Rows that use ``adamw_torch`` are updated together; a row that uses another optimizer has its own optimizer object.

    Args:
        optims: Optimizers that the slots may use. If ``adamw_torch`` is among them, its two moments are allocated for
            all slots.
        state_dtype: Dtype of these moments. ``bfloat16`` uses stochastic rounding
            (:mod:`alto.kernels.stochastic_rounding`); None means the bank's dtype, rounded to nearest, as in torch's
            AdamW.

    Attributes:
        steps: Number of steps that every slot's adapter has taken.
        rounds_at_random: Whether the moments of ``adamw_torch`` use stochastic rounding.
    """

    def __init__(
        self, bank: AdapterBank, optims: Collection[OptimizerName], state_dtype: torch.dtype | None = None
    ) -> None:
        self._bank = bank
        self._optims = frozenset(optims)
        shape = bank.params_ZP.shape if "adamw_torch" in optims else (0, 0)
        self.exp_avg_ZP = bank.params_ZP.new_zeros(shape, dtype=state_dtype)
        self.exp_avg_sq_ZP = torch.zeros_like(self.exp_avg_ZP)
        self.rounds_at_random = state_dtype == torch.bfloat16
        self.steps = [0] * bank.num_slots
        self._own: dict[int, TorchOptimizer | EightBitAdamW] = {}
        self._left_paged: list[EightBitAdamW] = []

    def gradient_norms(self, slots: Sequence[int]) -> Tensor:
        """Return the norm of every slot's gradient, ``[len(slots)]``, at least float32.

        A norm is computed from the sums of squares of the gradient's tiles if they cover the whole gradient, and from
        the gradient itself otherwise: for adapters with extra tensors, embeddings or experts, for gradients summed over
        ranks, and for passes that skipped a module. The choice depends only on the slot itself.
        """
        bank, ops = self._bank, self._bank.ops
        sums = bank.square_sums
        summed = [] if sums is None else [index for index, slot in enumerate(slots) if slot in sums.complete]
        if sums is None or not summed:
            norms: Tensor = ops.row_norms(bank.grads_ZP, slots, [bank.places(slot).end for slot in slots])
            return norms
        counts = [sums.num_sums(bank.places(slots[index]).groups) for index in summed]
        norms = ops.summed_norms(sums.sums_ZC, [slots[index] for index in summed], counts)
        left = [index for index in range(len(slots)) if index not in set(summed)]
        if not left:
            return norms
        rest = [slots[index] for index in left]
        of_rows = ops.row_norms(bank.grads_ZP, rest, [bank.places(slot).end for slot in rest])
        order = sorted(range(len(slots)), key=(summed + left).__getitem__)
        # Indexing with a list would copy from unpinned memory, which synchronises host and device.
        return torch.cat([norms, of_rows]).index_select(0, upload(order, torch.int64, norms.device))

    def step(self, updates: Sequence[SlotUpdate], norms: Tensor) -> None:
        """Take one optimizer step for every slot in ``updates``, using the gradients in the bank, which are invalid
        afterwards.

        Clipping is equivalent to ``torch.nn.utils.clip_grad_norm_`` over one adapter; ``max_grad_norm`` of None or 0
        turns it off. If memory runs out, every slot either has taken its step and counts it in :attr:`steps`, or is
        unchanged, including its gradient. Unchanged slots can be tried again.

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
            # Indexing with a list would copy from unpinned memory, which synchronises host and device.
            scales = grad_scales.index_select(0, upload(together, torch.int64, grad_scales.device))
            self._step_together([updates[index] for index in together], scales)
            for index, update in enumerate(updates):
                if update.slot in self._own:
                    self._step_alone(update, grad_scales[index])

    def reset(self, slot: int, optim: OptimizerName) -> None:
        """Start ``optim`` in ``slot``, which the bank has assigned to an adapter, and clear its earlier state."""
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
        """Return a copy of ``slot``'s state."""
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
        bank = self._bank
        rows = [self._row_step(update) for update in updates]
        bank.ops.bank_adamw(
            *(bank.params_ZP, bank.grads_ZP, self.exp_avg_ZP, self.exp_avg_sq_ZP, bank.working_ZP), rows, grad_scales
        )
        bank.end_gradients([row.slot for row in rows])
        for row in rows:
            self.steps[row.slot] = row.step

    def _row_step(self, update: SlotUpdate) -> RowStep:
        config, step = update.config, self.steps[update.slot] + 1
        return RowStep(
            slot=update.slot,
            parts=self._bank.places(update.slot).parts,
            step=step,
            rates=(update.learning_rate, update.learning_rate * config.loraplus_lr_ratio),
            betas=(config.adam_beta1, config.adam_beta2),
            epsilon=config.adam_epsilon,
            weight_decay=config.weight_decay,
            clears=self._bank.is_cleared(update.slot),
            rounding_key=rounding_key(config.seed, step) if self.rounds_at_random else None,
        )

    def _step_alone(self, update: SlotUpdate, grad_scale: Tensor) -> None:
        bank, slot = self._bank, update.slot
        gradients = _as_in_peft(bank, bank.grads_ZP, slot)
        clipped = {name: (gradient * grad_scale).contiguous() for name, gradient in gradients.items()}
        matrices = _as_in_peft(bank, bank.params_ZP, slot)
        self._own[slot].step(matrices, clipped, update.config, update.learning_rate)
        bank.copy_weights(slot)
        if bank.is_cleared(slot):
            bank.grads_ZP[slot, : bank.places(slot).end].zero_()
        bank.end_gradients([slot])
        self.steps[slot] += 1

    def _new_eight_bit(self, slot: int, *, paged: bool) -> EightBitAdamW:
        """Return an optimizer that has taken no step.

        bitsandbytes never releases paged memory, so a job reuses the optimizer of an ended job whose matrices had the
        same shapes.
        """
        matrices = _as_in_peft(self._bank, self._bank.params_ZP, slot)
        if paged:
            for index, left in enumerate(self._left_paged):
                if left.fits(matrices):
                    left.reset()
                    return self._left_paged.pop(index)
        return EightBitAdamW(matrices, undecayed=self._undecayed(slot), paged=paged)

    def _undecayed(self, slot: int) -> list[str]:
        """Return the names of ``slot``'s tensors without weight decay."""
        return [extra.name for extra, _ in self._bank.places(slot).extras if not extra.has_decay]

    def _moments(self, slot: int) -> dict[str, Tensor]:
        """Return views of the ``adamw_torch`` state of ``slot``."""
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
    """Return views of ``slot``'s matrices in PEFT's orientation, by ``<module>.A`` (``[r, K]``) and ``<module>.B``
    (``[N, r]``), and of its extra tensors by name."""
    matrices = {
        f"{module.name}.{which}": matrix.T
        for module, *pair in bank.matrices(rows_ZP, slot)
        for which, matrix in zip("AB", pair, strict=True)
    }
    return matrices | {extra.name: tensor for extra, tensor in bank.extras(rows_ZP, slot)}


def compile_kernels(
    bank: AdapterBank,
    optimizer: BankOptimizer,
    dtype: torch.dtype,
    *,
    has_dropout: bool,
    has_adamw: bool,
    also: Callable[[], None] = lambda: None,
) -> Iterator[tuple[int, int]]:
    """Compile the kernels that linear layers and optimizer steps of ``bank`` launch, one kernel per iteration.

    Kernels of other modules (embeddings, experts, the output head) are included if they are the same; otherwise they
    are compiled at their first use. Call this only between two steps, because it invalidates the gradients of slot 0.

    Args:
        bank: Adapters of all slots, after their operands were handed out to layers.
        also: Launches kernels of the base model, to compile them as well.

    Yields:
        Number of kernels compiled so far and in total; nothing if there is nothing to compile.
    """
    device, ops = bank.params_ZP.device, bank.ops
    keys = [None, DropoutKey(0.5, 0, 0)] if has_dropout else [None]
    schedules = [TokenSchedule.build([0], [1], [1.0], [key]) for key in keys]

    def run_group(operands: LoraOperands, schedule: TokenSchedule) -> None:
        x_TK = torch.empty(1, operands.in_features, dtype=dtype, device=device)
        ys = [torch.empty(1, width, dtype=dtype, device=device) for width in operands.out_features]
        s_TQ = ops.grouped_shrink(x_TK, operands, schedule)
        ops.grouped_expand(s_TQ, operands, ys, schedule)
        ops.grouped_backward(x_TK, s_TQ, ys, operands, torch.empty_like(x_TK), schedule)

    def run() -> None:
        also()
        for operands in bank.operands_of_linear():
            for schedule in schedules:
                run_group(operands, schedule)
        norms = ops.row_norms(bank.grads_ZP, [0], [1])
        if bank.square_sums is not None:
            ops.summed_norms(bank.square_sums.sums_ZC, [0], [1])
        if has_adamw:
            row = RowStep(
                slot=0,
                parts=RowParts(1, 1, 1, 1),
                step=1,
                rates=(0.0, 0.0),
                betas=(0.9, 0.999),
                epsilon=1e-8,
                weight_decay=0.0,
                clears=False,
                rounding_key=0 if optimizer.rounds_at_random else None,
            )
            moments = (optimizer.exp_avg_ZP, optimizer.exp_avg_sq_ZP)
            ops.bank_adamw(bank.params_ZP, bank.grads_ZP, *moments, bank.working_ZP, [row], norms)

    yield from ops.compile_kernels(run)
    bank.end_gradients([0])
