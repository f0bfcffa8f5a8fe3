"""Jobs that repeat one configuration with other seeds are ranked as one."""

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
        mean: Their means, under the id of the configuration; a job alone as it is.
        members: Best first.
    """

    mean: T
    members: tuple[T, ...]


def ranked_configurations(
    items: Iterable[T], configuration_of: Mapping[str, str], failed: Collection[str] = ()
) -> list[Repeated[T]]:
    """Configurations, best first, independent of the given order; a job that repeats none is a configuration.

    They are ordered by :func:`alto.early_exit.noise.ordered`, by the means over their jobs: of losses, of scores, and
    of the scores of every validation row. One of whose jobs some have failed comes after all without: what is left of
    it is not what the user can expect.

    Args:
        items: Jobs by what they compete with.
        configuration_of: By job that repeats a configuration: its id, that of one of the jobs.
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
    """Their mean; infinity where one is not finite."""
    return statistics.fmean(values) if all(map(math.isfinite, values)) else math.inf


def _mean_score(scores: Sequence[float]) -> float:
    """Their mean; the least of all numbers where one is that, because its metric is not finite."""
    return LEAST_SCORE if LEAST_SCORE in scores else statistics.fmean(scores)


def _mean_rows(rows: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """The mean of every row; none where they are not known for all, or one is not finite."""
    if len({len(values) for values in rows}) > 1 or not all(map(math.isfinite, itertools.chain.from_iterable(rows))):
        return ()
    return tuple(map(statistics.fmean, zip(*rows, strict=True)))
