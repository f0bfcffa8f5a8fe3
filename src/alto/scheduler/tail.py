"""The end of a task, when fewer jobs are left than it has ranks: on all of them, or on as many as there are jobs. Pure.

On all of them every job's rows are shared out, and each rank does the fixed work of a step for all jobs. On as few as
there are jobs a step takes as long as that of the largest job alone, and the other GPUs go back to the queue. Which is
better is told by what a step was measured to take.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from alto.records import Throughput

__all__ = ["TailForecast", "TailJob", "forecast_tail"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TailJob:
    """A job that is left.

    Attributes:
        num_tokens: Tokens of one of its steps in expectation.
        num_steps: Steps it still has to do.
    """

    num_tokens: int
    num_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TailForecast:
    """What is left of a task, in seconds of training.

    Attributes:
        num_gpus: As many as there are jobs.
        duration_s: On so many, a job each.
        spread_duration_s: On all it has.
    """

    num_gpus: int
    duration_s: float
    spread_duration_s: float


def forecast_tail(jobs: Sequence[TailJob], throughput: Throughput, num_ranks: int) -> TailForecast | None:
    """Both ways to the end; None where there are no fewer jobs than ranks.

    Args:
        throughput: Of steps on ``num_ranks`` ranks, with the jobs and tokens of all of them.
    """
    if not 0 < len(jobs) < num_ranks:
        return None
    left = sorted(jobs, key=lambda job: job.num_steps)
    alone_s = spread_s = 0.0
    done = 0
    while left:
        num_steps = left[0].num_steps - done
        largest, together = max(job.num_tokens for job in left), sum(job.num_tokens for job in left)
        # What was measured is a step in which every rank has as many jobs and tokens.
        alone_s += num_steps * throughput.duration_s(num_ranks, num_ranks * largest)
        spread_s += num_steps * throughput.duration_s(num_ranks * len(left), together)
        done = left[0].num_steps
        left = [job for job in left if job.num_steps > done]
    return TailForecast(num_gpus=len(jobs), duration_s=alone_s, spread_duration_s=spread_s)
