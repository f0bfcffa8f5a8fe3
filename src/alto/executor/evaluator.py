"""Evaluates jobs on held-out rows."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext

import torch

from alto.data import EvaluationSplit, JobRows
from alto.executor.auxiliary_terms import AuxiliaryTerms
from alto.executor.context import JobState, TaskContext
from alto.executor.forward_plan import JobBatch, Passes, divided
from alto.executor.init_adapter import Within
from alto.executor.micro_batches import watching
from alto.executor.rollouts import Rollouts
from alto.executor.tally import Evaluated, Tally
from alto.kernels import upload
from alto.objectives import micro_batch_terms, terms_of, token_losses
from alto.spec import JobConfig


class Evaluator:
    """Evaluates the jobs in the slots of a bank, and the base model without them."""

    def __init__(self, passes: Passes) -> None:
        self.passes = passes
        self._auxiliary = AuxiliaryTerms(passes)
        self._rollouts = Rollouts(passes)

    @torch.no_grad()
    def evaluate(
        self,
        jobs: Sequence[JobState],
        split: EvaluationSplit = "validation",
        rows: Sequence[Sequence[int]] | None = None,
    ) -> list[Evaluated]:
        """Evaluate every resident job in ``jobs``, all of one task, on rows of a split; the loss is the training loss.

        Args:
            rows: Rows for each job, in the order in which their values are kept; None for all rows of the split.

        Raises:
            RowTooLargeError: A single row does not fit into memory.
            RewardFailedError: A reward of the job's completions failed.
            DeviceMemoryError: A micro-batch does not fit, and other ranks have already begun it.
        """
        passes = self.passes
        if jobs and jobs[0].context.rewards is not None:
            return self._rollouts.evaluate(jobs, split, rows)
        local_jobs, index_of = passes.local_jobs(jobs), passes.index_of(jobs)
        of_jobs = [None] * len(jobs) if rows is None else rows
        all_tallies = [_new_tally(job.context, split, of_job) for job, of_job in zip(jobs, of_jobs, strict=True)]
        batches: list[JobBatch] = [
            (job, job.context.data.held_out(split), tally.rows) for job, tally in zip(jobs, all_tallies, strict=True)
        ]
        auxiliary = self._auxiliary.of_evaluation(batches)
        work, num_micro_batches = passes.work(batches, split_jobs=True)
        tallies = {local_slot: all_tallies[index_of[local_slot]] for local_slot in local_jobs}

        def accumulate(parts: Sequence[JobRows]) -> None:
            with watching("evaluation"):
                batch = passes.collate(parts)
                learners = passes.learners([local_jobs[local_slot] for local_slot in batch.slots])
                for term in auxiliary:
                    indices = [index_of[local_slot] for local_slot in batch.slots]
                    batch = term.completed(batch, upload(indices, torch.int64, passes.backbone.device))
                with passes.evaluating(batch, local_jobs):
                    group_terms = micro_batch_terms(passes.backbone, batch, learners)
                left = iter(parts)
                for group, terms in zip(learners, group_terms, strict=bool(parts)):
                    of_group = list(itertools.islice(left, len(group.configs)))
                    Tally.add_micro_batch(
                        [tallies[part.slot] for part in of_group], [part.rows for part in of_group], terms
                    )

        def prepare() -> None:
            for term in auxiliary:
                term.prepare()

        self._run(work, accumulate, tallies.values(), num_micro_batches, prepare)
        return self._evaluated(all_tallies)

    @torch.no_grad()
    def sample_rows(self, jobs: Sequence[JobState], max_tokens: int) -> int:
        """Sample a completion of at most ``max_tokens`` for each row of the next step of ``jobs``, for profiling. Rows
        of a group share the first one's prompt.

        Returns:
            The tokens of the prompts, each once for its group, and of the completions.

        Raises:
            DeviceMemoryError: Memory is too small for a single completion.
        """
        return self._rollouts.sample_rows(jobs, max_tokens)

    @torch.no_grad()
    def evaluate_base(
        self,
        context: TaskContext,
        configs: Sequence[JobConfig],
        split: EvaluationSplit = "validation",
        within: Within = lambda num_tokens: nullcontext(),
        rows: Sequence[int] | None = None,
    ) -> list[Evaluated]:
        """Evaluate the jobs' starting point on a split of a task, once for each of ``configs`` with its settings of the
        objective. The starting point is the frozen base model, or a saved adapter on it.

        Args:
            within: Context in which forward passes compute the starting point; by default, the base model.
            rows: The rows to evaluate, in the order in which their values are kept; None for all rows of the split.

        Raises:
            RowTooLargeError: A single row does not fit into memory.
            DeviceMemoryError: A micro-batch does not fit, and other ranks have already begun it.
        """
        if context.rewards is not None:
            dataset = context.data.held_out(split)
            chosen = range(len(dataset)) if rows is None else rows
            return [self._rollouts.evaluate_base(context, config, dataset, chosen, within) for config in configs]
        tallies = [_new_tally(context, split, rows) for _ in configs]
        dataset, shares_beginnings = context.data.held_out(split), self.passes.backbone.shares_beginnings
        everything = JobRows(dataset, 0, tallies[0].rows, shares_beginnings=shares_beginnings)
        work, num_micro_batches = divided(everything, self.passes.micro_batches, self.passes.ranks)

        def accumulate(parts: Sequence[JobRows]) -> None:
            with watching("evaluation"):
                batch = self._auxiliary.at_start(self.passes.collate(parts))
                with within(sum(batch.job_tokens)):
                    losses_S = token_losses(self.passes.backbone, batch)
                for config, tally in zip(configs, tallies, strict=True) if parts else ():
                    terms = terms_of(context.objective, losses_S, batch, [config])
                    Tally.add_micro_batch([tally], [part.rows for part in parts], terms)

        self._run(work, accumulate, tallies, num_micro_batches)
        return self._evaluated(tallies)

    def _run(
        self,
        work: Sequence[JobRows],
        accumulate: Callable[[Sequence[JobRows]], None],
        tallies: Iterable[Tally],
        num_micro_batches: int,
        prepare: Callable[[], None] = lambda: None,
    ) -> None:
        """Evaluate one micro-batch at a time; reset all tallies if memory runs out."""
        tallies = list(tallies)

        def forget() -> None:
            for tally in tallies:
                tally.forget()

        self.passes.micro_batches.run(
            work, accumulate, forget=forget, prepare=prepare, split_jobs=True, num_micro_batches=num_micro_batches
        )

    def _evaluated(self, tallies: Sequence[Tally]) -> list[Evaluated]:
        """Return the evaluations from the tallies of all ranks."""
        values = [tally.values() for tally in tallies]
        totals = iter(self.passes.ranks.sum([value for of_one in values for value in of_one]))
        return [
            tally.evaluated(list(itertools.islice(totals, len(of_one))))
            for tally, of_one in zip(tallies, values, strict=True)
        ]


def _new_tally(context: TaskContext, split: EvaluationSplit, rows: Sequence[int] | None) -> Tally:
    dataset = context.data.held_out(split)
    objective, labels = context.objective, dataset.label_set
    derived = None if objective.derived is None or labels is None else (objective.derived, labels)
    return Tally(objective.mean_metrics, context.row_values, dataset.weights, dataset.sources, derived, rows)
