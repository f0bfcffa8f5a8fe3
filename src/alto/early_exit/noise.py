"""Decides whether one job leads another by more than the noise of the validation rows, and orders jobs accordingly."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeAlias, TypeVar

from alto.records import GRADED_SCORERS, Candidate, FinalistScore, Judgement, LossPoint, StartValue
from alto.records.evaluation import student_quantile, wilson_interval
from alto.spec import LEAST_SCORE

Scored: TypeAlias = LossPoint | Candidate
"""An evaluation, or a job's state at a rung."""

S = TypeVar("S", bound=Scored)


def is_within_noise(one: Scored, other: Scored) -> bool:
    """Return whether the difference of both scores by the task's metric is within noise.

    Equal scores are within noise. Other scores are compared row by row: the difference counts if the 95 % interval of
    its mean over the validation rows (Student's, two-sided) does not contain 0. If the values of the rows are unknown
    or not finite, any difference counts.
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
        group, rest = _split_by_noise(rest)
        order += _ordered_inside(group)
    return [*order, *sorted((item for item in items if not math.isfinite(item.validation_loss)), key=lambda i: i.job)]


def leading_group(scored: Iterable[S]) -> list[S]:
    """Return the first group of :func:`ordered`, in its order."""
    rest = sorted(_finite(scored), key=_by_score)
    return _ordered_inside(_split_by_noise(rest)[0]) if rest else []


def _finite(scored: Iterable[S]) -> list[S]:
    return [item for item in scored if math.isfinite(item.validation_loss)]


def _split_by_noise(items: list[S]) -> tuple[list[S], list[S]]:
    """Return the items within noise of the first one, and the others."""
    group: list[S] = []
    rest: list[S] = []
    for item in items:
        (group if is_within_noise(item, items[0]) else rest).append(item)
    return group, rest


def _ordered_inside(group: list[S]) -> list[S]:
    if len({item.loss_scale for item in group}) == 1:
        return sorted(group, key=lambda item: (item.validation_loss, item.job))
    if all(item.start_loss is not None and 0 < item.start_loss < math.inf for item in group):
        return sorted(group, key=_by_relative_loss)
    return sorted(group, key=_by_score)


def _by_relative_loss(item: Scored) -> tuple[float, str]:
    assert item.start_loss is not None
    return (item.validation_loss / item.start_loss, item.job)


def _by_score(item: Scored) -> tuple[float, float, str]:
    return (-item.score, item.validation_loss, item.job)


# Compares evaluations on different numbers of validation rows.
#
# All evaluations of a task use the validation rows in one order: an evaluation on ``m`` rows takes the first ``m``. So
# two evaluations are compared by their mean difference on the rows that both have.

P = TypeVar("P", bound=LossPoint | StartValue)


def evaluation_order(num_rows: int, seed: int) -> tuple[int, ...]:
    """Return the order in which validation rows are evaluated, as indices of rows."""
    order = list(range(num_rows))
    random.Random(seed).shuffle(order)
    return tuple(order)


def mean_loss(loss_rows: Sequence[float], weights: Sequence[float]) -> float:
    """Return the weighted mean of ``loss_rows``. There may be more ``weights`` than rows; the others are not used."""
    total = sum(loss * weight for loss, weight in zip(loss_rows, weights, strict=False))
    return total / sum(weights[: len(loss_rows)])


def on_scale_of(reference: LossPoint, point: P, weights: Sequence[float]) -> P:
    """Return ``point`` with a loss that can be compared with the loss of ``reference``: the loss of ``reference`` plus
    the mean difference of the two on their common rows.

    ``point`` is returned unchanged if both have the same number of rows, or if rows are unknown or a loss is not
    finite.

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


@dataclass(frozen=True, slots=True)
class Repeated(Generic[S]):
    """The repetitions of one configuration.

    Attributes:
        mean: The mean values of the repetitions, under the id of the configuration; a single job's own values.
        members: The repetitions, best first.
    """

    mean: S
    members: tuple[S, ...]


