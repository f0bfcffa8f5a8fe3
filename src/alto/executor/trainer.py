"""The arithmetic of one task on one device: a bank on a frozen base, stepped and evaluated for any set of slots."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from alto.backbone import Backbone
from alto.data import EncodedDataset, JobRows, TaskData, TokenBatch, collate
from alto.errors import DeviceMemoryError
from alto.executor.job_run import JobRun
from alto.executor.memory_errors import NoMemoryError, release_memory, watching
from alto.executor.passes import OnMemoryEvent, Passes
from alto.kernels import DropoutKey, TokenSchedule, upload
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

    Where memory runs out in a step or an evaluation, it is begun again from the same state in smaller passes.

    Args:
        backbone: The base model; its targeted modules are wrapped in place.
        modules: Every module that some job targets.
        max_rank: The largest rank of any job.
        max_tokens_per_pass: Tokens of one forward and backward pass; a step over it is cut between jobs, and
            between the rows of a job that is larger.
        optims: What its jobs are trained with.
        adapter_dtype: Of adapters, their gradients and the moments of ``adamw_torch``.
        on_memory_event: Is told whenever memory ran out.

    Attributes:
        passes: Cuts steps and evaluations into passes that fit.
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
        on_memory_event: OnMemoryEvent = lambda event: None,
    ) -> None:
        self._backbone = backbone
        self._data = data
        self.passes = Passes(max_tokens_per_pass, on_memory_event)
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

        Raises:
            RowTooLargeError, DeviceMemoryError: As :meth:`backward` and :meth:`update` do.
        """
        losses = self.backward(runs)
        self.update(runs)
        # Read last: until here nothing has waited for the device.
        return [float(loss) for loss in losses.tolist()]

    def backward(self, runs: Sequence[JobRun]) -> Tensor:
        """Losses ``[len(runs)]`` of ``runs`` on their next batches; their gradients are left in the bank.

        Raises:
            RowTooLargeError: One of their rows does not fit into memory by itself; no gradients are left.
        """
        by_slot = {_slot(run): run for run in runs}
        work = [JobRows(slot, tuple(run.order.rows_of_step(run.step))) for slot, run in by_slot.items()]
        place_of = {slot: place for place, slot in enumerate(by_slot)}
        losses: Tensor | None = None

        def train(jobs: Sequence[JobRows]) -> None:
            nonlocal losses
            with watching("forward"):
                batch = self._collate(self._data.train, jobs)
                places_J = upload([place_of[slot] for slot in batch.slots], torch.int64, self._backbone.device)
                losses = torch.zeros(len(runs), device=places_J.device) if losses is None else losses
                schedule = _schedule(batch, by_slot, training=True)
            with self._context.use(schedule):
                with watching("forward"):
                    losses_J = sft_losses(self._backbone, batch)
                with watching("backward"):
                    losses_J.sum().backward()
                    losses.index_add_(0, places_J, losses_J.detach())

        def forget() -> None:
            nonlocal losses
            losses = None
            for slot in by_slot:
                self.bank.grads_ZP[slot].zero_()

        self.passes.run(self._data.train, work, train, forget=forget)
        assert losses is not None
        return losses

    def update(self, runs: Sequence[JobRun]) -> Tensor:
        """Clip and apply the gradients of ``runs``, then forget them; returns their norms before clipping.

        Raises:
            DeviceMemoryError: There is no memory for it; :meth:`has_stepped` says which jobs have taken the step.
        """
        slots = [_slot(run) for run in runs]
        norms: Tensor | None = None
        left = list(range(len(runs)))
        is_last_try = False
        while left:
            try:
                with watching("update"):
                    norms = self.optimizer.gradient_norms(slots) if norms is None else norms
                    self._update([runs[index] for index in left], norms if len(left) == len(runs) else norms[left])
                break
            except NoMemoryError:
                pass  # tried again outside of this clause, which holds what is to be released
            release_memory()
            self.passes.tell("update", [slots[index] for index in left])
            num_before, left = len(left), [index for index in left if not self.has_stepped(runs[index])]
            if is_last_try and len(left) == num_before:
                raise DeviceMemoryError(
                    f"expected memory for the optimizer's step of {len(left)} jobs, found none left on "
                    f"{self._backbone.device}; free some, or lower max_slots"
                )
            is_last_try = len(left) == num_before
        assert norms is not None
        return norms

    def has_stepped(self, run: JobRun) -> bool:
        """Whether the adapter of a seated job has taken the step that the job has not counted yet."""
        return self.optimizer.steps[_slot(run)] > run.step

    @torch.no_grad()
    def evaluate(self, runs: Sequence[JobRun]) -> list[float]:
        """Validation loss of every seated job in ``runs``: nats per trained token over the whole validation split.

        Raises:
            RowTooLargeError: A row does not fit into memory by itself.
        """
        by_slot = {_slot(run): run for run in runs}
        validation = self._data.validation
        work = [JobRows(slot, tuple(range(len(validation)))) for slot in by_slot]
        sums = dict.fromkeys(by_slot, 0.0)

        def add_up(jobs: Sequence[JobRows]) -> None:
            with watching("evaluation"):
                batch = self._collate(validation, jobs)
                with self._context.use(_schedule(batch, by_slot, training=False)):
                    sums_J = sft_sums(self._backbone, batch).tolist()
            for slot, total in zip(batch.slots, sums_J, strict=True):
                sums[slot] += total

        def forget() -> None:
            sums.update(dict.fromkeys(sums, 0.0))

        self.passes.run(validation, work, add_up, forget=forget, split_jobs=True)
        return [total / validation.num_trained_tokens for total in sums.values()]

    def _update(self, runs: Sequence[JobRun], norms: Tensor) -> None:
        updates = [SlotUpdate(slot=_slot(run), config=run.config, learning_rate=run.learning_rate) for run in runs]
        self.optimizer.step(updates, norms)

    def _collate(self, dataset: EncodedDataset, jobs: Sequence[JobRows]) -> TokenBatch:
        return collate(dataset, jobs, self._backbone.device)


def _schedule(batch: TokenBatch, by_slot: dict[int, JobRun], *, training: bool) -> TokenSchedule:
    runs = [by_slot[slot] for slot in batch.slots]
    dropout = [
        DropoutKey(run.config.lora_dropout, run.config.seed, run.step, first_token)
        for run, first_token in zip(runs, batch.job_first_tokens, strict=True)
    ]
    return TokenSchedule.build(
        batch.slots,
        batch.job_tokens,
        scales=[run.config.scale for run in runs],
        dropout=dropout if training else None,
    )


def _slot(run: JobRun) -> int:
    assert run.slot is not None, f"{run.id} has no slot"
    return run.slot
