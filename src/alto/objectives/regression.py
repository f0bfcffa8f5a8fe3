"""Regression: every job has its own head, which reads the hidden state of a row's last token.

The loss is that of transformers' ``...ForSequenceClassification`` with that ``problem_type``: the mean squared
error over rows and outputs. ``pearson`` is the correlation of predictions and labels; for several outputs, their mean.

Shapes: ``Q`` rows, ``K`` outputs, ``J`` jobs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from alto.data import EncodedDataset, TokenBatch
from alto.objectives.base import Terms
from alto.objectives.labelled import filled_logits, labelled_terms, row_job_indices
from alto.objectives.sums import to_device
from alto.records import LabelSet
from alto.spec import ObjectiveSettings

__all__ = ["Regression"]

_SUMS = 5
"""Number of sums over rows for every output: prediction, label, both squares, their product."""

_ROUNDING = 1e-12
"""Share of a mean square below which a variance may be rounding error: numbers that differ by less than a millionth of
their size count as equal."""


class Regression:
    """The mean loss over rows; in training, the mean over micro-steps of their means."""

    def check(self, dataset: EncodedDataset, settings: Sequence[ObjectiveSettings]) -> None:
        pass  # every row has its numbers

    def terms(self, logits_QK: Tensor, batch: TokenBatch, settings: Sequence[ObjectiveSettings]) -> Terms:
        labels_QK = to_device(batch.row_classes, logits_QK.device, torch.float64)
        num_rows = len(labels_QK)
        predicted_QK = filled_logits(logits_QK)
        errors_Q = (predicted_QK - filled_logits(labels_QK)).square().mean(1)
        terms = labelled_terms(errors_Q, {"mse": errors_Q}, batch)
        if torch.is_grad_enabled():  # training does not read derived metrics
            return terms
        predicted_QK = predicted_QK[:num_rows]
        parts_QS = torch.cat(
            [predicted_QK, labels_QK, predicted_QK.square(), labels_QK.square(), predicted_QK * labels_QK], 1
        )
        sums = torch.zeros(len(batch.job_rows), parts_QS.shape[1], dtype=torch.float64, device=parts_QS.device)
        return terms.with_statistics(sums.index_add_(0, row_job_indices(batch, parts_QS.device), parts_QS))

    def num_statistics(self, labels: LabelSet) -> int:
        """Return the number of sums of predictions, labels, their squares and products, for all outputs."""
        return _SUMS * labels.num_labels

    def derived_metrics(self, statistics: Sequence[float], num_rows: int, labels: LabelSet) -> Mapping[str, float]:
        """Return ``pearson``; NaN if all predictions, or all labels, of an output are equal."""
        count = labels.num_labels
        sums = (statistics[index * count : (index + 1) * count] for index in range(_SUMS))
        found = [_correlation(*of_output, num_rows=num_rows) for of_output in zip(*sums, strict=True)]
        return {"pearson": sum(found) / count}


def _correlation(x: float, y: float, xx: float, yy: float, xy: float, *, num_rows: int) -> float:
    """Return the correlation of two variables from their sums over rows; NaN if all values of one are equal."""
    spread_x, spread_y = num_rows * xx - x * x, num_rows * yy - y * y
    if not (spread_x > _ROUNDING * num_rows * xx and spread_y > _ROUNDING * num_rows * yy):
        return math.nan
    return (num_rows * xy - x * y) / math.sqrt(spread_x * spread_y)
