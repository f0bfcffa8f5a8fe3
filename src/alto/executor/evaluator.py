"""Evaluates jobs on held-out rows."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch

from alto.data import EvaluationSplit, JobRows
from alto.executor.auxiliary_terms import AuxiliaryTerms
from alto.executor.context import JobState, TaskContext
from alto.executor.forward_plan import JobBatch, Passes, divided
from alto.executor.init_adapter import Within
from alto.executor.micro_batches import watching
from alto.kernels import upload
from alto.objectives import DerivedMetrics, Terms, micro_batch_terms, terms_of, token_losses
from alto.records import LabelSet
from alto.spec import LOSS, JobConfig, source_metric


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """The result of evaluating a job on a split.

    Attributes:
        loss: The same loss as in training.
        metrics: Other metrics of the objective, by name.
        rows: Values of every evaluated row by name: the loss (the mean over the row's trained tokens; for a pair, the
            pair's loss) and the metric that selects jobs. A value of which only the mean is known is missing.
    """

    loss: float
    metrics: Mapping[str, float]
    rows: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    def rows_of(self, name: str | None) -> tuple[float, ...]:
        """Return the value of every row; empty if the values are not known or ``name`` is None."""
        return self.rows.get(name, ()) if name is not None else ()

    def kept_rows(self, context: TaskContext) -> tuple[float, ...]:
        """Return the losses of rows that decisions are based on, with six significant digits as in the journal; empty
        if every evaluation is on all rows."""
        if not context.evaluation_order:
            return ()
        return tuple(float(f"{value:.6g}") for value in self.rows_of(LOSS))


class Tally:
    """Sums over the rows of a split, and single values of each row.

    Args:
        row_values: Names of the values that are kept for every row: the loss or one of ``metrics``.
        weights: Weight of every row of the split in the mean.
        sources: Name and number of rows of every source of a mixture, in order; the loss of each source is a metric.
        derived: Computes further metrics from sums, with the labels of the rows; None if there are none.
        rows: The rows to evaluate, in the order in which their values are kept; None for all, in their order.
    """

    def __init__(
        self,
        metrics: Sequence[str],
        row_values: Sequence[str],
        weights: Sequence[float],
        sources: Sequence[tuple[str, int]] = (),
        derived: tuple[DerivedMetrics, LabelSet] | None = None,
        rows: Sequence[int] | None = None,
    ) -> None:
        self._derived = derived
        self._metrics = metrics
        self._row_values = tuple(row_values)
        self.rows = tuple(range(len(weights)) if rows is None else rows)
        self._position = {row: position for position, row in enumerate(self.rows)}
        self._weights = [weights[row] for row in self.rows]
        self._sources = [
            (name, [self._position[row] for row in of_one if row in self._position])
            for name, of_one in _rows_of_sources(sources)
        ]
        self.forget()

    def forget(self) -> None:
        """Reset all sums."""
        self._sums = [0.0] * (1 + len(self._metrics))
        source, labels = self._derived or (None, None)
        self._statistics = [0.0] * (0 if source is None or labels is None else source.num_statistics(labels))
        self._rows = {name: [0.0] * len(self._weights) for name in self._row_values}
        self._known: set[str] = set()

    def values(self) -> list[float]:
        """Return all sums in one list, to be summed over the ranks; see :meth:`evaluated`."""
        flags = [float(name in self._known) for name in self._row_values]
        return [*self._sums, *self._statistics, *flags, *(value for rows in self._rows.values() for value in rows)]

    def evaluated(self, values: Sequence[float]) -> Evaluated:
        """Return the evaluation for ``values``, the lists of :meth:`values` summed over all ranks."""
        left, total = iter(values), sum(self._weights)
        loss, *metrics = (value / total for value in itertools.islice(left, len(self._sums)))
        statistics = list(itertools.islice(left, len(self._statistics)))
        flags = list(itertools.islice(left, len(self._row_values)))
        found = {name: tuple(itertools.islice(left, len(self._weights))) for name in self._row_values}
        rows = {name: found[name] for name, is_known in zip(self._row_values, flags, strict=True) if is_known}
        of_sources = self._source_losses(rows["loss"]) if "loss" in rows else {}
        if "loss" in rows:
            rows["loss"] = tuple(value / weight for value, weight in zip(rows["loss"], self._weights, strict=True))
        derived: Mapping[str, float] = {}
        if self._derived is not None:
            source, labels = self._derived
            derived = source.derived_metrics(statistics, len(self._weights), labels)
        means = dict(zip(self._metrics, metrics, strict=True))
        return Evaluated(loss=loss, metrics={**means, **derived, **of_sources}, rows=rows)

    def _source_losses(self, sums: Sequence[float]) -> dict[str, float]:
        """Return the mean loss of every source that has evaluated rows; ``sums`` are the weighted losses of the
        rows."""
        return {
            source_metric(name): sum(sums[at] for at in positions) / sum(self._weights[at] for at in positions)
            for name, positions in self._sources
            if positions
        }

    @staticmethod
    def add_micro_batch(tallies: Sequence[Tally], rows: Sequence[Sequence[int]], terms: Terms) -> None:
        """Add the terms of one micro-batch."""
        if not tallies:
            return
        metrics = [terms.metrics[name] for name in tallies[0]._metrics]
        found_J = torch.stack([terms.sums_J, *metrics], 1).tolist()
        for tally, found in zip(tallies, found_J, strict=True):
            tally._sums = [total + part for total, part in zip(tally._sums, found, strict=True)]
        if terms.statistics is not None:
            for tally, added in zip(tallies, terms.statistics.tolist(), strict=True):
                tally._statistics = [total + part for total, part in zip(tally._statistics, added, strict=True)]
        for name in tallies[0]._row_values:
            if name not in terms.rows:
                continue
            values = iter(terms.rows[name].tolist())
            for tally, of_job in zip(tallies, rows, strict=True):
                tally._known.add(name)
                for row in of_job:
                    tally._rows[name][tally._position[row]] = next(values)


def _rows_of_sources(sources: Sequence[tuple[str, int]]) -> Iterator[tuple[str, range]]:
    first = 0
    for name, count in sources:
        yield name, range(first, first + count)
        first += count


class Evaluator:
    """Evaluates the jobs in the slots of a bank, and the base model without them."""

    def __init__(self, passes: Passes) -> None:
        self.passes = passes
        self._auxiliary = AuxiliaryTerms(passes)

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
        passes = self.passes
        here, index_of = passes.here(jobs), passes.index_of(jobs)
        of_jobs = [None] * len(jobs) if rows is None else rows
        all_tallies = [_new_tally(job.context, split, of_job) for job, of_job in zip(jobs, of_jobs, strict=True)]
        batches: list[JobBatch] = [
            (job, job.context.data.held_out(split), tally.rows) for job, tally in zip(jobs, all_tallies, strict=True)
        ]
        auxiliary = self._auxiliary.of_evaluation(batches)
        work, num_micro_batches = passes.work(batches, split_jobs=True)
        tallies = {local_slot: all_tallies[index_of[local_slot]] for local_slot in here}

        def accumulate(parts: Sequence[JobRows]) -> None:
            with watching("evaluation"):
                batch = passes.collate(parts)
                learners = passes.learners([here[local_slot] for local_slot in batch.slots])
                for term in auxiliary:
                    indices = [index_of[local_slot] for local_slot in batch.slots]
                    batch = term.completed(batch, upload(indices, torch.int64, passes.backbone.device))
                with passes.evaluating(batch, here):
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
