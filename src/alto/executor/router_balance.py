"""The load-balancing losses of the routers in one step, for each job over its own tokens.

The loss is a product of two means over the tokens of a micro-step, as transformers' Trainer computes it for each
forward pass over ``per_device_train_batch_size`` rows; over several micro-steps TRL takes the mean. If the rows of a
job are in several micro-batches or on several ranks, the choices of each expert are therefore counted before the first
of these micro-batches.

Shapes: ``T`` tokens, ``J`` jobs of a micro-batch, ``U`` micro-steps of all jobs in it, ``E`` experts.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from alto.backbone import Backbone, recorded_routers, router_sums
from alto.data import EncodedDataset, JobRows, TokenBatch
from alto.executor.job_state import JobState
from alto.executor.micro_batches import MicroBatches, watching
from alto.executor.ranks import Ranks
from alto.kernels import upload
from alto.objectives import Learners, job_losses, run_sums


class RouterBalance:
    """The load-balancing losses of one step.

    Args:
        backbone: The base model.
        batches: Every job of the step on all ranks, with its dataset and the rows of its batch.
        ranks: The processes that train the jobs together.
    """

    def __init__(
        self, backbone: Backbone, batches: Sequence[tuple[JobState, EncodedDataset, tuple[int, ...]]], ranks: Ranks
    ) -> None:
        self._backbone = backbone
        self._batches = batches
        self._micro_steps = [_MicroSteps.of(*batch) for batch in batches]
        self._ranks = ranks
        self._counts: dict[int, Tensor] = {}
        self._found: Tensor | None = None

    def forget(self) -> None:
        """Forget the losses so far, but keep the counts."""
        self._found = None

    def values(self) -> list[float | None]:
        """Return the loss of every job of the step, without its factor; None for jobs that train without it. All ranks
        call this together, after the backward pass."""
        found = [0.0] * len(self._batches) if self._found is None else self._found.tolist()
        totals = zip(self._ranks.sum(found), self._micro_steps, strict=True)
        return [total if steps.coefficient else None for total, steps in totals]

    def uncounted(self, micro_batches: MicroBatches) -> list[int]:
        """Return the indices of the jobs whose rows are in several micro-batches or on several ranks and are not
        counted yet."""
        return [
            index
            for index, (job, dataset, rows) in enumerate(self._batches)
            if self._micro_steps[index].coefficient
            and index not in self._counts
            and (job.is_data_parallel or not micro_batches.fits(JobRows(dataset, 0, rows)))
        ]

    @torch.no_grad()
    def count(
        self,
        jobs: Sequence[int],
        work: Sequence[JobRows],
        num_micro_batches: int,
        forward: Callable[[Sequence[JobRows]], None],
        index_of: Mapping[int, int],
        micro_batches: MicroBatches,
    ) -> None:
        """Count how often each expert is chosen in every micro-step of some jobs, in forward passes without gradients.

        Args:
            jobs: Indices of the jobs.
            work: This rank's share of their rows.
            num_micro_batches: Smallest number of micro-batches; a rank that has fewer gets empty ones.
            forward: Runs a forward pass over rows as they are trained.
            index_of: Index of the job in each local slot.
            micro_batches: Splits ``work``.

        Raises:
            RowTooLargeError, DeviceMemoryError: See :meth:`MicroBatches.run`.
        """
        found: dict[int, Tensor] = {}

        def add(parts: Sequence[JobRows]) -> None:
            with watching("forward"), recorded_routers(self._backbone) as routers:
                forward(parts)
                for index in jobs:
                    if index not in found:
                        shape = (len(self._micro_steps[index].num_seen), routers[0].shape[-1])
                        found[index] = torch.zeros(shape, dtype=torch.float64, device=routers[0].device)
                if parts:
                    runs = self._runs(parts, [index_of[part.slot] for part in parts])
                    chosen_UE, _ = self._sums(routers, runs, parts)
                    for run, chosen_E in zip(runs, chosen_UE, strict=True):
                        found[run.job][run.number] += chosen_E

        micro_batches.run(work, add, forget=found.clear, split_jobs=True, num_micro_batches=num_micro_batches)
        for index, chosen_UE in found.items():
            if not self._ranks.is_alone:
                totals = self._ranks.sum(chosen_UE.flatten().tolist())
                chosen_UE = torch.tensor(totals, dtype=torch.float64, device=chosen_UE.device).view_as(chosen_UE)
            self._counts[index] = chosen_UE

    def job_losses(
        self, batch: TokenBatch, learners: Sequence[Learners], parts: Sequence[JobRows], index_of: Mapping[int, int]
    ) -> tuple[Tensor, Tensor]:
        """Return the result of :func:`alto.objectives.job_losses`, without and with the load-balancing losses, ``[J]``
        float32 each.

        If a job's rows are in several micro-batches, its load-balancing losses add up over them as its other losses do.

        Args:
            batch: The micro-batch, not a dummy.
            learners: The jobs of the micro-batch, grouped by task.
            parts: The rows of ``batch``.
            index_of: Index of the job in each local slot.
        """
        with recorded_routers(self._backbone) as routers:
            losses_J = job_losses(self._backbone, batch, learners)
        jobs = [index_of[part.slot] for part in parts]
        coefficients_J = upload([self._micro_steps[job].coefficient for job in jobs], torch.float64, losses_J.device)
        balance_J = self._losses(routers, parts, jobs)
        self._add(jobs, balance_J.detach())
        return losses_J, losses_J + (coefficients_J * balance_J).float()

    def _add(self, jobs: Sequence[int], balance_J: Tensor) -> None:
        if self._found is None:
            self._found = balance_J.new_zeros(len(self._batches))
        self._found.index_add_(0, upload(jobs, torch.int64, balance_J.device), balance_J)

    def _losses(self, routers: Sequence[Tensor], parts: Sequence[JobRows], jobs: Sequence[int]) -> Tensor:
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
            / (self._micro_steps[run.job].num_seen[run.number] * num_layers) ** 2
            / len(self._micro_steps[run.job].num_seen)
            for run in runs
        ]
        losses_U = (chosen_UE * probabilities_UE).sum(1) * upload(factors, torch.float64, chosen_UE.device)
        num_runs = [len(list(of_job)) for _, of_job in itertools.groupby(runs, key=lambda run: run.job)]
        return run_sums(losses_U, num_runs)

    def _sums(self, routers: Sequence[Tensor], runs: Sequence[_Run], parts: Sequence[JobRows]) -> tuple[Tensor, Tensor]:
        """Return :func:`alto.backbone.router_sums` of the micro-steps in a micro-batch."""
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
        job: Index of the job.
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
        num_seen: Tokens of the sequences of every micro-step; a pair's prompt counts in both sequences.
    """

    coefficient: float
    num_rows: int
    first_tokens: tuple[int, ...]
    num_seen: tuple[int, ...]

    @classmethod
    def of(cls, job: JobState, dataset: EncodedDataset, rows: Sequence[int]) -> Self:
        size = job.config.per_device_train_batch_size
        seen = [sum(span.prefix + span.length for span in dataset.spans[row]) for row in rows]
        starts = itertools.accumulate((dataset.num_row_tokens[row] for row in rows), initial=0)
        return cls(
            coefficient=job.planned.router_aux_loss_coef,
            num_rows=size,
            first_tokens=tuple(starts)[:-1],
            num_seen=tuple(sum(seen[first : first + size]) for first in range(0, len(rows), size)),
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
    to two. None if all tokens belong to one."""
    spans = [span for part in parts for row in part.rows for span in part.dataset.spans[row]]
    if not any(span.prefix for span in spans):
        return None
    weights_T = torch.ones(sum(span.length for span in spans), dtype=torch.float64)
    before = first = 0
    for span in spans:
        weights_T[before : before + span.prefix] += 1
        before, first = first, first + span.length
    return (weights_T.pin_memory() if device.type == "cuda" else weights_T).to(device, non_blocking=True)
