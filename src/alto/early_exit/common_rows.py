"""Compares evaluations on different numbers of validation rows.

All evaluations of a task use the validation rows in one order: an evaluation on ``m`` rows takes the first ``m``. So
two evaluations are compared by their mean difference on the rows that both have.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from alto.records import LossPoint, StartValue

__all__ = ["evaluation_order", "mean_loss", "on_one_scale", "on_scale_of"]

P = TypeVar("P", bound=LossPoint | StartValue)


def evaluation_order(num_rows: int, seed: int) -> tuple[int, ...]:
    """Return the order in which validation rows are evaluated, as indices of rows."""
    order = list(range(num_rows))
    random.Random(seed).shuffle(order)
    return tuple(order)


def mean_loss(loss_rows: Sequence[float], weights: Sequence[float]) -> float:
    """Return the weighted mean of ``loss_rows``, of which there may be fewer than ``weights``."""
    total = sum(loss * weight for loss, weight in zip(loss_rows, weights, strict=False))
    return total / sum(weights[: len(loss_rows)])


def on_scale_of(reference: LossPoint, point: P, weights: Sequence[float]) -> P:
    """Return ``point`` with a loss that can be compared with that of ``reference``: the loss of ``reference`` plus the
    mean difference of the two on the rows that both have.

    ``point`` is returned unchanged if both have equally many rows, or if rows are unknown or a loss is not finite.

    Args:
        point: An evaluation of the same or another job, or of a job before its first step.
        weights: Weight of every validation row, in the order of evaluation.
    """
    num_rows = min(len(reference.loss_rows), len(point.loss_rows))
    is_known = math.isfinite(reference.validation_loss) and math.isfinite(point.validation_loss)
    if len(reference.loss_rows) == len(point.loss_rows) or not num_rows or not is_known:
        return point
    differences = [
        one - other for one, other in zip(point.loss_rows[:num_rows], reference.loss_rows[:num_rows], strict=True)
    ]
    return replace(point, validation_loss=reference.validation_loss + mean_loss(differences, weights))


def on_one_scale(points: Sequence[LossPoint], weights: Sequence[float]) -> list[LossPoint]:
    """Return ``points`` with losses that can be compared with each other: all on the scale of the first point with the
    most rows."""
    if len({len(point.loss_rows) for point in points}) < 2:
        return list(points)
    finite = [point for point in points if math.isfinite(point.validation_loss)]
    if not finite:
        return list(points)
    reference = max(finite, key=lambda point: len(point.loss_rows))
    return [on_scale_of(reference, point, weights) for point in points]
