"""Ranks jobs that repeat one configuration with other seeds as one."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from alto.early_exit.noise import ordered
from alto.records import LossPoint, Standing
from alto.spec.metric import LEAST_SCORE

__all__ = ["Repeated", "ranked_configurations"]

T = TypeVar("T", bound=LossPoint | Standing)


@dataclass(frozen=True, slots=True)
class Repeated(Generic[T]):
    """The repetitions of one configuration.

    Attributes:
        mean: The mean values of the repetitions, under the id of the configuration; a single job's own values.
        members: The repetitions, best first.
    """

    mean: T
    members: tuple[T, ...]


def ranked_configurations(
    items: Iterable[T], configuration_of: Mapping[str, str], failed: Collection[str] = ()
) -> list[Repeated[T]]:
    """Rank configurations, best first, independent of the given order; a job that repeats none is a configuration.

    They are ordered by :func:`alto.early_exit.noise.ordered`, by the means over their jobs: of losses, of scores, and
    of the scores of every validation row. A configuration with failed jobs comes after all others: the mean of its
    other jobs is not what the user can expect.

    Args:
        items: Values with which the jobs compete.
        configuration_of: Id of the configuration of every job that repeats one; it is the id of one of the jobs.
        failed: Ids of configurations of which a job has diverged or failed.

    Source: none; the paper tries every configuration once.
    """
    groups: dict[str, list[T]] = {}
    for item in items:
        groups.setdefault(configuration_of.get(item.job, item.job), []).append(item)
    means: dict[str, T] = {name: _mean(name, group) for name, group in groups.items()}
    order = [
        *ordered(mean for name, mean in means.items() if name not in failed),
        *ordered(mean for name, mean in means.items() if name in failed),
    ]
    return [Repeated(mean, tuple(ordered(groups[mean.job]))) for mean in order]


def _mean(name: str, group: Sequence[T]) -> T:
    if len(group) == 1:
        return replace(group[0], job=name)
    first = group[0]
    starts = [item.start_loss for item in group if item.start_loss is not None]
    facts: dict[str, Any] = {}
    if isinstance(first, Standing):
        facts["is_training"] = any(isinstance(item, Standing) and item.is_training for item in group)
    return replace(
        first,
        job=name,
        validation_loss=_finite_mean([item.validation_loss for item in group]),
        score=_mean_score([item.score for item in group]),
        score_rows=_mean_rows([item.score_rows for item in group]),
        start_loss=statistics.fmean(starts) if len(starts) == len(group) else None,
        **facts,
    )


def _finite_mean(values: Sequence[float]) -> float:
    """Return the mean; infinity if a value is not finite."""
    return statistics.fmean(values) if all(map(math.isfinite, values)) else math.inf


def _mean_score(scores: Sequence[float]) -> float:
    """Return the mean; the least score if one job has it, because its metric is not finite."""
    return LEAST_SCORE if LEAST_SCORE in scores else statistics.fmean(scores)


def _mean_rows(rows: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Return the mean of every row; empty if rows are unknown for a job, or a value is not finite."""
    if len({len(values) for values in rows}) > 1 or not all(map(math.isfinite, itertools.chain.from_iterable(rows))):
        return ()
    return tuple(map(statistics.fmean, zip(*rows, strict=True)))
