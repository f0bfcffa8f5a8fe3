"""The arithmetic of one task on one device: a bank on a frozen base, stepped and evaluated for any set of slots."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from alto.backbone import Backbone
from alto.data import EncodedDataset, JobRows, TaskData, TokenBatch, collate, split_into_passes
from alto.executor.job_run import JobRun
from alto.kernels import DropoutKey, TokenSchedule
from alto.lora import (
    ADAPTER_DTYPES,
    AdapterBank,
    AdapterWeights,
    BankLayout,
    OptimizerState,
    SlotAdamW,
    SlotUpdate,
    TargetModule,
    find_shared_inputs,
    inject,
)
from alto.objectives import sft_losses, sft_sums
from alto.spec import AdapterDtype
from alto.spec.job_config import OptimizerName

__all__ = ["Trainer"]


class Trainer:
    """Trains whichever jobs sit in its slots. Decides nothing.

    Args:
        backbone: The base model; its targeted modules are wrapped in place.
        modules: Every module that some job targets.
        max_rank: The largest rank of any job.
        max_tokens_per_pass: Tokens of one forward and backward pass; a step over it is cut between jobs.
        optims: What its jobs are trained with.
        adapter_dtype: Of adapters, their gradients and the moments of ``adamw_torch``.
    """

    def __init__(
        self,
        backbone: Backbone,
        data: TaskData,
        *,
        modules: tuple[TargetModule, ...],
        max_rank: int,
        num_slots: int,
        max_tokens_per_pass: int,
        optims: Collection[OptimizerName],
        adapter_dtype: AdapterDtype = "float32",
    ) -> None:
        self._backbone = backbone
        self._data = data
        self._max_tokens_per_pass = max_tokens_per_pass
        layout = BankLayout(
            modules=modules,
            max_rank=max_rank,
            shared_inputs=find_shared_inputs(backbone.model, backbone.run_once),
        )
        self.bank = AdapterBank(layout, num_slots, device=backbone.device, dtype=ADAPTER_DTYPES[adapter_dtype])
        self.optimizer = SlotAdamW(self.bank, optims)
        self._context = inject(backbone.model, self.bank)

    def seat_fresh(self, run: JobRun, slot: int) -> None:
        """Give ``slot`` to a job that has not trained yet."""
        self.bank.occupy(slot, run.shape)
        self.bank.initialise(slot, run.config.seed, run.config.init_lora_weights)
        self.optimizer.reset(slot, run.config.optim)

    def seat_warm(self, run: JobRun, slot: int, weights: AdapterWeights) -> None:
        """Give ``slot`` to a job that has not trained yet and begins with ``weights``."""
        self.bank.occupy(slot, run.shape)
        self.bank.write(slot, weights)
        self.optimizer.reset(slot, run.config.optim)

    def seat_again(self, run: JobRun, slot: int, weights: AdapterWeights, optimizer: OptimizerState) -> None:
        """Give ``slot`` to a job that was parked, with the state it had."""
        self.bank.occupy(slot, run.shape)
        self.bank.write(slot, weights)
        self.optimizer.write(slot, run.config.optim, optimizer)

    def release(self, slot: int) -> None:
        """Take ``slot`` back."""
        self.bank.release(slot)

    def step(self, runs: Sequence[JobRun]) -> list[float]:
        """One optimizer step of every seated job in ``runs`` on its next batch; counts nothing.

        Returns:
            The training loss of each, nats per token, before the step.
        """
        losses = self.backward(runs)
        self.update(runs)
        # Read last: until here nothing has waited for the device.
        return [float(loss) for loss in losses.tolist()]

    def backward(self, runs: Sequence[JobRun]) -> Tensor:
        """Losses ``[len(runs)]`` of ``runs`` on their next batches; their gradients are left in the bank."""
        by_slot = {_slot(run): run for run in runs}
        work = [JobRows(slot, tuple(run.order.rows_of_step(run.step))) for slot, run in by_slot.items()]
        losses = []
        for jobs in split_into_passes(self._data.train, work, self._max_tokens_per_pass):
            batch = self._collate(self._data.train, jobs)
            with self._context.use(_schedule(batch, by_slot, training=True)):
                losses_J = sft_losses(self._backbone, batch)
                losses_J.sum().backward()
            losses.append(losses_J.detach())
        return torch.cat(losses)

    def update(self, runs: Sequence[JobRun]) -> Tensor:
        """Clip and apply the gradients of ``runs``, then forget them; returns their norms before clipping."""
        updates = [SlotUpdate(slot=_slot(run), config=run.config, learning_rate=run.learning_rate) for run in runs]
        return self.optimizer.step(updates)

    @torch.no_grad()
    def evaluate(self, runs: Sequence[JobRun]) -> list[float]:
        """Validation loss of every seated job in ``runs``: nats per trained token over the whole validation split."""
        by_slot = {_slot(run): run for run in runs}
        validation = self._data.validation
        rows = tuple(range(len(validation)))
        sums = dict.fromkeys(by_slot, 0.0)
        work = [JobRows(slot, rows) for slot in by_slot]
        for jobs in split_into_passes(validation, work, self._max_tokens_per_pass, split_jobs=True):
            batch = self._collate(validation, jobs)
            with self._context.use(_schedule(batch, by_slot, training=False)):
                sums_J = sft_sums(self._backbone, batch).tolist()
            for slot, total in zip(batch.slots, sums_J, strict=True):
                sums[slot] += total
        return [total / validation.num_trained_tokens for total in sums.values()]

    def _collate(self, dataset: EncodedDataset, jobs: Sequence[JobRows]) -> TokenBatch:
        return collate(dataset, jobs, self._backbone.device)


def _schedule(batch: TokenBatch, by_slot: dict[int, JobRun], *, training: bool) -> TokenSchedule:
    runs = [by_slot[slot] for slot in batch.slots]
    dropout = [DropoutKey(run.config.lora_dropout, run.config.seed, run.step) for run in runs]
    return TokenSchedule.build(
        batch.slots,
        batch.job_tokens,
        scales=[run.config.scale for run in runs],
        dropout=dropout if training else None,
    )


def _slot(run: JobRun) -> int:
    assert run.slot is not None, f"{run.id} has no slot"
    return run.slot