def ranked_configurations(
    items: Iterable[S], configuration_of: Mapping[str, str], failed: Collection[str] = ()
) -> list[Repeated[S]]:
    """Rank configurations, best first, independent of the given order; a job that repeats none is a configuration.

    They are ordered by :func:`alto.early_exit.noise.ordered`, by the means over their jobs: of losses, of scores, and
    of the scores of every validation row. A configuration with failed jobs comes after all others: the mean of its
    other jobs is not what the user can expect.

    Args:
        configuration_of: Id of the configuration of every job that repeats one; it is the id of one of the jobs.
        failed: Ids of configurations with a job that has diverged or failed.

    Source: none; the paper tries every configuration once.
    """
    groups: dict[str, list[S]] = {}
    for item in items:
        groups.setdefault(configuration_of.get(item.job, item.job), []).append(item)
    means: dict[str, S] = {name: _mean(name, group) for name, group in groups.items()}
    order = [
        *ordered(mean for name, mean in means.items() if name not in failed),
        *ordered(mean for name, mean in means.items() if name in failed),
    ]
    return [Repeated(mean, tuple(ordered(groups[mean.job]))) for mean in order]


def _mean(name: str, group: Sequence[S]) -> S:
    if len(group) == 1:
        return replace(group[0], job=name)
    first = group[0]
    # A configuration with a value that is not finite is ranked as if its mean were not finite.
    losses, scores = [item.validation_loss for item in group], [item.score for item in group]
    starts = [item.start_loss for item in group if item.start_loss is not None]
    facts: dict[str, Any] = {}
    if isinstance(first, Candidate):
        facts["is_training"] = any(isinstance(item, Candidate) and item.is_training for item in group)
    return replace(
        first,
        job=name,
        validation_loss=statistics.fmean(losses) if all(map(math.isfinite, losses)) else math.inf,
        score=LEAST_SCORE if LEAST_SCORE in scores else statistics.fmean(scores),
        score_rows=_mean_rows([item.score_rows for item in group]),
        start_loss=statistics.fmean(starts) if len(starts) == len(group) else None,
        **facts,
    )


def _mean_rows(rows: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Return the mean of every row; empty if rows are unknown for a job, or a value is not finite."""
    if len({len(values) for values in rows}) > 1 or not all(map(math.isfinite, itertools.chain.from_iterable(rows))):
        return ()
    return tuple(map(statistics.fmean, zip(*rows, strict=True)))


EVAL_ACCURACY = "eval_accuracy"
"""The scorer that chooses by the number of right answers alone, and ignores noise."""


def scores_of(judgement: Judgement) -> tuple[FinalistScore, ...]:
    """Return mean score and interval of every job, in the order of ``judgement``; empty if the scorer failed."""
    is_counted = judgement.scorer not in GRADED_SCORERS
    return tuple(
        FinalistScore(
            job=job,
            num_questions=len(rows),
            num_correct=round(sum(rows)) if is_counted else None,
            mean=statistics.fmean(rows),
            interval=interval_of(rows),
            rows=rows,
        )
        for job, rows in judgement.rows.items()
    )


def interval_of(rows: Sequence[float]) -> tuple[float, float] | None:
    """Return the 95 % interval of the mean of ``rows``: Wilson's if every row is 0 or 1, else Student's.

    None for a single row that is neither, and if the interval is not finite."""
    num_rows = len(rows)
    if set(rows) <= {0.0, 1.0}:
        return wilson_interval(statistics.fmean(rows), num_rows)
    if num_rows == 1:
        return None
    try:
        half = student_quantile(num_rows - 1) * statistics.stdev(rows) / math.sqrt(num_rows)
    except OverflowError:
        return None
    mean = statistics.fmean(rows)
    interval = (mean - half, mean + half)
    return interval if all(map(math.isfinite, interval)) else None


def choose(
    finalists: Sequence[LossPoint], scores: Mapping[str, FinalistScore], *, scorer: str
) -> tuple[LossPoint, list[LossPoint]]:
    """Choose the winner by the scores of the answers.

    The best mean score leads. If other jobs are within noise of the leader (the paired difference of their rows,
    :func:`alto.early_exit.noise.is_within_noise`), the validation loss decides among them and the leader. For
    ``eval_accuracy``, the validation loss decides only between equal scores.

    Args:
        finalists: Best evaluations of the jobs that were scored, the best by the task's metric first.

    Returns:
        The winner, and the other jobs within noise of the best score, in their order, with their scores; none for
        ``eval_accuracy``.
    """
    if scorer == EVAL_ACCURACY:
        return max(finalists, key=lambda point: (scores[point.job].score, -point.validation_loss)), []
    scored = [replace(point, score=scores[point.job].score, score_rows=scores[point.job].rows) for point in finalists]
    winner, *tied = leading_group(scored)
    return winner, tied
