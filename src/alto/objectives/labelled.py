"""Common parts of objectives on the logits of classification heads.

Shapes: ``Q`` rows, ``K`` labels.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from alto.data import TokenBatch
from alto.objectives.pairs import LANES
from alto.objectives.sums import to_device
from alto.records import LabelSet

__all__ = ["filled_logits", "label_set_of", "row_job_indices"]


def label_set_of(batch: TokenBatch) -> LabelSet:
    """The labels of the rows of ``batch``, whose jobs are of one task."""
    labels = batch.job_label_sets[0]
    assert labels is not None, "rows have labels"
    return labels


def filled_logits(values_QK: Tensor) -> Tensor:
    """``values_QK`` in float64, followed by rows of zeros up to a whole number of vectors, so that element-wise results
    of a row have the same bits at any place."""
    return F.pad(values_QK.double(), (0, 0, 0, -len(values_QK) % LANES))


def row_job_indices(batch: TokenBatch, device: torch.device) -> Tensor:
    """The index in ``batch`` of the job of every row, ``[Q]``."""
    indices = [index for index, count in enumerate(batch.job_rows) for _ in range(count)]
    return to_device(indices, device, torch.int64)
