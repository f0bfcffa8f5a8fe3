"""Decides whether one job leads another by more than the noise of the validation rows, and orders jobs accordingly."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from typing import Protocol, TypeVar

from alto.records.intervals import student_quantile

__all__ = ["Scored", "is_better", "is_within_noise", "leading_group", "ordered"]


class Scored(Protocol):
    """An object with a score: an evaluation, or a job's state at a rung; see :class:`alto.records.LossPoint`."""

    @property
    def job(self) -> str: ...

    @property
    def validation_loss(self) -> float: ...

    @property
    def score(self) -> float: ...

    @property
    def score_rows(self) -> tuple[float, ...]: ...

    @property
    def loss_scale(self) -> str: ...

    @property
    def start_loss(self) -> float | None: ...


S = TypeVar("S", bound=Scored)


def is_within_noise(one: Scored, other: Scored) -> bool:
    """Return whether the difference of both scores by the task's metric is within noise.

    It is if the scores are equal. Others are compared row by row: the difference counts if the 95 % interval of its
    mean over the validation rows (Student's, two-sided) does not contain 0. If the values of the rows are unknown or
    not finite, any difference counts.
    """
    if one.score == other.score:
        return True
    if not one.score_rows or len(one.score_rows) != len(other.score_rows):
        return False
    differences = [a - b for a, b in zip(one.score_rows, other.score_rows, strict=True)]
    if not all(map(math.isfinite, differences)):
        return False
    num_rows = len(differences)
    if num_rows == 1:
        return True
    error = statistics.stdev(differences) / math.sqrt(num_rows)
    return abs(statistics.fmean(differences)) <= student_quantile(num_rows - 1) * error


def is_better(one: Scored, other: Scored) -> bool:
    """Return whether evaluation ``one`` of a job is better than ``other`` of the same job: its score is higher by more
    than noise, or the scores are within noise and its validation loss is lower."""
    if is_within_noise(one, other):
        return one.validation_loss < other.validation_loss
    return one.score > other.score


def ordered(scored: Iterable[S]) -> list[S]:
    """Order best first, independent of the given order.

    The item with the best score leads a group of all items within noise of it. Inside a group, the validation loss
    decides. If the losses have different scales, it is divided by the loss of the frozen base model; if that is unknown
    for an item, the score decides. The best of the remaining items leads the next group, and so on. Ties go to the
    lower job id. Items with a loss that is not finite come last, ordered by job id.
    """
    items = list(scored)
    rest = sorted(_finite(items), key=_by_score)
    order: list[S] = []
    while rest:
        group, rest = _parted(rest)
        order += _ordered_inside(group)
    return [*order, *sorted((item for item in items if not math.isfinite(item.validation_loss)), key=lambda i: i.job)]


def leading_group(scored: Iterable[S]) -> list[S]:
    """Return the first group of :func:`ordered`, in its order."""
    rest = sorted(_finite(scored), key=_by_score)
    return _ordered_inside(_parted(rest)[0]) if rest else []


def _finite(scored: Iterable[S]) -> list[S]:
    return [item for item in scored if math.isfinite(item.validation_loss)]


def _parted(items: list[S]) -> tuple[list[S], list[S]]:
    """Return the items within noise of the first one, and the others."""
    group: list[S] = []
    rest: list[S] = []
    for item in items:
        (group if is_within_noise(item, items[0]) else rest).append(item)
    return group, rest


def _ordered_inside(group: list[S]) -> list[S]:
    if len({item.loss_scale for item in group}) == 1:
        return sorted(group, key=_by_loss)
    if all(item.start_loss is not None and 0 < item.start_loss < math.inf for item in group):
        return sorted(group, key=_by_share_of_the_base_loss)
    return sorted(group, key=_by_score)


def _by_share_of_the_base_loss(item: Scored) -> tuple[float, str]:
    assert item.start_loss is not None
    return (item.validation_loss / item.start_loss, item.job)


def _by_loss(item: Scored) -> tuple[float, str]:
    return (item.validation_loss, item.job)


def _by_score(item: Scored) -> tuple[float, float, str]:
    return (-item.score, item.validation_loss, item.job)
