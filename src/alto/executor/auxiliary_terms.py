"""The auxiliary terms of objectives and models: KTO's reference point, and the load balance of routers.

To add a term, write a subclass of :class:`alto.objectives.AuxiliaryTerm` and list it in :class:`AuxiliaryTerms`; the
trainer treats all terms in the same way.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from alto.backbone import recorded_routers, router_sums
from alto.data import EncodedDataset, JobRows, TokenBatch, mismatched_rows
from alto.executor.context import JobState
from alto.executor.forward_plan import JobBatch, Passes
from alto.executor.init_adapter import InitAdapter
from alto.executor.micro_batches import watching
from alto.kernels import send, upload
from alto.objectives import AuxiliaryTerm, run_sums, token_losses
from alto.spec import GrpoSettings


class AuxiliaryTerms:
    """Makes the auxiliary terms of each step and evaluation."""

    def __init__(self, passes: Passes) -> None:
        self._passes = passes
        self._references = References(passes)

    def of_evaluation(self, batches: Sequence[JobBatch]) -> list[AuxiliaryTerm]:
        """Return the terms of an evaluation of jobs on these rows."""
        if not any(job.config.objective.needs_kl for job, _, _ in batches):
            return []
        return [ReferenceKl(self._passes, batches, self._references)]

    def of_step(self, batches: Sequence[JobBatch]) -> list[AuxiliaryTerm]:
        """Return the terms of a training step on these rows; ``batches`` contains the batches of all ranks."""
        has_balance = any(job.planned.router_aux_loss_coef for job, _, _ in batches)
        has_reference = any(_needs_reference_losses(job) for job, _, _ in batches)
        return [
            *self.of_evaluation(batches),
            *([ReferenceLosses(self._passes, batches, self._references)] if has_reference else []),
            *([RouterBalance(self._passes, batches)] if has_balance else []),
        ]

    def at_start(self, batch: TokenBatch) -> TokenBatch:
        """Complete a micro-batch for an evaluation of the jobs' starting point; see :meth:`AuxiliaryTerm.completed`.
        The starting point is the reference itself, so the divergence is 0."""
        device = self._passes.backbone.device
        return replace(batch, kl_J=torch.zeros(len(batch.slots), dtype=torch.float64, device=device))


class References:
    """The references of jobs: the frozen base model, or the adapter that the jobs of a task begin with."""

    def __init__(self, passes: Passes) -> None:
        self._passes = passes
        self._start_rows: weakref.WeakKeyDictionary[InitAdapter, Tensor] = weakref.WeakKeyDictionary()

    def losses(self, batch: TokenBatch, local_jobs: Mapping[int, JobState]) -> Tensor:
        """Return the cross-entropy of every trained token under the reference of its job, ``[S]`` nats.

        With several ranks, all jobs belong to one task, so that all ranks run the same number of forward passes.

        Args:
            local_jobs: Jobs in this rank's bank, by local slot, including all jobs of ``batch``.
        """
        backbone = self._passes.backbone
        scales = [local_jobs[local_slot].config.objective.logit_scale for local_slot in batch.slots]
        starts = {local_slot: job.context.start for local_slot, job in local_jobs.items()}
        begun = {local_slot: start for local_slot, start in starts.items() if start is not None}
        if not begun:
            return token_losses(backbone, batch, scales)
        with self.start_weights(begun), self._passes.evaluating(batch, local_jobs):
            of_start_S = token_losses(backbone, batch, scales)
        if len(begun) == len(local_jobs):
            return of_start_S
        of_base_S = token_losses(backbone, batch, scales)
        begins = torch.tensor([local_slot in begun for local_slot in batch.slots])
        is_begun_S = begins.repeat_interleave(torch.tensor(batch.job_targets)).to(of_base_S.device)
        return torch.where(is_begun_S, of_start_S, of_base_S)

    @contextlib.contextmanager
    def start_weights(self, begun: Mapping[int, InitAdapter]) -> Iterator[None]:
        """Put the adapters that jobs began with into their local slots; restore the current adapters bit by bit on
        exit."""
        bank = self._passes.bank
        params_ZP = bank.params_ZP
        kept = {local_slot: params_ZP[local_slot].clone() for local_slot in begun}
        try:
            for local_slot, start in begun.items():
                if start not in self._start_rows:
                    bank.write(local_slot, start.weights)
                    self._start_rows[start] = params_ZP[local_slot].clone()
                params_ZP[local_slot].copy_(self._start_rows[start])
                bank.copy_weights(local_slot)
            yield
        finally:
            for local_slot, row_P in kept.items():
                params_ZP[local_slot].copy_(row_P)
                bank.copy_weights(local_slot)


class ReferenceKl(AuxiliaryTerm):
    """The divergence of jobs from their references, an estimate that KTO's loss needs (TRL 1.16, ``KTOTrainer``, for a
    model with a trained adapter too).

    The estimate is the mean log-ratio of prompts with the replies of other rows, over a job's complete batch; at least
    0.
    """

    def __init__(self, passes: Passes, batches: Sequence[JobBatch], references: References) -> None:
        self._passes = passes
        self._batches = batches
        self._references = references
        self._means: Tensor | None = None

    def prepare(self) -> None:
        if self._means is None:
            self._means = self._estimated()

    def completed(self, batch: TokenBatch, indices_J: Tensor) -> TokenBatch:
        assert self._means is not None, "it was prepared"
        return replace(batch, kl_J=self._means.index_select(0, indices_J))

    @torch.no_grad()
    def _estimated(self) -> Tensor:
        """Return the estimate for each job, ``[len(batches)]`` float64 nats; 0 for jobs that do not need it."""
        passes = self._passes
        with_kl = [(index, *batch) for index, batch in enumerate(self._batches) if batch[0].config.objective.needs_kl]
        mismatched = {(id(dataset), rows): mismatched_rows(dataset, rows) for _, _, dataset, rows in with_kl}
        kl_batches: list[JobBatch] = [
            (job, mismatched[id(dataset), rows], tuple(range(len(rows)))) for _, job, dataset, rows in with_kl
        ]
        local_jobs = passes.local_jobs([job for job, _, _ in kl_batches])
        index_of = passes.index_of([job for job, _, _ in self._batches])
        work, num_micro_batches = passes.work(kl_batches, split_jobs=True)
        means = torch.zeros(len(self._batches), dtype=torch.float64, device=passes.backbone.device)

        def estimate(parts: Sequence[JobRows]) -> None:
            with watching("evaluation"):
                batch = passes.collate(parts)
                with passes.evaluating(batch, local_jobs):
                    losses_S = token_losses(passes.backbone, batch)
                log_ratios_S = self._references.losses(batch, local_jobs).double() - losses_S.double()
                if parts:
                    sums_J = run_sums(log_ratios_S, batch.job_targets)
                    sums_J = sums_J / upload(list(batch.job_weights), torch.float64, means.device)
                    indices = [index_of[local_slot] for local_slot in batch.slots]
                    means.index_add_(0, upload(indices, torch.int64, means.device), sums_J)

        def forget() -> None:
            means.zero_()

        passes.micro_batches.run(work, estimate, forget=forget, split_jobs=True, num_micro_batches=num_micro_batches)
        if not passes.ranks.is_alone:
            means = torch.tensor(passes.ranks.sum(means.tolist()), dtype=torch.float64, device=means.device)
        return means.clamp(min=0)


def _needs_reference_losses(job: JobState) -> bool:
    settings = job.config.objective
    return isinstance(settings, GrpoSettings) and settings.beta > 0


class ReferenceLosses(AuxiliaryTerm):
    """The losses of sampled completions under the reference of their jobs, for the divergence in GRPO's loss."""

    def __init__(self, passes: Passes, batches: Sequence[JobBatch], references: References) -> None:
        self._local_jobs = passes.local_jobs([job for job, _, _ in batches])
        self._references = references

    @torch.no_grad()
    def completed(self, batch: TokenBatch, indices_J: Tensor) -> TokenBatch:
        local_jobs = {local_slot: self._local_jobs[local_slot] for local_slot in batch.slots}
        if not any(map(_needs_reference_losses, local_jobs.values())):
            return batch
        return replace(batch, reference_losses_S=self._references.losses(batch, local_jobs))


