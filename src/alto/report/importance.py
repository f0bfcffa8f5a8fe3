"""Estimates how much of the task's selection metric each setting alone explains, from the jobs of a run.

Jobs that were stopped early cannot be compared by their last evaluations, so jobs are compared at exactly equal
progress, as at rungs. One comparison is not enough: at the first rung all jobs are present, but the fastest learners
lead; later, only the jobs that continued are present. So there are two comparisons if enough jobs continued. The report
also shows the winner's value, and says so if the first comparison favours another value.

Scores are turned into ranks, which neither a diverging job nor a scale can distort. The share of the differences
between ranks that a setting explains is epsilon squared of a one-way analysis of variance: eta squared, corrected for
chance.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from alto.early_exit import point_at_fraction
from alto.records import ExitReason, LossPoint, Rung
from alto.runs import JobHistory, RunHistory
from alto.views.wording import format_setting, tidy_config, varying_keys

MIN_JOBS = 8
"""Smallest number of jobs with a finite loss; with fewer jobs, chance dominates."""

_WORST = (math.inf, math.inf)

NUM_BINS = 3
"""Number of equal groups for a setting whose value differs in most jobs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingImportance:
    """How much one setting alone explains.

    Attributes:
        share: Share of the differences between the ranks of the jobs that it explains, in [0, 1].
        best, worst: The value, or the range of values, whose jobs ranked best and worst on average.
        is_winners: Whether the chosen job has the best value, or a value in the best range.
    """

    key: str
    share: float
    best: str
    worst: str
    is_winners: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Settings compared after an equal share of training, the most important first.

    Attributes:
        progress: Share of its steps after which every job is compared.
        num_left_out: Number of other jobs: jobs that have not reached that point, jobs that ended before it for a
            reason unrelated to their loss, and clones, which began with the weights of another job.
    """

    progress: float
    num_jobs: int
    num_left_out: int
    settings: tuple[SettingImportance, ...]

    @property
    def rest(self) -> float:
        """The share that no setting explains alone, in [0, 1]: interactions and chance."""
        return max(0.0, 1.0 - sum(setting.share for setting in self.settings))

    def of(self, key: str) -> SettingImportance | None:
        """Return the importance of the setting ``key``; None if it could not be compared."""
        return next((setting for setting in self.settings if setting.key == key), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Importance:
    """Settings compared after one or two equal shares of training.

    Attributes:
        winner: Value of the chosen job by configuration key.
        comparisons: A comparison of all jobs at the first point; then, if there is one, a comparison of the jobs that
            continued, at the last point that enough of them have reached.
    """

    winner: Mapping[str, str]
    comparisons: tuple[Comparison, ...]

    @property
    def keys(self) -> tuple[str, ...]:
        """All settings that were compared, by importance; the settings of the latest comparison come first."""
        return tuple(
            dict.fromkeys(setting.key for comparison in reversed(self.comparisons) for setting in comparison.settings)
        )

    @property
    def overturned(self) -> tuple[SettingImportance, ...]:
        """Settings of the first comparison that affect the loss; the winner does not have their best values."""
        return tuple(found for found in self.comparisons[0].settings if found.share > 0 and not found.is_winners)


def importance_of_settings(history: RunHistory) -> Importance | None:
    """Return the importance of the settings that vary; None if there are too few jobs or settings."""
    first = _compared(history, first_equal_fraction(history))
    best = history.best
    if first is None or best is None:
        return None
    later = {*map(history.fraction_after, history.rung_settings), 1.0}
    found = (_compared(history, progress) for progress in sorted(later, reverse=True) if progress > first.progress)
    last = next((comparison for comparison in found if comparison is not None), None)
    config = tidy_config(best.config)
    keys = {setting.key for setting in first.settings} | ({s.key for s in last.settings} if last else set())
    return Importance(
        winner={key: format_setting(config.get(key)) for key in keys},
        comparisons=(first,) if last is None else (first, last),
    )


def first_equal_fraction(history: RunHistory) -> float:
    """Return the share of its steps after which every job can be compared: the share at the first rung, or without
    rungs the last share that all jobs have reached; 0 if no job was evaluated."""
    reached = [job.evaluations[-1].progress for job in history.jobs.values() if job.evaluations and not job.origin]
    return min(map(history.fraction_after, history.rung_settings), default=min(reached)) if reached else 0.0


def point_at(job: JobHistory, progress: float) -> LossPoint | None:
    """Return the loss point of a job after exactly that share of its steps, interpolated between evaluations; None if
    the job has not reached it."""
    if not job.evaluations or not 0 < progress <= 1:
        return None
    return point_at_fraction(job.evaluations, Rung(progress=progress, keep=1.0), job.total_steps, job.start)


def _compared(history: RunHistory, progress: float) -> Comparison | None:
    scores = {
        name: score
        for name, job in history.jobs.items()
        if not job.origin and (score := _score_at(job, progress)) is not None
    }
    if sum(score != _WORST for score in scores.values()) < MIN_JOBS:
        return None
    ranks = _ranks(scores)
    configs = {job: tidy_config(history.jobs[job].config) for job in scores}
    winner = {} if history.best is None else tidy_config(history.best.config)
    settings = [
        found
        for key in varying_keys(list(configs.values()))
        if (found := _judge(key, {job: config.get(key) for job, config in configs.items()}, ranks, winner.get(key)))
        is not None
    ]
    if not settings:
        return None
    return Comparison(
        progress=progress,
        num_jobs=len(scores),
        num_left_out=len(history.jobs) - len(scores),
        settings=tuple(sorted(settings, key=lambda setting: -setting.share)),
    )


def _score_at(job: JobHistory, progress: float) -> tuple[float, float] | None:
    """Return the score of a job at that progress; the worst score if it diverged, None if there is none."""
    point = point_at(job, progress)
    if point is not None:
        return point.sort_key if math.isfinite(point.validation_loss) else _WORST
    return _WORST if job.exit_reason == ExitReason.DIVERGING else None


def _ranks(scores: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """Return ranks from 1, best first; equal scores share the mean of their ranks."""
    ordered = sorted(scores.values())
    first = {score: ordered.index(score) for score in set(ordered)}
    return {job: first[score] + (ordered.count(score) + 1) / 2 for job, score in scores.items()}


def _judge(
    key: str, values: Mapping[str, Any], ranks: Mapping[str, float], of_winner: object
) -> SettingImportance | None:
    groups = _groups(values)
    num_jobs = len(ranks)
    if len(groups) < 2 or num_jobs < 2 * len(groups):
        return None
    mean = statistics.fmean(ranks.values())
    means = {label: statistics.fmean(ranks[job] for job in jobs) for label, jobs in groups.items()}
    total = sum((rank - mean) ** 2 for rank in ranks.values())
    if total == 0:
        return None
    between = sum(len(jobs) * (means[label] - mean) ** 2 for label, jobs in groups.items())
    by_chance = (len(groups) - 1) * (total - between) / (num_jobs - len(groups))
    best = min(means, key=means.__getitem__)
    return SettingImportance(
        key=key,
        share=max(0.0, (between - by_chance) / total),
        best=best,
        worst=max(means, key=means.__getitem__),
        is_winners=any(format_setting(values[job]) == format_setting(of_winner) for job in groups[best]),
    )


def _groups(values: Mapping[str, Any]) -> dict[str, list[str]]:
    """Group jobs by the value of a setting, or by ranges of it if most jobs have different values."""
    by_value: dict[str, list[str]] = {}
    for job, value in values.items():
        by_value.setdefault(format_setting(value), []).append(job)
    is_number = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values.values())
    if 2 * len(by_value) <= len(values) or not is_number:
        return by_value
    ordered = sorted(values, key=lambda job: values[job])
    cuts = [round(index * len(ordered) / NUM_BINS) for index in range(NUM_BINS + 1)]
    bins = [ordered[start:end] for start, end in pairwise(cuts)]
    return {_range(bin_, values): bin_ for bin_ in bins}


def _range(jobs: Sequence[str], values: Mapping[str, float]) -> str:
    low, high = (float(f"{values[job]:.3g}") for job in (jobs[0], jobs[-1]))
    return f"{format_setting(low)} to {format_setting(high)}"
