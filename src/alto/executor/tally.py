"""The results of evaluations, and the sums over rows that they are computed from."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from alto.executor.context import TaskContext
from alto.objectives import DerivedMetrics, Terms
from alto.records import LabelSet, ShownAnswer
from alto.spec import LOSS, source_metric


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """The result of evaluating a job on a split.

    Attributes:
        loss: The same loss as in training.
        metrics: Other metrics of the objective, by name.
        rows: Values of every evaluated row by name: the loss (the mean over the row's trained tokens; for a pair, the
            pair's loss) and the metric that selects jobs. A name is missing if only the mean of its values is known.
        answers: The first answers of a job that learns from rewards, to be shown.
    """

    loss: float
    metrics: Mapping[str, float]
    rows: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    answers: tuple[ShownAnswer, ...] = ()

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
