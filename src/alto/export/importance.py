"""Estimates how much of the task's selection metric each setting explains alone, from the jobs of a run.

Jobs that were stopped early cannot be compared by their last evaluations, so all are compared at exactly equal
progress, as rungs compare them: at the first rung, or without rungs at the last progress that all have reached. Their
scores are turned into ranks, which neither a diverging job nor a scale can distort; the share of the differences
between ranks that a setting explains is epsilon squared of a one-way analysis of variance: eta squared less what chance
would give it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from alto.early_exit import point_at_share
from alto.export.wording import format_setting, tidy_config, varying_keys
from alto.records import ExitReason, Rung
from alto.runs import JobHistory, RunHistory

__all__ = ["MIN_JOBS", "Importance", "SettingImportance", "importance_of_settings"]

MIN_JOBS = 8
"""Smallest number of jobs with a finite loss; with fewer, chance dominates."""

_WORST = (math.inf, math.inf)

NUM_BINS = 3
"""Number of equal groups for a setting whose value differs in most jobs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingImportance:
    """What one setting alone explains.

    Attributes:
        key: Configuration key.
        share: Part of the differences between the ranks of the jobs, in [0, 1].
        best, worst: The value, or the range of values, whose jobs ranked best and worst on average.
    """

    key: str
    share: float
    best: str
    worst: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Importance:
    """Settings, the most important first.

    Attributes:
        progress: Share of its steps after which every job is compared.
        num_jobs: Jobs compared.
        num_left_out: Jobs that have not reached that point, jobs that ended before it for a reason unrelated to their
            loss, and clones, which began with the weights of another job.
        settings: Share of each setting.
    """

    progress: float
    num_jobs: int
    num_left_out: int
    settings: tuple[SettingImportance, ...]

    @property
    def rest(self) -> float:
        """The share that no setting explains alone, in [0, 1]: interactions and chance."""
        return max(0.0, 1.0 - sum(setting.share for setting in self.settings))


def importance_of_settings(history: RunHistory) -> Importance | None:
    """The importance of the settings that vary; None if there are too few jobs or settings."""
    progress, scores = _scores_at_equal_progress(history)
    if sum(score != _WORST for score in scores.values()) < MIN_JOBS:
        return None
    ranks = _ranks(scores)
    configs = {job: tidy_config(history.jobs[job].config) for job in scores}
    settings = [
        found
        for key in varying_keys(list(configs.values()))
        if (found := _judge(key, {job: config.get(key) for job, config in configs.items()}, ranks)) is not None
    ]
    if not settings:
        return None
    return Importance(
        progress=progress,
        num_jobs=len(scores),
        num_left_out=len(history.jobs) - len(scores),
        settings=tuple(sorted(settings, key=lambda setting: -setting.share)),
    )


def _scores_at_equal_progress(history: RunHistory) -> tuple[float, dict[str, tuple[float, float]]]:
    """The progress at which jobs are compared, and the score of every job there; the worst if it diverged."""
    reached = [job.evaluations[-1].progress for job in history.jobs.values() if job.evaluations and not job.origin]
    if not reached:
        return 0.0, {}
    progress = min([rung.progress for rung in history.rung_settings] or reached)
    rung = Rung(progress=progress, keep=1.0)
    scores = {name: _score_at(job, rung) for name, job in history.jobs.items() if not job.origin}
    return progress, {name: score for name, score in scores.items() if score is not None}


def _score_at(job: JobHistory, rung: Rung) -> tuple[float, float] | None:
    point = point_at_share(job.evaluations, rung, job.total_steps, job.start)
    if point is not None:
        return point.sort_key if math.isfinite(point.validation_loss) else _WORST
    return _WORST if job.exit_reason == ExitReason.DIVERGING else None


def _ranks(scores: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """Ranks from 1, best first; equal scores share the mean of their ranks."""
    ordered = sorted(scores.values())
    first = {score: ordered.index(score) for score in set(ordered)}
    return {job: first[score] + (ordered.count(score) + 1) / 2 for job, score in scores.items()}


def _judge(key: str, values: Mapping[str, Any], ranks: Mapping[str, float]) -> SettingImportance | None:
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
    return SettingImportance(
        key=key,
        share=max(0.0, (between - by_chance) / total),
        best=min(means, key=means.__getitem__),
        worst=max(means, key=means.__getitem__),
    )


def _groups(values: Mapping[str, Any]) -> dict[str, list[str]]:
    """Jobs by the value of a setting, or by ranges of it where most jobs have a value of their own."""
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
