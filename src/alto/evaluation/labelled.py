"""Evaluation of classifiers and regressors: predictions of their heads for held-out texts, compared with the labels.

Shapes: ``Q`` rows, ``H`` hidden size, ``K`` labels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from alto.backbone import Backbone
from alto.data import EncodedDataset
from alto.evaluation.loss import check_finite, micro_batches
from alto.lora import ServedAdapters
from alto.objectives import read_states
from alto.objectives.classification import label_f1
from alto.records import LabelSet

__all__ = ["head_logits", "label_metrics"]


def head_logits(
    backbone: Backbone,
    served: ServedAdapters,
    heads: Sequence[Tensor],
    dataset: EncodedDataset,
    *,
    names: Sequence[str],
    max_tokens_per_pass: int,
    on_done: Callable[[int], None],
) -> list[Tensor]:
    """Return the logits of all rows for each adapter with its head, ``[Q, K]`` float64.

    The other arguments and the errors are those of :func:`alto.evaluation.loss.heldout_losses`.

    Args:
        heads: The head of each adapter, ``[K, H]``.
    """
    on_device = [head_KH.to(backbone.device) for head_KH in heads]
    parts: list[list[Tensor]] = [[] for _ in heads]
    for batch, states_QH in micro_batches(backbone, served, dataset, max_tokens_per_pass, on_done, read_states):
        for slot, of_slot_QH in zip(batch.slots, states_QH.split(batch.job_rows), strict=True):
            head_KH = on_device[slot]
            parts[slot].append(F.linear(of_slot_QH.to(head_KH.dtype), head_KH).double().cpu())
    logits = [torch.cat(of_slot) for of_slot in parts]
    check_finite({name: float(of_slot.sum()) for name, of_slot in zip(names, logits, strict=True)})
    return logits


def label_metrics(logits_QK: Tensor, dataset: EncodedDataset) -> Mapping[str, Any]:
    """Compare predictions with labels, and return the fields of :class:`alto.records.Evaluation` for this kind of
    label."""
    assert dataset.classes is not None, "texts have labels"
    assert dataset.label_set is not None, "texts have labels"
    labels = dataset.label_set
    actual = torch.tensor(dataset.classes, dtype=torch.float64)
    if labels.problem_type == "regression":
        return {"loss": None, "mse": float(F.mse_loss(logits_QK, actual)), "spearman": _spearman(logits_QK, actual)}
    if labels.problem_type == "multi_label_classification":
        loss = F.binary_cross_entropy_with_logits(logits_QK, actual)
        return {"loss": float(loss), **_agreement(logits_QK > 0, actual > 0, labels)}
    predicted_Q, actual_Q = logits_QK.argmax(1), actual.long()
    every_K = torch.arange(labels.num_labels)
    pairs = Counter(zip(actual_Q.tolist(), predicted_Q.tolist(), strict=True))
    confusion: dict[str, dict[str, int]] = {}
    for (one, other), count in sorted(pairs.items()):
        confusion.setdefault(labels.names[one], {})[labels.names[other]] = count
    return {
        "loss": float(F.cross_entropy(logits_QK, actual_Q)),
        **_agreement(predicted_Q[:, None] == every_K, actual_Q[:, None] == every_K, labels),
        "confusion": confusion,
    }


def _agreement(predicted_QK: Tensor, actual_QK: Tensor, labels: LabelSet) -> dict[str, Any]:
    kinds = (predicted_QK & actual_QK, predicted_QK & ~actual_QK, ~predicted_QK & actual_QK)
    scores = label_f1(torch.cat([kind_QK.sum(0) for kind_QK in kinds]).tolist(), labels)
    present = [score for score in scores if score is not None]
    return {
        "accuracy": float((predicted_QK == actual_QK).all(1).double().mean()),
        "macro_f1": sum(present) / len(present),
        "label_f1": dict(zip(labels.names, scores, strict=True)),
    }


def _spearman(predicted_QK: Tensor, actual_QK: Tensor) -> float | None:
    """Return Spearman's rank correlation, averaged over outputs; None if all numbers of a column are equal."""
    found = []
    for columns in zip(predicted_QK.T, actual_QK.T, strict=True):
        x_Q, y_Q = (_centred_ranks(values_Q) for values_Q in columns)
        size = float(x_Q.norm() * y_Q.norm())
        if not size:
            return None
        found.append(float(x_Q @ y_Q) / size)
    return sum(found) / len(found)


def _centred_ranks(values_Q: Tensor) -> Tensor:
    """Return the rank of every number minus the mean rank; equal numbers get the mean of their ranks."""
    _, places_Q, counts = values_Q.unique(return_inverse=True, return_counts=True)
    ranks = counts.cumsum(0) - (counts - 1) / 2
    return ranks.double()[places_Q] - (len(values_Q) + 1) / 2
