"""Estimates the duration of a task before it runs. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from alto.records import Rung, Throughput
from alto.scheduler.intra_task import JobDemand, ResidentLimits, plan_residents
from alto.spec import places_at

_FRACTIONS_KEPT = (0.75, 0.5, 0.25, 0.0)
"""Fractions of their usual number of jobs that rungs may keep to fit a time budget, the largest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobWork:
    """The work of one job without early exit.

    Attributes:
        num_tokens: Expected tokens of a step, rounded up.
        num_evaluations: Number of evaluations; an evaluation on a part of the validation rows counts as a fraction.
    """

    job: str
    batch_size: int
    num_tokens: int
    num_steps: int
    num_evaluations: float


def estimate_duration_s(
    jobs: Iterable[JobWork], throughput: Throughput, limits: ResidentLimits, *, validation_tokens: int
) -> float:
    """Estimate the seconds until every job has done all its steps: the task's duration without early exit.

    This is an upper bound of the duration with early exit. `plan_residents` admits the jobs. Between two changes of the
    residents all steps take the same time, so the clock jumps from one change to the next.

    Args:
        validation_tokens: Tokens of one evaluation.
    """
    work = {job.job: job for job in jobs}
    left = {name: job.num_steps for name, job in work.items()}
    slots: dict[str, int] = {}
    duration_s = sum(job.num_evaluations for job in work.values()) * validation_tokens * throughput.eval_token_s
    while left:
        plan = plan_residents((_demand(work[name], left[name], slots.get(name)) for name in left), limits)
        slots.update((admission.job, admission.slot) for admission in plan.admit)
        tokens = sum(work[name].num_tokens for name in slots)
        step_s = throughput.duration_s(len(slots), tokens)
        num_steps = min(left[name] for name in slots)
        duration_s += num_steps * step_s
        for name in list(slots):
            left[name] -= num_steps
            if not left[name]:
                del left[name], slots[name]
    return duration_s


def expected_duration_s(
    jobs: Sequence[JobWork],
    throughput: Throughput,
    limits: ResidentLimits,
    *,
    validation_tokens: int,
    rungs: Sequence[Rung],
) -> float:
    """Estimate the expected seconds of the task with early exit.

    It is not known in advance which jobs a rung keeps. The estimate takes jobs at equal distances from a list that is
    sorted by batch size. Between rungs the remaining jobs train their share of steps as in `estimate_duration_s`; no
    job trains past a rung before all have reached it. Early exits between rungs are not included.

    Args:
        rungs: Points of selection, in the order of progress.
    """
    stages = zip((0.0, *(rung.progress for rung in rungs)), (*(rung.progress for rung in rungs), 1.0), strict=True)
    places = (*(places_at(rungs, index, len(jobs)) for index in range(len(rungs))), len(jobs))
    runners = sorted(jobs, key=lambda job: (-job.batch_size, job.job))
    duration_s = 0.0
    for (start, end), num_kept in zip(stages, places, strict=True):
        stage = [part for job in runners if (part := _part(job, start, end)).num_steps]
        duration_s += estimate_duration_s(stage, throughput, limits, validation_tokens=validation_tokens)
        num_kept = min(num_kept, len(runners))
        runners = [runners[index * len(runners) // num_kept] for index in range(num_kept)]  # at equal distances
    return duration_s


def fitted_rungs(
    jobs: Sequence[JobWork],
    throughput: Throughput,
    limits: ResidentLimits,
    *,
    validation_tokens: int,
    rungs: Sequence[Rung],
    limit_s: float,
) -> tuple[Rung, ...]:
    """Return ``rungs`` changed to keep only as many jobs as can be trained within ``limit_s``.

    Every rung keeps the same share of its usual number of jobs, and at least one. If even one job per rung does not
    fit, the rungs keep one job.

    Args:
        jobs, throughput, limits, validation_tokens, rungs: Same as for :func:`expected_duration_s`.
    """
    usual = [places_at(rungs, index, len(jobs)) for index in range(len(rungs))]
    found = tuple(rungs)
    for fraction in _FRACTIONS_KEPT:
        if expected_duration_s(jobs, throughput, limits, validation_tokens=validation_tokens, rungs=found) <= limit_s:
            break
        kept = [max(1, math.ceil(fraction * places)) for places in usual]
        found = tuple(
            rung if rung.max_kept else replace(rung, keep=min(1.0, places / before), min_kept=places)
            for rung, places, before in zip(rungs, kept, (len(jobs), *kept), strict=False)
        )
    return found


def _demand(job: JobWork, num_steps_left: int, slot: int | None) -> JobDemand:
    return JobDemand(
        job=job.job,
        batch_size=job.batch_size,
        num_tokens=job.num_tokens,
        slot=slot,
        has_started=num_steps_left < job.num_steps,
    )


def _part(job: JobWork, start: float, end: float) -> JobWork:
    """Return the part of the job between two shares of its steps; consecutive parts add up to the whole job."""

    def between(total: float) -> int:
        return math.ceil(round(end * total, 9)) - math.ceil(round(start * total, 9))

    return replace(job, num_steps=between(job.num_steps), num_evaluations=between(job.num_evaluations))


# Forecasts the last jobs of a task, when there are fewer jobs than ranks: on all ranks, or on one rank per job. Pure.
#
# On all ranks, every job's rows are split, and each rank does the fixed work of a step for all jobs. On one rank per
# job, a step takes as long as the largest job's step alone, and the other GPUs are returned to the queue. The measured
# duration of a step tells which is better. In both cases, rungs ahead still end jobs.


@dataclass(frozen=True, slots=True, kw_only=True)
class LastJob:
    """A remaining job.

    Attributes:
        num_tokens: Expected tokens of one of its steps.
        num_steps: Remaining steps if no rung ends it.
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
        throughput: Model of step durations on ``num_ranks`` ranks, with the jobs and tokens of all of them.
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
    """Return the remaining steps of ``job`` until the next rung that keeps at most ``index`` jobs, or until its end."""
    total_steps = job.step + job.num_steps
    ends = [math.ceil(round(progress * total_steps, 9)) - job.step for progress, count in places if count <= index]
    return min([job.num_steps, *(steps for steps in ends if steps > 0)])