class RouterBalance(AuxiliaryTerm):
    """The load-balancing losses of the routers in one step, for each job over its own tokens.

    The loss is a product of two means over the tokens of a micro-step, as transformers' Trainer computes it for each
    forward pass over ``per_device_train_batch_size`` rows; over several micro-steps TRL takes the mean. If the rows of
    a job are in several micro-batches or on several ranks, the choices of each expert are therefore counted before the
    first of these micro-batches.

    Shapes: ``T`` tokens, ``J`` jobs of a micro-batch, ``U`` micro-steps of all jobs in it, ``E`` experts.

    Args:
        batches: Every job of the step on all ranks, with its dataset and the rows of its batch.
    """

    def __init__(self, passes: Passes, batches: Sequence[JobBatch]) -> None:
        self._passes = passes
        self._backbone, self._ranks = passes.backbone, passes.ranks
        self._batches = batches
        jobs = [job for job, _, _ in batches]
        self._local_jobs, self._index_of = passes.local_jobs(jobs), passes.index_of(jobs)
        self._micro_steps = [_MicroSteps.of(*batch) for batch in batches]
        self._counts: dict[int, Tensor] = {}
        self._balance_J: Tensor | None = None
        self._routers: list[Tensor] = []

    def prepare(self) -> None:
        """Count the choices of the jobs whose rows are in several micro-batches or on several ranks."""
        uncounted = [
            index
            for index, (job, dataset, rows) in enumerate(self._batches)
            if self._micro_steps[index].coefficient
            and index not in self._counts
            and (job.is_data_parallel or not self._passes.micro_batches.fits(JobRows(dataset, 0, rows)))
        ]
        if uncounted:
            self._count(uncounted)

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        with recorded_routers(self._backbone) as self._routers:
            yield

    def losses(self, parts: Sequence[JobRows]) -> Tensor:
        routers, self._routers = self._routers, []  # a reference would keep their memory until the next micro-batch
        jobs = [self._index_of[part.slot] for part in parts]
        device = routers[0].device
        coefficients_J = upload([self._micro_steps[job].coefficient for job in jobs], torch.float64, device)
        balance_J = self._balance(routers, parts, jobs)
        if self._balance_J is None:
            self._balance_J = balance_J.new_zeros(len(self._batches))
        self._balance_J.index_add_(0, upload(jobs, torch.int64, device), balance_J.detach())
        return (coefficients_J * balance_J).float()

    def forget(self) -> None:
        """Forget the losses so far, but keep the counts."""
        self._balance_J = None
        self._routers = []

    def values(self) -> list[float | None]:
        found = [0.0] * len(self._batches) if self._balance_J is None else self._balance_J.tolist()
        totals = zip(self._ranks.sum(found), self._micro_steps, strict=True)
        return [total if steps.coefficient else None for total, steps in totals]

    @torch.no_grad()
    def _count(self, jobs: Sequence[int]) -> None:
        """Count how often each expert is chosen in every micro-step of the jobs with these indices, in forward passes
        without gradients, but with the dropout and noise of the step.

        Raises:
            RowTooLargeError, DeviceMemoryError: See :meth:`alto.executor.MicroBatches.run`.
        """
        passes, found = self._passes, dict[int, Tensor]()
        work, num_micro_batches = passes.work([self._batches[index] for index in jobs], split_jobs=True)

        def add(parts: Sequence[JobRows]) -> None:
            with watching("forward"), recorded_routers(self._backbone) as routers:
                batch = passes.collate(parts)
                with passes.training(batch, self._local_jobs):
                    self._backbone.hidden_states(
                        batch.input_ids_T, batch.position_ids_T, batch.sequence_lengths, batch.sequence_prefixes
                    )
                for index in jobs:
                    if index not in found:
                        shape = (len(self._micro_steps[index].num_tokens), routers[0].shape[-1])
                        found[index] = torch.zeros(shape, dtype=torch.float64, device=routers[0].device)
                if parts:
                    runs = self._runs(parts, [self._index_of[part.slot] for part in parts])
                    chosen_UE, _ = self._sums(routers, runs, parts)
                    for run, chosen_E in zip(runs, chosen_UE, strict=True):
                        found[run.job][run.number] += chosen_E

        passes.micro_batches.run(work, add, forget=found.clear, split_jobs=True, num_micro_batches=num_micro_batches)
        for index, chosen_UE in found.items():
            if not self._ranks.is_alone:
                totals = self._ranks.sum(chosen_UE.flatten().tolist())
                chosen_UE = torch.tensor(totals, dtype=torch.float64, device=chosen_UE.device).view_as(chosen_UE)
            self._counts[index] = chosen_UE

    def _balance(self, routers: Sequence[Tensor], parts: Sequence[JobRows], jobs: Sequence[int]) -> Tensor:
        """Return the load-balancing loss of every job in a micro-batch, ``[J]`` float64: the mean over its
        micro-steps."""
        runs = self._runs(parts, jobs)
        chosen_UE, probabilities_UE = self._sums(routers, runs, parts)
        split = {
            job
            for part, job in zip(parts, jobs, strict=True)
            if part.whole is not None and self._micro_steps[job].coefficient
        }
        if split:
            of_runs = zip(runs, chosen_UE, strict=True)
            chosen_UE = torch.stack(
                [self._counts[run.job][run.number] if run.job in split else chosen_E for run, chosen_E in of_runs]
            )
        num_experts, num_layers = chosen_UE.shape[-1], len(routers)
        factors = [
            num_experts
            / (self._micro_steps[run.job].num_tokens[run.number] * num_layers) ** 2
            / len(self._micro_steps[run.job].num_tokens)
            for run in runs
        ]
        losses_U = (chosen_UE * probabilities_UE).sum(1) * upload(factors, torch.float64, chosen_UE.device)
        num_runs = [len(list(of_job)) for _, of_job in itertools.groupby(runs, key=lambda run: run.job)]
        return run_sums(losses_U, num_runs)

    def _sums(self, routers: Sequence[Tensor], runs: Sequence[_Run], parts: Sequence[JobRows]) -> tuple[Tensor, Tensor]:
        """Return, for each micro-step in a micro-batch, the expert counts and the summed probabilities (see
        :func:`alto.backbone.router_sums`)."""
        lengths = [run.num_tokens for run in runs]
        return router_sums(self._backbone, routers, lengths, _weights(parts, routers[0].device))

    def _runs(self, parts: Sequence[JobRows], jobs: Sequence[int]) -> list[_Run]:
        return [
            _Run(job, number, num_tokens)
            for part, job in zip(parts, jobs, strict=True)
            for number, num_tokens in self._micro_steps[job].runs(part)
        ]


