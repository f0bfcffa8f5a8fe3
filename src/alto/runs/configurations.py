"""The configurations of a run whose jobs repeat them with other seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from alto.records import ExitReason
from alto.runs.history import RunHistory
from alto.runs.job_history import JobHistory
from alto.spec.metric import LOSS

__all__ = ["ConfigurationHistory", "repeated_configurations"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigurationHistory:
    """One configuration and the jobs that repeat it; a job that repeats none is a configuration by itself.

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
