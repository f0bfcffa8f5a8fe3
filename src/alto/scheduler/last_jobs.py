"""Forecasts the last jobs of a task, when there are fewer jobs than ranks: on all ranks, or on one rank per job. Pure.

On all ranks, every job's rows are split, and each rank does the fixed work of a step for all jobs. On one rank per job,
a step takes as long as the largest job's step alone, and the other GPUs are returned to the queue. The measured
duration of a step tells which is better. In both cases, rungs ahead still end jobs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from alto.records import Throughput

__all__ = ["LastJob", "LastJobsForecast", "forecast_last_jobs"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LastJob:
    """A remaining job.

    Attributes:
        num_tokens: Expected tokens of one of its steps.
        num_steps: Remaining steps if no rung ends it.
        step: Steps done so far.
    """

    num_tokens: int
    num_steps: int
    step: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LastJobsForecast:
    """The remaining seconds of a task on fewer GPUs and on all its GPUs.

    Attributes:
        num_gpus: The number of remaining jobs.
        duration_s: Seconds on ``num_gpus`` GPUs, one job on each.
        spread_duration_s: Seconds on all its GPUs.
    """

    num_gpus: int
    duration_s: float
    spread_duration_s: float


def forecast_last_jobs(
    jobs: Sequence[LastJob], throughput: Throughput, num_ranks: int, *, places: Sequence[tuple[float, int]] = ()
) -> LastJobsForecast | None:
    """Forecast the remaining seconds on fewer and on all GPUs; None unless there are fewer jobs than ranks.

    Args:
        jobs: The remaining jobs.
        throughput: Model of step durations on ``num_ranks`` ranks, with the jobs and tokens of all of them.
        num_ranks: Ranks of the task.
        places: For each rung, its progress as a share of a job's steps, and the number of jobs that continue. It is not
            known yet which jobs continue: the jobs with the most remaining work are assumed, so that neither duration
            is underestimated.
    """
    if not 0 < len(jobs) < num_ranks:
        return None
    most_work_first = sorted(jobs, key=lambda job: -job.num_tokens * job.num_steps)
    left = [replace(job, num_steps=_steps_to_its_end(job, index, places)) for index, job in enumerate(most_work_first)]
    left.sort(key=lambda job: job.num_steps)
    alone_s = spread_s = 0.0
    done = 0
    while left:
        num_steps = left[0].num_steps - done
        largest, together = max(job.num_tokens for job in left), sum(job.num_tokens for job in left)
        # In a measured step every rank has the same numbers of jobs and tokens.
        alone_s += num_steps * throughput.duration_s(num_ranks, num_ranks * largest)
        spread_s += num_steps * throughput.duration_s(num_ranks * len(left), together)
        done = left[0].num_steps
        left = [job for job in left if job.num_steps > done]
    return LastJobsForecast(num_gpus=len(jobs), duration_s=alone_s, spread_duration_s=spread_s)


def _steps_to_its_end(job: LastJob, index: int, places: Sequence[tuple[float, int]]) -> int:
    """Return the steps until the first rung ahead of ``job`` from which ``index`` jobs or fewer continue."""
    total_steps = job.step + job.num_steps
    ends = [math.ceil(round(progress * total_steps, 9)) - job.step for progress, count in places if count <= index]
    return min([job.num_steps, *(steps for steps in ends if steps > 0)])
