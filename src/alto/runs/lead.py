"""Measures whether the winner of a run leads the next best job by more than the noise of the validation rows."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from alto.records import ExitReason, Lead
from alto.records.evaluation import student_quantile
from alto.runs.history import RunHistory
from alto.runs.job_history import JobHistory
from alto.spec import LOSS, loss_scale


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigurationHistory:
    """One configuration and the jobs that train it with different seeds.

    Attributes:
        jobs: Its jobs, best first.
        metric: Metric of ``mean`` and ``deviation``: ``loss``, or the task's metric.
        mean: Mean over the jobs' best adapters; NaN if one has no finite loss.
        deviation: Their sample standard deviation; NaN for a single job.
    """

    jobs: tuple[JobHistory, ...]
    metric: str
    mean: float
    deviation: float

    @property
    def has_failed(self) -> bool:
        """Whether one of several jobs has diverged or failed, so that the configuration comes after all others."""
        is_repeated = any(job.configuration is not None for job in self.jobs)
        return is_repeated and any(job.exit_reason in (ExitReason.DIVERGING, ExitReason.FAILED) for job in self.jobs)


def repeated_configurations(history: RunHistory) -> list[ConfigurationHistory]:
    """Return the configurations of a run; empty if no job repeats one.

    The configuration of the chosen job comes first. The others are ordered by their means, but configurations with a
    diverged or failed job come last.
    """
    groups: dict[str, list[JobHistory]] = {}
    for job in history.ranked():
        groups.setdefault(_name_of(job), []).append(job)
    if all(job.configuration is None for job in history.jobs.values()):
        return []
    best = None if history.best is None else _name_of(history.best)
    sign = 1.0 if history.metric == LOSS else -1.0
    found = {name: _configuration(jobs, history.metric) for name, jobs in groups.items()}

    def key(item: tuple[str, ConfigurationHistory]) -> tuple[bool, bool, bool, float]:
        name, one = item
        is_unknown = math.isnan(one.mean)
        return (name != best, is_unknown, one.has_failed, 0.0 if is_unknown else sign * one.mean)

    return [one for _, one in sorted(found.items(), key=key)]


def _name_of(job: JobHistory) -> str:
    return job.job if job.configuration is None else job.configuration


def _configuration(jobs: Sequence[JobHistory], metric: str) -> ConfigurationHistory:
    values = [_value_of(job, metric) for job in jobs]
    are_known = all(map(math.isfinite, values))
    return ConfigurationHistory(
        jobs=tuple(jobs),
        metric=metric,
        mean=statistics.fmean(values) if are_known else math.nan,
        deviation=statistics.stdev(values) if are_known and len(values) > 1 else math.nan,
    )


def _value_of(job: JobHistory, metric: str) -> float:
    if not math.isfinite(job.best_validation_loss):
        return math.nan
    return job.best_validation_loss if metric == LOSS else job.best_metrics.get(metric, math.nan)


def lead_of_winner(history: RunHistory) -> Lead | None:
    """Return the lead of the chosen job over the next best one, compared row by row.

    The lead is by the score of generated answers if a scorer chose, else by the task's metric; both jobs are compared
    at their best evaluation. If jobs repeat configurations, the next best job is the best job of the next best
    configuration. If the metric is the loss, jobs whose loss has another scale are left out. Return None if there is no
    other job with a usable adapter, or the values per row are not known.
    """
    winner = history.best
    if history.result is None or winner is None:
        return None
    if history.finalists:
        rows = {score.job: score.rows for score in history.finalists}
        others = [score for score in history.finalists if score.job != winner.job]
        if not others or winner.job not in rows:
            return None
        next_best = max(others, key=lambda score: score.score)
        return _lead(next_best.job, history.scorer, rows[winner.job], next_best.rows, ())
    runner_up = _runner_up(history, winner)
    if runner_up is None:
        return None
    if history.metric != LOSS:
        return _lead(runner_up.job, history.metric, winner.best_metric_rows, runner_up.best_metric_rows, ())
    weights: Sequence[float] = ()
    if history.started is not None:
        weights = history.started.ordered_weights or history.started.validation_weights
    # Losses per row are rounded in the journal; their weighted means, the losses of the jobs, are not.
    exact = runner_up.best_validation_loss - winner.best_validation_loss if weights else None
    if history.started is not None and history.started.evaluation_order:
        num_rows = min(len(runner_up.best_loss_rows), len(winner.best_loss_rows))  # the rows that both have
        higher, lower = runner_up.best_loss_rows[:num_rows], winner.best_loss_rows[:num_rows]
        return _lead(runner_up.job, LOSS, higher, lower, weights[:num_rows])
    # A lower loss is better, so the lead is the other job's loss minus the winner's.
    return _lead(runner_up.job, LOSS, runner_up.best_loss_rows, winner.best_loss_rows, weights, exact)


def _runner_up(history: RunHistory, winner: JobHistory) -> JobHistory | None:
    """Return the next best job; if jobs repeat configurations, the best job of the next best configuration."""
    of_others = [one.jobs[0] for one in repeated_configurations(history)[1:]]
    return next((job for job in of_others or history.ranked() if _competes(job, winner, history.metric)), None)


def _competes(job: JobHistory, winner: JobHistory, metric: str) -> bool:
    is_comparable = metric != LOSS or loss_scale(job.config) == loss_scale(winner.config)
    return job is not winner and math.isfinite(job.best_validation_loss) and is_comparable


def _lead(
    runner_up: str,
    metric: str,
    higher: Sequence[float],
    lower: Sequence[float],
    weights: Sequence[float],
    exact: float | None = None,
) -> Lead | None:
    """Return the weighted mean of the row differences, or ``exact`` if given, with its 95 % interval.

    The interval is Student's, for a ratio of sums. Return None if the mean or the interval is not finite.
    """
    num_rows = len(higher)
    if num_rows < 2 or num_rows != len(lower) or (weights and len(weights) != num_rows):
        return None
    differences = [a - b for a, b in zip(higher, lower, strict=True)]
    row_weights = weights or [1.0] * num_rows
    total = sum(row_weights)
    mean = sum(weight * difference for weight, difference in zip(row_weights, differences, strict=True)) / total
    try:
        residuals = sum(
            (weight * (difference - mean)) ** 2 for weight, difference in zip(row_weights, differences, strict=True)
        )
    except OverflowError:
        return None
    half = student_quantile(num_rows - 1) * math.sqrt(residuals * num_rows / (num_rows - 1)) / total
    found = mean if exact is None else exact
    if not math.isfinite(mean) or not math.isfinite(half):
        return None
    return Lead(
        runner_up=runner_up, metric=metric, difference=found, interval=(found - half, found + half), num_rows=num_rows
    )
