"""The arithmetic of jobs on one device: a bank on a frozen base model, stepped for any set of slots.

Each rank has a trainer with its own bank. All trainers are called with the same jobs and run their share, in as many
micro-batches as the rank that needs most: every micro-batch gathers the base model from all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor

from alto.backbone import is_out_of_memory, release_memory
from alto.data import JobRows
from alto.errors import DeviceMemoryError
from alto.executor.context import ROUTER_LOSS, JobState
from alto.executor.evaluator import Evaluator
from alto.executor.forward_plan import JobBatch, Passes, schedule_of
from alto.executor.micro_batches import NoMemoryError, watching
from alto.executor.rollouts import Rollout
from alto.kernels import upload
from alto.lora import AdapterWeights, BankOptimizer, OptimizerState, SlotUpdate, compile_kernels
from alto.objectives import AuxiliaryTerm, job_losses
from alto.spec import JobConfig


class Trainer(Evaluator):
    """Trains and evaluates the jobs in its slots; makes no decisions. Built by
    :func:`alto.executor.shared_bank.build_trainer`.

    Rows and objective come from the context of each job's task. The bank may hold jobs of several tasks, which train in
    the same micro-batches. In every list of jobs, the jobs of a task are next to each other.

    If memory runs out in a step or an evaluation, the work starts again from the same state with smaller micro-batches.
    """

    def __init__(self, passes: Passes, optimizer: BankOptimizer) -> None:
        super().__init__(passes)
        self.bank = passes.bank
        self.optimizer = optimizer
        self._terms: Sequence[AuxiliaryTerm] = ()
        self._batched: Sequence[JobState] = ()

    def compile_kernels(self, configs: Sequence[JobConfig]) -> Iterator[tuple[int, int]]:
        """Compile the kernels that steps of jobs with ``configs`` launch, one at each iteration; called between two
        steps.

        Returns:
            An iterator over pairs: kernels compiled so far, and all kernels; empty if there is nothing to compile.
        """
        return compile_kernels(
            self.bank,
            self.optimizer,
            self.passes.backbone.dtype,
            has_dropout=any(config.lora_dropout for config in configs),
            has_adamw=any(config.optim == "adamw_torch" for config in configs),
            also=self.passes.backbone.sample_kernels,
        )

    # -- jobs in slots -------------------------------------------------------------------------------------------

    def admit(
        self,
        job: JobState,
        local_slot: int,
        weights: AdapterWeights | None = None,
        optimizer: OptimizerState | None = None,
    ) -> None:
        """Give ``local_slot`` of this rank's bank to a job.

        Args:
            weights: Weights that it begins with, or that it had when it was parked; None initialises new ones.
            optimizer: Optimizer state of a parked job; None for a job that has not trained yet.
        """
        self.bank.occupy(local_slot, job.shape)
        if weights is not None:
            self.bank.write(local_slot, weights)
        else:
            self.bank.initialise(local_slot, job.config.seed, job.config.init_lora_weights)
            if job.context.objective.has_head:
                self.passes.heads.initialise(local_slot, self.passes.backbone.model, job.config.seed)
        if optimizer is not None:
            self.optimizer.write(local_slot, job.config.optim, optimizer)
        else:
            self.optimizer.reset(local_slot, job.config.optim)

    # -- a step --------------------------------------------------------------------------------------------------

    def step(self, jobs: Sequence[JobState]) -> list[float]:
        """Run one optimizer step of every resident job in ``jobs`` on its next batch; the job's step count is not
        changed. For profiling and benchmarks; the executor calls the parts of a step itself.

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

        The gradients are left in the bank and include the losses of auxiliary terms; gradients of a data-parallel job
        are summed over the ranks.

        Returns:
            Losses ``[len(jobs)]`` without those of auxiliary terms, from the rows that this rank has; see :meth:`read`.
            For jobs that generate, the negative mean reward of their completions.

        Raises:
            RowTooLargeError: A single row does not fit into memory; no gradients are left.
            RewardFailedError: A reward of a job's completions failed; nothing is changed.
            DeviceMemoryError: A micro-batch does not fit, and other ranks have already begun it.
        """
        passes = self.passes
        local_jobs, index_of = passes.local_jobs(jobs), passes.index_of(jobs)
        rollouts = self._rollouts.of_step([job for job in jobs if job.context.rewards is not None])
        of_jobs = {job: (job, dataset, rows) for job, dataset, rows in (*_batches(jobs), *_sampled_batches(rollouts))}
        batches = [of_jobs[job] for job in jobs if job in of_jobs]
        self._batched = [job for job, _, _ in batches]
        in_batches = passes.index_of(self._batched)
        self._terms = terms = self._auxiliary.of_step(batches)
        work, num_micro_batches = passes.work(batches, is_step=True)
        losses: Tensor | None = None
        if not work:  # no completion has an advantage
            losses = torch.zeros(len(jobs), device=passes.backbone.device)

        def prepare() -> None:
            for term in terms:
                term.prepare()

        def train(parts: Sequence[JobRows]) -> None:
            nonlocal losses
            of_parts = terms if parts else ()
            with watching("forward"):
                losses = torch.zeros(len(jobs), device=passes.backbone.device) if losses is None else losses
                prepared = passes.prepared.take_batch(parts)
                batch = passes.collate(parts) if prepared is None else prepared
                learners = passes.learners([local_jobs[local_slot] for local_slot in batch.slots])
                indices_J = upload([index_of[local_slot] for local_slot in batch.slots], torch.int64, losses.device)
                of_terms_J = indices_J
                if len(batches) < len(jobs):
                    of_terms_J = upload([in_batches[slot] for slot in batch.slots], torch.int64, losses.device)
                for term in terms:
                    batch = term.completed(batch, of_terms_J)
                training = passes.training(batch, local_jobs)
            with training:
                with watching("forward"):
                    with ExitStack() as recording:
                        for term in of_parts:
                            recording.enter_context(term.recording())
                        losses_J = trained_J = job_losses(passes.backbone, batch, learners)
                    for term in of_parts:
                        added_J = term.losses(parts)
                        trained_J = trained_J if added_J is None else trained_J + added_J
                with watching("backward"):
                    trained_J.sum().backward()
                    if parts:
                        losses.index_add_(0, indices_J, losses_J.detach())

        def forget() -> None:
            nonlocal losses
            losses = None
            for term in terms:
                term.forget()
            self.bank.clear_gradients(list(local_jobs))

        self.passes.micro_batches.run(work, train, forget=forget, prepare=prepare, num_micro_batches=num_micro_batches)
        self.bank.complete_gradients(local_jobs)
        self._share_gradients([job for job in jobs if job.is_data_parallel])
        assert losses is not None, "at least one job trains"
        for index, job in enumerate(jobs):
            if job in rollouts:  # a loss that is not finite stays so
                losses[index] = 0.0 - rollouts[job].metrics["reward"] + losses[index] * 0.0
        return losses

    def update(self, jobs: Sequence[JobState]) -> Tensor:
        """Clip and apply the gradients of ``jobs``, which are invalid afterwards; return the norms before clipping of
        this rank's jobs.

        Raises:
            DeviceMemoryError: Memory is too small for the optimizer step; :meth:`has_stepped` says which jobs have
                taken it.
        """
        left = self.passes.local_jobs(jobs)
        if not left:
            return torch.zeros(0, device=self.passes.backbone.device)
        index_of = {local_slot: index for index, local_slot in enumerate(left)}
        norms: Tensor | None = None
        is_last_try = False
        while left:
            try:
                with watching("update"):
                    norms = self.optimizer.gradient_norms(list(left)) if norms is None else norms
                    is_whole = len(left) == len(index_of)
                    self.optimizer.step(
                        [
                            SlotUpdate(slot=local_slot, config=job.config, learning_rate=job.learning_rate)
                            for local_slot, job in left.items()
                        ],
                        norms if is_whole else norms[[index_of[local_slot] for local_slot in left]],
                    )
                break
            except NoMemoryError:
                pass  # retry outside of this clause, because the error keeps the tensors that must be released
            release_memory()
            self.passes.micro_batches.report("update", list(left))
            num_before = len(left)
            left = {local_slot: job for local_slot, job in left.items() if not self.has_stepped(job)}
            if is_last_try and len(left) == num_before:
                raise DeviceMemoryError(
                    f"not enough memory on {self.passes.backbone.device} for the optimizer step of {len(left)} jobs; "
                    "free memory, or lower max_slots"
                )
            is_last_try = len(left) == num_before
        assert norms is not None
        return norms

    def prepare(self, jobs: Sequence[JobState]) -> None:
        """Make the batches of the step after the current one, which ``jobs`` have not counted yet, and send them to the
        device. Called after :meth:`update` and before :meth:`read`, while the device computes.

        If the next step has other jobs or smaller micro-batches, it makes its own batches. The same holds if these
        batches do not fit into memory together with the batches of the current step.

        Raises:
            Exception: A batch cannot be made, for example because rows cannot be read.
        """
        passes, prepared = self.passes, self.passes.prepared
        prepared.forget()
        jobs = [job for job in jobs if job.step + 1 < job.total_steps]
        local_jobs = passes.local_jobs(jobs)
        try:
            work, _ = passes.work(_batches(jobs, steps_ahead=1), is_step=True)
            for parts in self.passes.micro_batches.split(work):
                batch = passes.collate(parts)
                prepared.add(parts, batch, schedule_of(batch, local_jobs, training=True, steps_ahead=1))
        except Exception as error:
            prepared.forget()
            if not is_out_of_memory(error):
                raise

    def read(self, losses: Tensor) -> list[float]:
        """Return the losses of :meth:`backward`, summed over all ranks. Called last: this is the first host-device
        synchronisation of the step."""
        return self.passes.ranks.sum([float(loss) for loss in losses.tolist()])

    def step_metrics(self, jobs: Sequence[JobState]) -> Sequence[Mapping[str, float]]:
        """Return the measurements of the last step of each of ``jobs``, without its loss: means over the completions
        that it sampled, and the router loss without its factor (``router_loss``). Call this method once per step,
        because it frees the terms and the data of their jobs."""
        terms, self._terms = self._terms, ()
        values = next((values for term in terms if (values := term.values())), [None] * len(self._batched))
        of_jobs = dict(zip(self._batched, values, strict=True))
        added = ({} if (value := of_jobs.get(job)) is None else {ROUTER_LOSS: value} for job in jobs)
        return [{**self._rollouts.metrics(job), **own} for job, own in zip(jobs, added, strict=True)]

    def forget(self) -> None:
        """Clear all gradients, after an error in :meth:`backward`."""
        self.bank.grads_ZP.zero_()

    def has_stepped(self, job: JobState) -> bool:
        """Return whether the adapter of a resident job has taken the step that the job has not counted yet. A job on
        another rank has taken it: otherwise this executor would have ended."""
        local_slot = self.passes.local_slot(job)
        return local_slot is None or self.optimizer.steps[local_slot] > job.step

    def _share_gradients(self, jobs: Sequence[JobState]) -> None:
        """Sum the gradients of data-parallel jobs over all ranks."""
        for job in jobs:
            local_slot = self.passes.local_slot(job)
            assert local_slot is not None, "every rank has the job"
            self.passes.ranks.all_reduce(self.bank.grads_ZP[local_slot, : self.bank.places(local_slot).end])
            self.bank.forget_square_sums([local_slot])


def _batches(jobs: Sequence[JobState], *, steps_ahead: int = 0) -> list[JobBatch]:
    """Return the next batch of every job that does not generate its rows, or the batch ``steps_ahead`` steps later."""
    return [
        (job, job.context.data.train, tuple(job.order.rows_of_step(job.step + steps_ahead)))
        for job in jobs
        if job.context.rewards is None
    ]


def _sampled_batches(rollouts: Mapping[JobState, Rollout]) -> list[JobBatch]:
    """Return the completions of every job that has some with a gradient."""
    datasets = {job: rollout.dataset for job, rollout in rollouts.items()}
    return [(job, dataset, tuple(range(len(dataset)))) for job, dataset in datasets.items() if len(dataset)]
