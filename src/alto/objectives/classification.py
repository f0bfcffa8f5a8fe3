"""Sequence classification: every job has its own head, which reads the hidden state of a row's last token.

The losses are those of transformers' ``...ForSequenceClassification``: cross-entropy if a row has one label, the mean
binary cross-entropy over the labels if it may have several. The metrics are those of scikit-learn: ``accuracy``, for
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
"""Number of counts per label: true positives, false positives, false negatives."""


class Classification:
    """The mean loss over rows; in training, the mean over micro-steps of their means. The label with the largest logit
    is predicted; if a row may have several labels, all labels with a positive logit."""

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
        if torch.is_grad_enabled():  # training does not read derived metrics
            return terms
        num_rows = sum(batch.job_rows)
        return terms.with_statistics(_counts(predicted_QK[:num_rows], actual_QK[:num_rows], batch))

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


def _counts(predicted_QK: Tensor, actual_QK: Tensor, batch: TokenBatch) -> Tensor:
    """Count true positives, false positives and false negatives of every label by job, ``[J, 3 K]`` float64."""
    jobs_Q = row_job_indices(batch, predicted_QK.device)
    kinds = (predicted_QK & actual_QK, predicted_QK & ~actual_QK, ~predicted_QK & actual_QK)
    sums = [
        torch.zeros(len(batch.job_rows), kind_QK.shape[1], dtype=torch.float64, device=kind_QK.device).index_add_(
            0, jobs_Q, kind_QK.double()
        )
        for kind_QK in kinds
    ]
    return torch.cat(sums, 1)
