"""The arithmetic of one task on one device: a bank on a frozen base, stepped and evaluated for any set of slots.

Of several ranks each has a trainer with a bank of its own. All are given the same jobs and do their part of them, in as
many passes as the rank that needs most: a pass gathers the base from all of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Sequence

import torch
from torch import Tensor

from alto.backbone import Backbone, release_memory
from alto.data import EncodedDataset, JobRows, TaskData, TokenBatch, collate, dummy_batch, share_rows
from alto.errors import DeviceMemoryError
from alto.executor.job_run import JobRun
from alto.executor.memory_errors import NoMemoryError, watching
from alto.executor.micro_batches import MicroBatches, OnMemoryEvent
from alto.executor.ranks import Ranks
from alto.executor.tally import Evaluated, Tally
from alto.kernels import VECTOR_SIZE, DropoutKey, TokenSchedule, upload
from alto.lora import (
    ADAPTER_DTYPES,
    AdapterBank,
    AdapterWeights,
    BankLayout,
    OptimizerState,
    SlotAdamW,
    SlotUpdate,
    TargetModule,
    adapter_scale,
    find_shared_inputs,
    inject,
)
from alto.objectives import Objective, find_objective, job_losses, micro_batch_terms, terms_of, token_losses
from alto.scheduler import RankSlots
from alto.spec import AdapterDtype, JobConfig
from alto.spec.job_config import OptimizerName
from alto.spec.metric import LOSS

__all__ = ["Trainer"]


class Trainer:
    """Trains whichever jobs sit in its slots. Decides nothing.

    Where memory runs out in a step or an evaluation, it is begun again from the same state in smaller passes.

    Args:
        backbone: The base model; its targeted modules are wrapped in place.
        modules: Every module that some job targets.
        max_rank: The largest rank of any job.
        rank_step: What the ranks of all jobs are multiples of; None where that is not known.
        num_slots: Slots of this rank's bank; all ranks have as many.
        max_tokens_per_pass: Tokens of one forward and backward pass; a step over it is cut between jobs, and
            between the rows of a job that is larger.
        optims: What its jobs are trained with.
        objective: What they learn; None is ``sft``.
        metric: What the task chooses by; evaluations keep its value on every row.
        adapter_dtype: Of adapters, their gradients and the moments of ``adamw_torch``.
        on_memory_event: Is told whenever memory ran out.
        ranks: This process among those that train the task.

    Attributes:
        slots: Which slot of the task lies on which rank, and where in its bank.
        passes: Cuts steps and evaluations into passes that fit.
    """

    def __init__(
        self,
        backbone: Backbone,
        data: TaskData,
        *,
        modules: tuple[TargetModule, ...],
        max_rank: int,
        rank_step: int | None = None,
        num_slots: int,
        max_tokens_per_pass: int,
        optims: Collection[OptimizerName],
        objective: Objective | None = None,
        metric: str = LOSS,
        adapter_dtype: AdapterDtype = "float32",
        on_memory_event: OnMemoryEvent = lambda event: None,
        ranks: Ranks | None = None,
    ) -> None:
        self._backbone = backbone
        self._data = data
        self._objective = objective or find_objective("sft")
        self._row_metric = None if metric == LOSS else metric
        self._ranks = ranks or Ranks()
        self.slots = RankSlots(num_ranks=self._ranks.size, per_rank=num_slots)
        self.micro_batches = MicroBatches(max_tokens_per_pass, on_memory_event, can_retry=self._ranks.is_alone)
        layout = BankLayout(
            modules=modules,
            max_rank=max_rank,
            rank_step=rank_step or VECTOR_SIZE,
            shared_inputs=find_shared_inputs(backbone.model, backbone.run_once),
        )
        self.bank = AdapterBank(layout, num_slots, device=backbone.device, dtype=ADAPTER_DTYPES[adapter_dtype])
        self.optimizer = SlotAdamW(self.bank, optims)
        self._context = inject(backbone.model, self.bank)

    def local_slot(self, run: JobRun) -> int | None:
        """Where in this rank's bank a resident job lies; None where it lies with another rank."""
        assert run.slot is not None, f"{run.id} has no slot"
        if run.is_data_parallel or self.slots.rank_of(run.slot) == self._ranks.rank:
            return self.slots.local_slot_of(run.slot)
        return None

    def admit_fresh(self, run: JobRun, local_slot: int) -> None:
        """Give ``place`` to a job that has not trained yet."""
        self.bank.occupy(local_slot, run.shape)
        self.bank.initialise(local_slot, run.config.seed, run.config.init_lora_weights)
        self.optimizer.reset(local_slot, run.config.optim)

    def admit_warm(self, run: JobRun, local_slot: int, weights: AdapterWeights) -> None:
        """Give ``place`` to a job that has not trained yet and begins with ``weights``."""
        self.bank.occupy(local_slot, run.shape)
        self.bank.write(local_slot, weights)
        self.optimizer.reset(local_slot, run.config.optim)

    def readmit(self, run: JobRun, local_slot: int, weights: AdapterWeights, optimizer: OptimizerState) -> None:
        """Give ``place`` to a job that was parked, with the state it had."""
        self.bank.occupy(local_slot, run.shape)
        self.bank.write(local_slot, weights)
        self.optimizer.write(local_slot, run.config.optim, optimizer)

    def release(self, local_slot: int) -> None:
        """Take ``place`` back."""
        self.bank.release(local_slot)

    def step(self, runs: Sequence[JobRun]) -> list[float]:
        """One optimizer step of every resident job in ``runs`` on its next batch; counts nothing.

        Returns:
            The training loss of each before the step, as its objective has it.

        Raises:
            RowTooLargeError, DeviceMemoryError: As :meth:`backward` and :meth:`update` do.
        """
        losses = self.backward(runs)
        self.update(runs)
        return self.read(losses)

    def backward(self, runs: Sequence[JobRun]) -> Tensor:
        """Losses ``[len(runs)]`` of ``runs`` on their next batches, as far as this rank has their rows; their gradients
        are left in the bank, those of a job that is spread summed over the ranks.

        Raises:
            RowTooLargeError: One of their rows does not fit into memory by itself; no gradients are left.
            DeviceMemoryError: A pass does not fit, and other ranks have begun it.
        """
        here = self._here(runs)
        index_of = {
            local_slot: index for index, run in enumerate(runs) if (local_slot := self.local_slot(run)) is not None
        }
        batches = [(run, tuple(run.order.rows_of_step(run.step))) for run in runs]
        work, num_micro_batches = self._work(self._data.train, batches)
        losses: Tensor | None = None

        def train(jobs: Sequence[JobRows]) -> None:
            nonlocal losses
            with watching("forward"):
                losses = torch.zeros(len(runs), device=self._backbone.device) if losses is None else losses
                batch = self._collate(self._data.train, jobs)
                configs = [here[local_slot].config for local_slot in batch.slots]
                indices_J = upload([index_of[local_slot] for local_slot in batch.slots], torch.int64, losses.device)
                schedule = _schedule(batch, here, training=True)
            with self._context.use(schedule):
                with watching("forward"):
                    losses_J = job_losses(self._objective, self._backbone, batch, configs)
                with watching("backward"):
                    losses_J.sum().backward()
                    if jobs:
                        losses.index_add_(0, indices_J, losses_J.detach())

        def forget() -> None:
            nonlocal losses
            losses = None
            for local_slot in here:
                self.bank.grads_ZP[local_slot].zero_()

        self.micro_batches.run(self._data.train, work, train, forget=forget, num_micro_batches=num_micro_batches)
        for run in runs:
            if run.is_data_parallel:
                local_slot = self.slots.local_slot_of(_slot(run))
                self._ranks.all_reduce(self.bank.grads_ZP[local_slot, : self.bank.places(local_slot).end])
        assert losses is not None, "somebody trains"
        return losses

    def read(self, losses: Tensor) -> list[float]:
        """The losses that :meth:`backward` has found, of all ranks. Asked for last: until here nothing has waited for
        the device."""
        return self._ranks.sum([float(loss) for loss in losses.tolist()])

    def update(self, runs: Sequence[JobRun]) -> Tensor:
        """Clip and apply the gradients of ``runs``, then forget them; returns the norms before clipping, of those that
        this rank has.

        Raises:
            DeviceMemoryError: There is no memory for it; :meth:`has_stepped` says which jobs have taken the step.
        """
        by_local_slot = self._here(runs)
        places, runs = list(by_local_slot), list(by_local_slot.values())
        if not runs:
            return torch.zeros(0, device=self._backbone.device)
        norms: Tensor | None = None
        left = list(range(len(runs)))
        is_last_try = False
        while left:
            try:
                with watching("update"):
                    norms = self.optimizer.gradient_norms(places) if norms is None else norms
                    self._update([runs[index] for index in left], norms if len(left) == len(runs) else norms[left])
                break
            except NoMemoryError:
                pass  # tried again outside of this clause, which holds what is to be released
            release_memory()
            self.micro_batches.tell("update", [places[index] for index in left])
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
        """Whether the adapter of a resident job has taken the step that the job has not counted yet. Another rank that
        could not take it would have ended this executor."""
        local_slot = self.local_slot(run)
        return local_slot is None or self.optimizer.steps[local_slot] > run.step

    @torch.no_grad()
    def evaluate(self, runs: Sequence[JobRun]) -> list[Evaluated]:
        """What every resident job in ``runs`` is worth on the whole validation split; the loss as in training.

        Raises:
            RowTooLargeError: A row does not fit into memory by itself.
            DeviceMemoryError: A pass does not fit, and other ranks have begun it.
        """
        here = self._here(runs)
        validation = self._data.validation
        rows = tuple(range(len(validation)))
        work, num_micro_batches = self._work(validation, [(run, rows) for run in runs], split_jobs=True)
        tallies = {local_slot: self._new_tally() for local_slot in here}

        def all_reduce(jobs: Sequence[JobRows]) -> None:
            with watching("evaluation"):
                batch = self._collate(validation, jobs)
                configs = [here[local_slot].config for local_slot in batch.slots]
                with self._context.use(_schedule(batch, here, training=False)):
                    terms = micro_batch_terms(self._objective, self._backbone, batch, configs)
                Tally.add_micro_batch(
                    [tallies[local_slot] for local_slot in batch.slots], [job.rows for job in jobs], terms
                )

        self._evaluate(work, all_reduce, tallies.values(), num_micro_batches)
        nothing = self._new_tally()
        return self._evaluated(
            [nothing if local_slot is None else tallies[local_slot] for local_slot in map(self.local_slot, runs)]
        )

    @torch.no_grad()
    def evaluate_base(self, configs: Sequence[JobConfig]) -> list[Evaluated]:
        """What the frozen base alone is worth on the validation split, by the objective as each of ``configs`` sets it.
        Asked before a job sits in the first slot: one without an adapter adds nothing to the base.

        Raises:
            RowTooLargeError: A row does not fit into memory by itself.
            DeviceMemoryError: A pass does not fit, and other ranks have begun it.
        """
        validation = self._data.validation
        shares = share_rows(validation, JobRows(0, tuple(range(len(validation)))), self._ranks.size)
        of_rank = [[] if share is None else [share] for share in shares]
        num_micro_batches = max(self.micro_batches.count(validation, work, split_jobs=True) for work in of_rank)
        tallies = [self._new_tally() for _ in configs]

        def all_reduce(jobs: Sequence[JobRows]) -> None:
            with watching("evaluation"):
                batch = self._collate(validation, jobs)
                with self._context.use(TokenSchedule.build(batch.slots, batch.job_tokens, scales=[1.0] * len(jobs))):
                    losses_S = token_losses(self._backbone, batch)
                for config, tally in zip(configs, tallies, strict=True) if jobs else ():
                    terms = terms_of(self._objective, losses_S, batch, [config])
                    Tally.add_micro_batch([tally], [job.rows for job in jobs], terms)

        self._evaluate(of_rank[self._ranks.rank], all_reduce, tallies, num_micro_batches)
        return self._evaluated(tallies)

    def _new_tally(self) -> Tally:
        return Tally(self._objective.metrics, self._row_metric, len(self._data.validation))

    def _evaluate(
        self,
        work: Sequence[JobRows],
        all_reduce: Callable[[Sequence[JobRows]], None],
        tallies: Iterable[Tally],
        num_micro_batches: int,
    ) -> None:
        """Evaluate pass by pass; where memory runs out, all tallies begin anew."""
        tallies = list(tallies)

        def forget() -> None:
            for tally in tallies:
                tally.forget()

        self.micro_batches.run(
            self._data.validation, work, all_reduce, forget=forget, split_jobs=True, num_micro_batches=num_micro_batches
        )

    def _evaluated(self, tallies: Sequence[Tally]) -> list[Evaluated]:
        """What the tallies of all ranks together say."""
        values = [tally.values() for tally in tallies]
        totals = iter(self._ranks.sum([value for of_one in values for value in of_one]))
        weight = sum(self._data.validation.weights)
        return [
            tally.evaluated(list(itertools.islice(totals, len(of_one))), weight)
            for tally, of_one in zip(tallies, values, strict=True)
        ]

    def _here(self, runs: Sequence[JobRun]) -> dict[int, JobRun]:
        """Those of ``runs`` that lie in this rank's bank, by place."""
        return {local_slot: run for run in runs if (local_slot := self.local_slot(run)) is not None}

    def _work(
        self, dataset: EncodedDataset, batches: Sequence[tuple[JobRun, tuple[int, ...]]], *, split_jobs: bool = False
    ) -> tuple[list[JobRows], int]:
        """What of ``batches`` is this rank's, and how many passes the rank with the most of them makes."""
        of_rank: list[list[JobRows]] = [[] for _ in range(self._ranks.size)]
        for run, rows in batches:
            slot = _slot(run)
            job = JobRows(self.slots.local_slot_of(slot), rows)
            if run.is_data_parallel:
                for work, share in zip(of_rank, share_rows(dataset, job, len(of_rank)), strict=True):
                    work += [share] if share is not None else []
            else:
                of_rank[self.slots.rank_of(slot)].append(job)
        if self._ranks.is_alone:
            return of_rank[0], 0
        num_micro_batches = max(self.micro_batches.count(dataset, work, split_jobs=split_jobs) for work in of_rank)
        return of_rank[self._ranks.rank], num_micro_batches

    def _update(self, runs: Sequence[JobRun], norms: Tensor) -> None:
        updates = [
            SlotUpdate(slot=self.slots.local_slot_of(_slot(run)), config=run.config, learning_rate=run.learning_rate)
            for run in runs
        ]
        self.optimizer.step(updates, norms)

    def _collate(self, dataset: EncodedDataset, jobs: Sequence[JobRows]) -> TokenBatch:
        return collate(dataset, jobs, self._backbone.device) if jobs else dummy_batch(self._backbone.device)


def _schedule(batch: TokenBatch, by_local_slot: dict[int, JobRun], *, training: bool) -> TokenSchedule:
    runs = [by_local_slot[local_slot] for local_slot in batch.slots]
    dropout = [
        DropoutKey(run.config.lora_dropout, run.config.seed, run.step, first_token)
        for run, first_token in zip(runs, batch.job_first_tokens, strict=True)
    ]
    return TokenSchedule.build(
        batch.slots,
        batch.job_tokens,
        scales=[adapter_scale(run.config) for run in runs],
        dropout=dropout if training else None,
    )


def _slot(run: JobRun) -> int:
    assert run.slot is not None, f"{run.id} has no slot"
    return run.slot
