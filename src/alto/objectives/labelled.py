"""Common parts of objectives on the logits of classification heads.

Shapes: ``Q`` rows, ``K`` labels.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from alto.data import TokenBatch
from alto.objectives.base import Terms
from alto.objectives.pairs import LANES, terms_of_rows
from alto.objectives.sums import to_device
from alto.records import LabelSet

__all__ = ["filled_logits", "label_set_of", "labelled_terms", "row_job_indices"]


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


def row_job_indices(batch: TokenBatch, device: torch.device) -> Tensor:
    """Return the index in ``batch`` of the job of every row, ``[Q]``."""
    indices = [index for index, count in enumerate(batch.job_rows) for _ in range(count)]
    return to_device(indices, device, torch.int64)
