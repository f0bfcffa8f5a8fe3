"""The arithmetic of jobs on one device: a bank on a frozen base model, stepped and evaluated for any set of slots.

Each rank has a trainer with its own bank. All trainers are called with the same jobs and run their share, in as many
micro-batches as the rank that needs most: every micro-batch gathers the base model from all ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from alto.backbone import Backbone, is_out_of_memory, release_memory
from alto.data import EvaluationSplit, JobRows, share_rows
from alto.errors import DeviceMemoryError
from alto.executor.context import TaskContext
from alto.executor.divergence import Divergences
from alto.executor.forward_plan import JobBatch, PreparedStep, RankShare, schedule_of, slot_of, training_pass
from alto.executor.job_state import JobState
from alto.executor.micro_batches import MicroBatches, NoMemoryError, watching
from alto.executor.ranks import Ranks
from alto.executor.router_balance import RouterBalance
from alto.executor.start_adapter import Within
from alto.executor.tally import Derivation, Evaluated, Tally
from alto.kernels import upload
from alto.lora import (
    AdapterBank,
    AdapterWeights,
    BankHeads,
    ForwardContext,
    OptimizerState,
    SlotAdamW,
    SlotUpdate,
    compile_kernels,
)
from alto.objectives import Learners, job_losses, micro_batch_terms, terms_of, token_losses
from alto.spec import JobConfig


class Trainer:
    """Trains the jobs in its slots; makes no decisions. Built by :func:`alto.executor.shared_bank.build_trainer`.

    Rows and objective come from the context of each job's task. The bank may hold jobs of several tasks, which train in
    the same micro-batches. In every list of jobs, the jobs of a task are next to each other.

    If memory runs out in a step or an evaluation, the work starts again from the same state with smaller micro-batches.

    Args:
        backbone: The base model, whose targeted modules are wrapped for ``bank``.
        bank: Bank of this rank; the banks of all ranks have the same number of slots.
        optimizer: Optimizer of the bank's rows.
        forward_context: Gives the wrapped modules the slots of a micro-batch's tokens.
        micro_batches: Splits steps and evaluations into micro-batches that fit into memory.
        ranks: This process among the ranks that train together.

    Attributes:
        slots: Maps slots to ranks and local slots.
        balance: The load-balancing losses of the last step; None if no job of the step trains with them.
    """

    def __init__(
        self,
        backbone: Backbone,
        bank: AdapterBank,
        optimizer: SlotAdamW,
        forward_context: ForwardContext,
        micro_batches: MicroBatches,
        ranks: Ranks,
    ) -> None:
        self._backbone = backbone
        self.bank = bank
        self._heads = BankHeads(bank)
        self.optimizer = optimizer
        self._forward_context = forward_context
        self.micro_batches = micro_batches
        self._ranks = ranks
        self._share = RankShare(backbone, micro_batches, ranks, bank.num_slots)
        self.slots = self._share.slots
        self._divergences = Divergences(backbone, bank, micro_batches, ranks, self._share)
        self._prepared = PreparedStep()
        self.balance: RouterBalance | None = None

    def use(self, forward_context: ForwardContext) -> None:
        """Use another forward context, after the modules of the base model were wrapped again."""
        self._forward_context = forward_context

    @property
    def graph_groups(self) -> tuple[int, int]:
        """See :attr:`alto.lora.ForwardContext.graph_groups`."""
        return self._forward_context.graph_groups

    @property
    def is_alone(self) -> bool:
        """Whether there is one rank."""
        return self._ranks.is_alone

    def compile_kernels(self, configs: Sequence[JobConfig]) -> Iterator[tuple[int, int]]:
        """Compile the kernels that steps of jobs with ``configs`` launch, one at each iteration; called between two
        steps.

        Returns:
            An iterator over pairs: kernels compiled so far, and all kernels; empty if there is nothing to compile.
        """
        return compile_kernels(
            self.bank,
            self.optimizer,
            self._backbone.dtype,
            has_dropout=any(config.lora_dropout for config in configs),
            has_adamw=any(config.optim == "adamw_torch" for config in configs),
            also=self._backbone.sample_kernels,
        )

    def forget(self) -> None:
        """Clear all gradients, after an error in :meth:`backward`."""
        self.bank.grads_ZP.zero_()

    def local_slot(self, job: JobState) -> int | None:
        """Return the local slot of a resident job in this rank's bank; None if the job is on another rank."""
        return self._share.local_slot(job)

    def admit_fresh(self, job: JobState, local_slot: int) -> None:
        """Give ``local_slot`` of this rank's bank to a job that has not trained yet."""
        self.bank.occupy(local_slot, job.shape)
        self.bank.initialise(local_slot, job.config.seed, job.config.init_lora_weights)
        if job.context.objective.has_head:
            self._heads.initialise(local_slot, self._backbone.model, job.config.seed)
        self.optimizer.reset(local_slot, job.config.optim)

    def admit_warm(self, job: JobState, local_slot: int, weights: AdapterWeights) -> None:
        """Give ``local_slot`` of this rank's bank to a job that has not trained yet and begins with ``weights``."""
        self.bank.occupy(local_slot, job.shape)
        self.bank.write(local_slot, weights)
        self.optimizer.reset(local_slot, job.config.optim)

    def readmit(self, job: JobState, local_slot: int, weights: AdapterWeights, optimizer: OptimizerState) -> None:
        """Give ``local_slot`` of this rank's bank to a parked job, with its saved ``weights`` and ``optimizer``
        state."""
        self.bank.occupy(local_slot, job.shape)
        self.bank.write(local_slot, weights)
        self.optimizer.write(local_slot, job.config.optim, optimizer)

    def release(self, local_slot: int) -> None:
        """Free ``local_slot`` of this rank's bank."""
        self.bank.release(local_slot)

    def step(self, jobs: Sequence[JobState]) -> list[float]:
        """Run one optimizer step of every resident job in ``jobs`` on its next batch; the job's step count is not
        changed.

        Returns:
            The training loss of each job before the step, as its objective defines it.

        Raises:
            RowTooLargeError, DeviceMemoryError: See :meth:`backward` and :meth:`update`.
        """
        losses = self.backward(jobs)
        self.update(jobs)
        self.prepare(jobs)
        return self.read(losses)

    def backward(self, jobs: Sequence[JobState]) -> Tensor:
        """Run the forward and backward pass of ``jobs`` on their next batches.

        The gradients are left in the bank and include the routers' load-balancing losses; gradients of a data-parallel
        job are summed over the ranks.

        Returns:
            Losses ``[len(jobs)]`` without the routers' losses, from the rows that this rank has; see :meth:`read`.

        Raises:
            RowTooLargeError: A single row does not fit into memory; no gradients are left.
            DeviceMemoryError: A micro-batch does not fit, and other ranks have already begun it.
        """
        here = self._share.here(jobs)
        index_of = {
            local_slot: index for index, job in enumerate(jobs) if (local_slot := self.local_slot(job)) is not None
        }
        batches = _batches(jobs)
        kl = self._divergences.estimate(batches, self._forward_context)
        has_balance = any(job.planned.router_aux_loss_coef for job in jobs)
        self.balance = balance = RouterBalance(self._backbone, batches, self._ranks) if has_balance else None
        work, num_micro_batches = self._share.work(batches, is_step=True)
        losses: Tensor | None = None

        def train(parts: Sequence[JobRows]) -> None:
            nonlocal losses
            with watching("forward"):
                losses = torch.zeros(len(jobs), device=self._backbone.device) if losses is None else losses
                prepared = self._prepared.batch(parts)
                batch = self._share.collate(parts) if prepared is None else prepared
                learners = self._learners([here[local_slot] for local_slot in batch.slots])
                indices_J = upload([index_of[local_slot] for local_slot in batch.slots], torch.int64, losses.device)
                batch = batch if kl is None else replace(batch, kl_J=kl.index_select(0, indices_J))
                training = training_pass(self._backbone, self._forward_context, batch, here, self._prepared)
            with training:
                with watching("forward"):
                    if balance is None or not parts:
                        losses_J = trained_J = job_losses(self._backbone, batch, learners)
                    else:
                        losses_J, trained_J = balance.job_losses(batch, learners, parts, index_of)
                with watching("backward"):
                    trained_J.sum().backward()
                    if parts:
                        losses.index_add_(0, indices_J, losses_J.detach())

        def forward(parts: Sequence[JobRows]) -> None:
            batch = self._share.collate(parts)
            with training_pass(self._backbone, self._forward_context, batch, here, self._prepared):
                self._backbone.hidden_states(
                    batch.input_ids_T, batch.position_ids_T, batch.sequence_lengths, batch.sequence_prefixes
                )

        def prepare() -> None:
            if balance is not None and (split := balance.uncounted(self.micro_batches)):
                share = self._share.work([batches[index] for index in split], split_jobs=True)
                balance.count(split, *share, forward, index_of, self.micro_batches)

        def forget() -> None:
            nonlocal losses
            losses = None
            if balance is not None:
                balance.forget()
            self.bank.clear_gradients(list(here))

        self.micro_batches.run(work, train, forget=forget, prepare=prepare, num_micro_batches=num_micro_batches)
        self.bank.complete_gradients(here)
        for job in jobs:
            if job.is_data_parallel:
                local_slot = self.slots.local_slot_of(slot_of(job))
                self._ranks.all_reduce(self.bank.grads_ZP[local_slot, : self.bank.places(local_slot).end])
                self.bank.forget_square_sums([local_slot])
        assert losses is not None, "at least one job trains"
        return losses

    def prepare(self, jobs: Sequence[JobState]) -> None:
        """Make the batches of the step after the present one, which ``jobs`` have not counted yet, and send them to the
        device. Called after :meth:`update` and before :meth:`read`, while the device computes.

        If the next step has other jobs or smaller micro-batches, it makes its own batches. The same holds if these
        batches do not fit into memory beside the batches of the present step.

        Raises:
            Exception: A batch cannot be made, for example because rows cannot be read.
        """
        self._prepared.forget()
        jobs = [job for job in jobs if job.step + 1 < job.total_steps]
        here = self._share.here(jobs)
        try:
            work, _ = self._share.work(_batches(jobs, steps_ahead=1), is_step=True)
            for parts in self.micro_batches.split(work):
                batch = self._share.collate(parts)
                self._prepared.add(parts, batch, schedule_of(batch, here, training=True, steps_ahead=1))
        except Exception as error:
            self._prepared.forget()
            if not is_out_of_memory(error):
                raise

    def read(self, losses: Tensor) -> list[float]:
        """Return the losses of :meth:`backward`, summed over all ranks. Called last: this is the first host-device
        synchronisation of the step."""
        return self._ranks.sum([float(loss) for loss in losses.tolist()])

    def update(self, jobs: Sequence[JobState]) -> Tensor:
        """Clip and apply the gradients of ``jobs``, which are invalid afterwards; return the norms before clipping of
        this rank's jobs.

        Raises:
            DeviceMemoryError: Memory is too small for the optimizer step; :meth:`has_stepped` says which jobs have
                taken it.
        """
        by_local_slot = self._share.here(jobs)
        local_slots, jobs = list(by_local_slot), list(by_local_slot.values())
        if not jobs:
            return torch.zeros(0, device=self._backbone.device)
        norms: Tensor | None = None
        left = list(range(len(jobs)))
        is_last_try = False
        while left:
            try:
                with watching("update"):
                    norms = self.optimizer.gradient_norms(local_slots) if norms is None else norms
                    self._update([jobs[index] for index in left], norms if len(left) == len(jobs) else norms[left])
                break
            except NoMemoryError:
                pass  # retry outside of this clause, because the error keeps the tensors that must be released
            release_memory()
            self.micro_batches.report("update", [local_slots[index] for index in left])
            num_before, left = len(left), [index for index in left if not self.has_stepped(jobs[index])]
            if is_last_try and len(left) == num_before:
                raise DeviceMemoryError(
                    f"expected memory for the optimizer's step of {len(left)} jobs, found none left on "
                    f"{self._backbone.device}; free memory, or lower max_slots"
                )
            is_last_try = len(left) == num_before
        assert norms is not None
        return norms

    def has_stepped(self, job: JobState) -> bool:
        """Return whether the adapter of a resident job has taken the step that the job has not counted yet. A job on
        another rank has taken it: otherwise this executor would have ended."""
        local_slot = self.local_slot(job)
        return local_slot is None or self.optimizer.steps[local_slot] > job.step

    @torch.no_grad()
    def evaluate(
        self,
        jobs: Sequence[JobState],
        split: EvaluationSplit = "validation",
        rows: Sequence[Sequence[int]] | None = None,
    ) -> list[Evaluated]:
        """Evaluate every resident job in ``jobs`` on rows of a split; the loss is the training loss.

        Args:
            rows: Rows for each job, in the order in which their values are kept; None for all rows of the split.

        Raises:
            RowTooLargeError: A single row does not fit into memory.
            DeviceMemoryError: A micro-batch does not fit, and other ranks have already begun it.
        """
        here = self._share.here(jobs)
        of_jobs = [None] * len(jobs) if rows is None else rows
        all_tallies = [_new_tally(job.context, split, of_job) for job, of_job in zip(jobs, of_jobs, strict=True)]
        batches: list[JobBatch] = [
            (job, job.context.data.held_out(split), tally.rows) for job, tally in zip(jobs, all_tallies, strict=True)
        ]
        kl = self._divergences.estimate(batches, self._forward_context)
        index_of = {self.local_slot(job): index for index, job in enumerate(jobs)}
        work, num_micro_batches = self._share.work(batches, split_jobs=True)
        tallies = {local_slot: all_tallies[index_of[local_slot]] for local_slot in here}

        def accumulate(parts: Sequence[JobRows]) -> None:
            with watching("evaluation"):
                batch = self._share.collate(parts)
                learners = self._learners([here[local_slot] for local_slot in batch.slots])
                if kl is not None:
                    indices = [index_of[local_slot] for local_slot in batch.slots]
                    batch = replace(batch, kl_J=kl.index_select(0, upload(indices, torch.int64, kl.device)))
                with self._forward_context.use(schedule_of(batch, here, training=False)):
                    found = micro_batch_terms(self._backbone, batch, learners)
                left = iter(parts)
                for group, terms in zip(learners, found, strict=bool(parts)):
                    of_group = list(itertools.islice(left, len(group.configs)))
                    Tally.add_micro_batch(
                        [tallies[part.slot] for part in of_group], [part.rows for part in of_group], terms
                    )

        self._evaluate(work, accumulate, tallies.values(), num_micro_batches)
        return self._evaluated(all_tallies)

    @torch.no_grad()
    def evaluate_base(
        self,
        context: TaskContext,
        configs: Sequence[JobConfig],
        split: EvaluationSplit = "validation",
        within: Within = lambda num_tokens: nullcontext(),
        rows: Sequence[int] | None = None,
    ) -> list[Evaluated]:
        """Evaluate the jobs' starting point, the frozen base model or a saved adapter on it, on a split of a task, once
        for each of ``configs`` with its settings of the objective.

        Args:
            within: Context in which forward passes compute the starting point; by default, the base model.
            rows: The rows to evaluate, in the order in which their values are kept; None for all rows of the split.

        Raises:
            RowTooLargeError: A single row does not fit into memory.
            DeviceMemoryError: A micro-batch does not fit, and other ranks have already begun it.
        """
        tallies = [_new_tally(context, split, rows) for _ in configs]
        dataset, shares_beginnings = context.data.held_out(split), self._backbone.shares_beginnings
        everything = JobRows(dataset, 0, tallies[0].rows, shares_beginnings=shares_beginnings)
        shares = share_rows(everything, self._ranks.size)
        of_rank = [[] if share is None else [share] for share in shares]
        num_micro_batches = max(self.micro_batches.count(work, split_jobs=True) for work in of_rank)

        def accumulate(parts: Sequence[JobRows]) -> None:
            with watching("evaluation"):
                batch = self._share.collate(parts)
                # The starting point is its own reference, so its divergence is 0.
                kl_J = torch.zeros(len(batch.slots), dtype=torch.float64, device=self._backbone.device)
                batch = replace(batch, kl_J=kl_J)
                with within(sum(batch.job_tokens)):
                    losses_S = token_losses(self._backbone, batch)
                for config, tally in zip(configs, tallies, strict=True) if parts else ():
                    terms = terms_of(context.objective, losses_S, batch, [config])
                    Tally.add_micro_batch([tally], [part.rows for part in parts], terms)

        self._evaluate(of_rank[self._ranks.rank], accumulate, tallies, num_micro_batches)
        return self._evaluated(tallies)

    def _evaluate(
        self,
        work: Sequence[JobRows],
        accumulate: Callable[[Sequence[JobRows]], None],
        tallies: Iterable[Tally],
        num_micro_batches: int,
    ) -> None:
        """Evaluate one micro-batch at a time; reset all tallies if memory runs out."""
        tallies = list(tallies)

        def forget() -> None:
            for tally in tallies:
                tally.forget()

        self.micro_batches.run(work, accumulate, forget=forget, split_jobs=True, num_micro_batches=num_micro_batches)

    def _evaluated(self, tallies: Sequence[Tally]) -> list[Evaluated]:
        """Return the evaluations from the tallies of all ranks."""
        values = [tally.values() for tally in tallies]
        totals = iter(self._ranks.sum([value for of_one in values for value in of_one]))
        return [
            tally.evaluated(list(itertools.islice(totals, len(of_one))))
            for tally, of_one in zip(tallies, values, strict=True)
        ]

    def _update(self, jobs: Sequence[JobState], norms: Tensor) -> None:
        updates = [
            SlotUpdate(slot=self.slots.local_slot_of(slot_of(job)), config=job.config, learning_rate=job.learning_rate)
            for job in jobs
        ]
        self.optimizer.step(updates, norms)

    def _learners(self, jobs: Sequence[JobState]) -> list[Learners]:
        """Return the jobs of a micro-batch, grouped by task."""
        groups = [list(group) for _, group in itertools.groupby(jobs, key=lambda job: id(job.context))]
        return [
            Learners(of_task[0].context.objective, tuple(job.config for job in of_task), self._heads)
            for of_task in groups
        ]


def _batches(jobs: Sequence[JobState], *, steps_ahead: int = 0) -> list[JobBatch]:
    """Return the next batch of every job, or a batch that comes ``steps_ahead`` steps later."""
    return [(job, job.context.data.train, tuple(job.order.rows_of_step(job.step + steps_ahead))) for job in jobs]


def _new_tally(context: TaskContext, split: EvaluationSplit, rows: Sequence[int] | None) -> Tally:
    dataset = context.data.held_out(split)
    objective, labels = context.objective, dataset.label_set
    derivation = None if objective.derived is None or labels is None else Derivation(objective.derived, labels)
    return Tally(objective.mean_metrics, context.row_values, dataset.weights, dataset.sources, derivation, rows)
