"""Scores of the answers of jobs: their mean, its interval, and the winner that they choose."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

from alto.early_exit.noise import leading_group
from alto.records import FinalistScore, Judgement, LossPoint
from alto.records.intervals import student_quantile

__all__ = ["choose", "interval_of", "scores_of"]

_NORMAL = statistics.NormalDist().inv_cdf(0.975)

EVAL_ACCURACY = "eval_accuracy"
"""The scorer that chooses by the number of right answers alone, and ignores noise."""

_GRADED = ("python", "http")
"""Scorers that return any number; the others score an answer as right (1) or wrong (0)."""


def scores_of(judgement: Judgement) -> tuple[FinalistScore, ...]:
    """Return mean score and interval of every job, in the order of ``judgement``; empty if the scorer failed."""
    is_counted = judgement.scorer not in _GRADED
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
        return _wilson(statistics.fmean(rows), num_rows)
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


def _wilson(share: float, num_rows: int) -> tuple[float, float]:
    """Return Wilson's score interval of a share, whose width is not zero even if all rows are equal."""
    squared = _NORMAL**2 / num_rows
    middle = (share + squared / 2) / (1 + squared)
    half = math.sqrt(share * (1 - share) * squared + squared**2 / 4) / (1 + squared)
    return max(0.0, middle - half), min(1.0, middle + half)
