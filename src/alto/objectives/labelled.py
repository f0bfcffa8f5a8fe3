"""The losses of classification and regression."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from alto.data import TokenBatch
from alto.objectives.base import ObjectiveImplementation, Terms, to_device
from alto.objectives.pairs import LANES, terms_of_rows
from alto.records import LabelSet
from alto.spec import ObjectiveSettings

# Common parts of objectives on the logits of classification heads.
#
# Shapes: ``Q`` rows, ``K`` labels.


def label_set_of(batch: TokenBatch) -> LabelSet:
    """Return the label set of ``batch``, whose jobs are of one task."""
    labels = batch.job_label_sets[0]
    assert labels is not None, "rows have labels"
    return labels


def filled_logits(values_QK: Tensor) -> Tensor:
    """Return ``values_QK`` in float64, padded with zero rows to a whole number of vectors, so that element-wise results
    of a row have the same bits at any position."""
    return F.pad(values_QK.double(), (0, 0, 0, -len(values_QK) % LANES))


def labelled_terms(losses_Q: Tensor, metrics: Mapping[str, Tensor], batch: TokenBatch) -> Terms:
    """Return the sums over every job's rows; each loss is multiplied by the row's factor in the job's batch.

    Args:
        losses_Q: Loss of every row, followed by those of dummy rows.
        metrics: Name of a metric to its value for every row.
    """
    if any(factor != 1.0 for factor in batch.row_factors):
        factors_Q = to_device(batch.row_factors, losses_Q.device, torch.float64)
        losses_Q = losses_Q * F.pad(factors_Q, (0, len(losses_Q) - len(factors_Q)))
    return terms_of_rows(losses_Q, metrics, batch.job_rows)


def job_sums(values_QS: Tensor, batch: TokenBatch) -> Tensor:
    """Return the sums of every column over the rows of each job, ``[J, S]`` float64."""
    indices = [index for index, count in enumerate(batch.job_rows) for _ in range(count)]
    sums = torch.zeros(len(batch.job_rows), values_QS.shape[1], dtype=torch.float64, device=values_QS.device)
    return sums.index_add_(0, to_device(indices, values_QS.device, torch.int64), values_QS)


# Sequence classification: every job has its own head, which reads the hidden state of a row's last token.
#
# The losses are the same as in transformers' ``...ForSequenceClassification``: cross-entropy if a row has one label,
# the mean binary cross-entropy over the labels if it may have several. The metrics are the same as in scikit-learn:
# ``accuracy`` (a row with several labels is correct only if all of them are) and ``macro_f1``, the mean over labels of
# the harmonic mean of precision and recall.
#
# Shapes: ``Q`` rows, ``K`` labels, ``J`` jobs.

_COUNTS = 3
"""Number of counts per label: true positives, false positives, false negatives."""


class Classification(ObjectiveImplementation):
    """The mean loss over rows; in training, the mean over micro-steps of their means. The label with the largest logit
    is predicted; if a row may have several labels, all labels with a positive logit."""

    def terms(self, logits_QK: Tensor, batch: TokenBatch, settings: Sequence[ObjectiveSettings]) -> Terms:
        labels = label_set_of(batch)
        logits_QK = filled_logits(logits_QK)
        if labels.problem_type == "single_label_classification":
            losses_Q, predicted_QK, actual_QK = _one_label(logits_QK, batch)
        else:
            losses_Q, predicted_QK, actual_QK = _several_labels(logits_QK, batch)
        accuracy_Q = (predicted_QK == actual_QK).all(1).double()
        terms = labelled_terms(losses_Q, {"accuracy": accuracy_Q}, batch)
        if torch.is_grad_enabled():  # training does not read derived metrics
            return terms
        num_rows = sum(batch.job_rows)
        predicted_QK, actual_QK = predicted_QK[:num_rows], actual_QK[:num_rows]
        kinds_QS = torch.cat([predicted_QK & actual_QK, predicted_QK & ~actual_QK, ~predicted_QK & actual_QK], 1)
        return replace(terms, statistics=job_sums(kinds_QS.double(), batch))

    def num_statistics(self, labels: LabelSet) -> int:
        """Return the number of counts of true positives, false positives and false negatives for all labels."""
        return _COUNTS * labels.num_labels

    def derived_metrics(self, statistics: Sequence[float], num_rows: int, labels: LabelSet) -> Mapping[str, float]:
        """Return ``macro_f1``; if rows have one label each, labels neither given nor predicted do not count."""
        scores = [score for score in label_f1(statistics, labels) if score is not None]
        return {"macro_f1": sum(scores) / len(scores)}


def label_f1(statistics: Sequence[float], labels: LabelSet) -> list[float | None]:
    """Return the harmonic mean of precision and recall of every label.

    For a label that no row has or was predicted to have, it is None if rows have one label each, otherwise 0.

    Args:
        statistics: True positives of every label, then false positives, then false negatives.
    """
    count = labels.num_labels
    hits, *misses = (statistics[index * count : (index + 1) * count] for index in range(_COUNTS))
    absent = None if labels.problem_type == "single_label_classification" else 0.0
    return [
        2 * hit / (2 * hit + wrong + missed) if hit + wrong + missed else absent
        for hit, wrong, missed in zip(hits, *misses, strict=True)
    ]


def _one_label(logits_QK: Tensor, batch: TokenBatch) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss of every row, and the predicted and actual labels, ``[Q, K]`` bool."""
    labels_Q = _padded_labels(batch, logits_QK).long()
    losses_Q = F.cross_entropy(logits_QK, labels_Q, reduction="none")
    indices_K = torch.arange(logits_QK.shape[1], device=logits_QK.device)
    return losses_Q, logits_QK.argmax(1)[:, None] == indices_K, labels_Q[:, None] == indices_K


def _several_labels(logits_QK: Tensor, batch: TokenBatch) -> tuple[Tensor, Tensor, Tensor]:
    labels_QK = _padded_labels(batch, logits_QK)
    losses_QK = F.binary_cross_entropy_with_logits(logits_QK, labels_QK, reduction="none")
    return losses_QK.mean(1), logits_QK > 0, labels_QK > 0


def _padded_labels(batch: TokenBatch, logits_QK: Tensor) -> Tensor:
    """Return the label of every row, and zeros for dummy rows."""
    labels = to_device(batch.row_classes, logits_QK.device, torch.float64)
    padding = [0, 0] * (labels.ndim - 1) + [0, len(logits_QK) - len(labels)]
    return F.pad(labels, padding)


# Regression: every job has its own head, which reads the hidden state of a row's last token.
#
# The loss is the mean squared error over rows and outputs, as in transformers' ``...ForSequenceClassification`` with
# ``problem_type="regression"``. ``pearson`` is the correlation of predictions and labels; for several outputs, the mean
# of their correlations.
#
# Shapes: ``Q`` rows, ``K`` outputs, ``J`` jobs.

_SUMS = 5
"""Number of sums over rows for every output: prediction, label, both squares, their product."""

_ROUNDING = 1e-12
"""Share of a mean square below which a variance may be rounding error: numbers that differ by less than a millionth of
their size count as equal."""


class Regression(ObjectiveImplementation):
    """The mean loss over rows; in training, the mean over micro-steps of their means."""

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
        return replace(terms, statistics=job_sums(parts_QS, batch))

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
