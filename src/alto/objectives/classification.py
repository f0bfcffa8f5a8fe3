"""Sequence classification: a head of each job's own reads the hidden state of a row's last token.

The losses are those of transformers' ``...ForSequenceClassification``: cross-entropy where a row has one label, the
mean binary cross-entropy over the labels where it may have several. Metrics are those of scikit-learn: ``accuracy``, of
several labels that of the whole set, and ``macro_f1``, the mean over labels of the harmonic mean of precision and
recall.

Shapes: ``Q`` rows, ``K`` labels, ``J`` jobs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from alto.data import EncodedDataset, TokenBatch
from alto.objectives.base import Terms
from alto.objectives.labelled import filled_logits, label_set_of, labelled_terms, row_job_indices
from alto.objectives.sums import to_device
from alto.records import LabelSet
from alto.spec import ObjectiveSettings

__all__ = ["Classification", "label_f1"]

_COUNTS = 3
"""Counts of every label: true positives, false positives, false negatives."""


class Classification:
    """The mean over rows, in training over micro-steps of their means; a prediction is the label of the largest logit,
    of several labels all with a positive one."""

    def check(self, dataset: EncodedDataset, settings: Sequence[ObjectiveSettings]) -> None:
        pass  # every row has a label

    def terms(self, logits_QK: Tensor, batch: TokenBatch, settings: Sequence[ObjectiveSettings]) -> Terms:
        labels = label_set_of(batch)
        logits_QK = filled_logits(logits_QK)
        if labels.problem_type == "single_label_classification":
            losses_Q, predicted_QK, actual_QK = _one_label(logits_QK, batch)
        else:
            losses_Q, predicted_QK, actual_QK = _several_labels(logits_QK, batch)
        accuracy_Q = (predicted_QK == actual_QK).all(1).double()
        terms = labelled_terms(losses_Q, {"accuracy": accuracy_Q}, batch)
        if torch.is_grad_enabled():  # in training nobody reads derived metrics
            return terms
        num_rows = sum(batch.job_rows)
        return terms.with_statistics(_counts(predicted_QK[:num_rows], actual_QK[:num_rows], batch))

    def num_statistics(self, labels: LabelSet) -> int:
        """A count of true positives, of false positives and of false negatives for every label."""
        return _COUNTS * labels.num_labels

    def derived_metrics(self, statistics: Sequence[float], num_rows: int, labels: LabelSet) -> Mapping[str, float]:
        """``macro_f1``; of rows with one label each, over the labels that a row has or was given."""
        scores = [score for score in label_f1(statistics, labels) if score is not None]
        return {"macro_f1": sum(scores) / len(scores)}


def label_f1(statistics: Sequence[float], labels: LabelSet) -> list[float | None]:
    """The harmonic mean of precision and recall of every label. It is 0 for one that no row has or was given, and where
    rows have one label each None.

    Args:
        statistics: A count of true positives, of false positives and of false negatives for every label.
        labels: The labels.
    """
    count = labels.num_labels
    hits, *misses = (statistics[index * count : (index + 1) * count] for index in range(_COUNTS))
    absent = None if labels.problem_type == "single_label_classification" else 0.0
    return [
        2 * hit / (2 * hit + wrong + missed) if hit + wrong + missed else absent
        for hit, wrong, missed in zip(hits, *misses, strict=True)
    ]


def _one_label(logits_QK: Tensor, batch: TokenBatch) -> tuple[Tensor, Tensor, Tensor]:
    """Loss of every row, and what is predicted and what is true of every label, ``[Q, K]``."""
    labels_Q = _padded_labels(batch, logits_QK).long()
    losses_Q = F.cross_entropy(logits_QK, labels_Q, reduction="none")
    indices_K = torch.arange(logits_QK.shape[1], device=logits_QK.device)
    return losses_Q, logits_QK.argmax(1)[:, None] == indices_K, labels_Q[:, None] == indices_K


def _several_labels(logits_QK: Tensor, batch: TokenBatch) -> tuple[Tensor, Tensor, Tensor]:
    labels_QK = _padded_labels(batch, logits_QK)
    losses_QK = F.binary_cross_entropy_with_logits(logits_QK, labels_QK, reduction="none")
    return losses_QK.mean(1), logits_QK > 0, labels_QK > 0


def _padded_labels(batch: TokenBatch, logits_QK: Tensor) -> Tensor:
    """The label of every row, and zeros for dummy rows."""
    labels = to_device(batch.row_classes, logits_QK.device, torch.float64)
    padding = [0, 0] * (labels.ndim - 1) + [0, len(logits_QK) - len(labels)]
    return F.pad(labels, padding)


def _counts(predicted_QK: Tensor, actual_QK: Tensor, batch: TokenBatch) -> Tensor:
    """True positives, false positives and false negatives of every label by job, ``[J, 3 K]`` float64."""
    jobs_Q = row_job_indices(batch, predicted_QK.device)
    kinds = (predicted_QK & actual_QK, predicted_QK & ~actual_QK, ~predicted_QK & actual_QK)
    sums = [
        torch.zeros(len(batch.job_rows), kind_QK.shape[1], dtype=torch.float64, device=kind_QK.device).index_add_(
            0, jobs_Q, kind_QK.double()
        )
        for kind_QK in kinds
    ]
    return torch.cat(sums, 1)
