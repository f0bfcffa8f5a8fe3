"""Sums the results of one job over the micro-batches of an evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from alto.objectives import Terms

__all__ = ["Evaluated", "Tally"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """The result of evaluating a job on the validation split.

    Attributes:
        loss: As in training.
        metrics: What its objective measures beside it, by name.
        metric_rows: The metric that the task chooses by on every validation row; empty where that is the loss, or is
            known as a mean only.
    """

    loss: float
    metrics: Mapping[str, float]
    metric_rows: tuple[float, ...] = ()

    def facts(self) -> dict[str, Any]:
        """The fields of the journal event."""
        return {
            "validation_loss": self.loss,
            **({"metrics": dict(self.metrics)} if self.metrics else {}),
            **({"metric_rows": list(self.metric_rows)} if self.metric_rows else {}),
        }


class Tally:
    """Sums over the rows of the validation split, and one value for each of them.

    Args:
        metrics: Names of what is summed beside the loss.
        row_metric: The one of them of which every row is kept; None for none.
        num_rows: Rows of the split.
    """

    def __init__(self, metrics: Sequence[str], row_metric: str | None, num_rows: int) -> None:
        self._metrics = metrics
        self._row_metric = row_metric
        self._num_rows = 0 if row_metric is None else num_rows
        self.forget()

    def forget(self) -> None:
        """Reset all sums."""
        self._sums = [0.0] * (1 + len(self._metrics))
        self._rows = [0.0] * self._num_rows
        self._has_rows = False

    def values(self) -> list[float]:
        """All sums in one list, to be summed over the ranks; see :meth:`evaluated`."""
        return [*self._sums, float(self._has_rows), *self._rows]

    def evaluated(self, values: Sequence[float], weight: float) -> Evaluated:
        """The evaluation from ``values`` (those of :meth:`values`, summed over all ranks) for a split of this
        weight."""
        loss, *metrics = (value / weight for value in values[: len(self._sums)])
        has_rows, *rows = values[len(self._sums) :]
        return Evaluated(
            loss=loss,
            metrics=dict(zip(self._metrics, metrics, strict=True)),
            metric_rows=tuple(rows) if has_rows else (),
        )

    @staticmethod
    def add_micro_batch(tallies: Sequence[Tally], rows: Sequence[Sequence[int]], terms: Terms) -> None:
        """Add the terms of one micro-batch.

        Args:
            tallies: Tallies of the jobs in the micro-batch, in order.
            rows: Row indices of each job in the micro-batch.
            terms: The objective's terms of the micro-batch.
        """
        if not tallies:
            return
        metrics = [terms.metrics[name] for name in tallies[0]._metrics]
        found_J = torch.stack([terms.sums_J, *metrics], 1).tolist()
        row_metric = tallies[0]._row_metric
        values: Iterator[float] | None = None
        if row_metric is not None and row_metric in terms.rows:
            values = iter(terms.rows[row_metric].tolist())
        for tally, of_job, found in zip(tallies, rows, found_J, strict=True):
            tally._sums = [total + part for total, part in zip(tally._sums, found, strict=True)]
            if values is not None:
                tally._has_rows = True
                for row in of_job:
                    tally._rows[row] = next(values)