@dataclass(frozen=True, slots=True)
class _Run:
    """Consecutive tokens of a micro-batch that belong to one micro-step.

    Attributes:
        number: Number of the micro-step, from 0.
    """

    job: int
    number: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _MicroSteps:
    """The micro-steps of a job's batch.

    Attributes:
        coefficient: Factor of the load-balancing loss; 0 if it is not added.
        num_rows: Rows of a micro-step; the last may have fewer.
        first_tokens: For each row, the tokens of the batch before it.
        num_tokens: Tokens of the sequences of every micro-step; the prompt of a pair counts for both sequences.
    """

    coefficient: float
    num_rows: int
    first_tokens: tuple[int, ...]
    num_tokens: tuple[int, ...]

    @classmethod
    def of(cls, job: JobState, dataset: EncodedDataset, rows: Sequence[int]) -> Self:
        size = job.config.per_device_train_batch_size
        row_tokens = [sum(span.prefix + span.length for span in dataset.spans[row]) for row in rows]
        starts = itertools.accumulate((dataset.num_row_tokens[row] for row in rows), initial=0)
        return cls(
            coefficient=job.planned.router_aux_loss_coef,
            num_rows=size,
            first_tokens=tuple(starts)[:-1],
            num_tokens=tuple(sum(row_tokens[first : first + size]) for first in range(0, len(rows), size)),
        )

    def runs(self, part: JobRows) -> list[tuple[int, int]]:
        """Return the numbers of the micro-steps that the rows of ``part`` belong to, each with its tokens."""
        first, tokens = self.first_tokens.index(part.first_token), dict[int, int]()
        for place, row in enumerate(part.rows, start=first):
            number = place // self.num_rows
            tokens[number] = tokens.get(number, 0) + part.dataset.num_row_tokens[row]
        return list(tokens.items())


def _weights(parts: Sequence[JobRows], device: torch.device) -> Tensor | None:
    """Return the number of sequences that each token belongs to, ``[T]`` float64: the tokens of a pair's prompt belong
    to two sequences. None if every token belongs to one sequence."""
    spans = [span for part in parts for row in part.rows for span in part.dataset.spans[row]]
    if not any(span.prefix for span in spans):
        return None
    weights_T = torch.ones(sum(span.length for span in spans), dtype=torch.float64)
    before = first = 0
    for span in spans:
        weights_T[before : before + span.prefix] += 1
        before, first = first, first + span.length
    return send(weights_T, device)
