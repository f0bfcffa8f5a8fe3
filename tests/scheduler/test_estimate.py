"""Estimated durations: by events they equal step by step, and slots are well used on recorded jobs."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alto.early_exit import Recording, Selection, policy_from
from alto.records import Rung, Throughput
from alto.scheduler import (
    JobDemand,
    JobWork,
    ResidentLimits,
    estimate_duration_s,
    expected_duration_s,
    fitted_rungs,
    plan_residents,
)
from alto.spec import EarlyExit
from alto.spec.early_exit import places_at

RECORDINGS = Path(__file__).parents[2] / "benchmarks" / "recordings"
PACE = Throughput(step_s=0.1, job_s=0.01, token_s=0.001, eval_token_s=0.0005, points=())


def work(job: str, batch_size: int, num_steps: int, num_evaluations: int = 0) -> JobWork:
    return JobWork(
        job=job,
        batch_size=batch_size,
        num_tokens=10 * batch_size,
        num_steps=num_steps,
        num_evaluations=num_evaluations,
    )


@st.composite
def tasks(draw: st.DrawFn) -> tuple[list[JobWork], ResidentLimits]:
    count = draw(st.integers(1, 8))
    jobs = [
        work(f"job-{index}", draw(st.sampled_from([1, 2, 4, 8])), draw(st.integers(1, 9)), draw(st.integers(0, 3)))
        for index in range(count)
    ]
    limits = ResidentLimits(num_slots=draw(st.integers(1, 4)), max_tokens=draw(st.none() | st.integers(5, 200)))
    return jobs, limits


def step_by_step(jobs: list[JobWork], limits: ResidentLimits, validation_tokens: int) -> float:
    left = {job.job: job.num_steps for job in jobs}
    slot_of: dict[str, int] = {}
    duration_s = 0.0
    while any(left.values()):
        demands = [
            JobDemand(
                job=job.job,
                batch_size=job.batch_size,
                num_tokens=job.num_tokens,
                slot=slot_of.get(job.job),
                has_started=left[job.job] < job.num_steps,
            )
            for job in jobs
            if left[job.job]
        ]
        slot_of |= {admission.job: admission.slot for admission in plan_residents(demands, limits).admit}
        residents = [job for job in jobs if job.job in slot_of]
        duration_s += 0.1 + 0.01 * len(residents) + 0.001 * sum(job.num_tokens for job in residents)
        for job in residents:
            left[job.job] -= 1
            if not left[job.job]:
                del slot_of[job.job]
    return duration_s + 0.0005 * validation_tokens * sum(job.num_evaluations for job in jobs)


@given(tasks())
def test_going_from_change_to_change_is_going_step_by_step(task: tuple[list[JobWork], ResidentLimits]) -> None:
    jobs, limits = task
    found = estimate_duration_s(jobs, PACE, limits, validation_tokens=40)
    assert found == pytest.approx(step_by_step(jobs, limits, 40))


def test_without_rungs_the_task_is_expected_to_take_its_bound() -> None:
    jobs = [work(f"job-{index}", 2, 10, 5) for index in range(4)]
    limits = ResidentLimits(num_slots=2)
    bound = estimate_duration_s(jobs, PACE, limits, validation_tokens=40)
    found = expected_duration_s(jobs, PACE, limits, validation_tokens=40, rungs=())
    assert found == pytest.approx(bound)


def test_rungs_leave_the_share_of_steps_that_they_say() -> None:
    """Sixteen equal jobs of 100 steps in one slot: all train 10, a half 40 more, a fourth of those the other 50."""
    jobs = [work(f"job-{index:02d}", 2, 100, 10) for index in range(16)]
    rungs = (Rung(progress=0.1, keep=0.5), Rung(progress=0.5, keep=0.25))
    one = ResidentLimits(num_slots=1)
    bound = estimate_duration_s(jobs, PACE, one, validation_tokens=40)
    found = expected_duration_s(jobs, PACE, one, validation_tokens=40, rungs=rungs)
    assert found / bound == pytest.approx((16 * 10 + 8 * 40 + 2 * 50) / (16 * 100))


def test_what_rungs_keep_is_spread_over_the_batch_sizes() -> None:
    jobs = [work(f"job-{index}", size, 10) for index, size in enumerate([1] * 4 + [8] * 4)]
    wide = ResidentLimits(num_slots=8)
    half = expected_duration_s(jobs, PACE, wide, validation_tokens=0, rungs=[Rung(progress=0.5, keep=0.5)])
    assert half == pytest.approx(5 * (0.1 + 0.08 + 0.36) + 5 * (0.1 + 0.04 + 0.18))


TWO_RUNGS = EarlyExit(rungs=((0.025, 0.5), (0.05, 0.2)))


@pytest.mark.parametrize(
    ("name", "num_slots"),
    [
        ("gsm8k-alto-tiny", 4),
        ("gsm8k-alto-tiny", 8),
        ("gsm8k-alto-tiny", 16),
        ("dpo-alto-tiny-1", 4),
        ("dpo-alto-tiny-1", 8),
    ],
)
@pytest.mark.parametrize(("settings", "least"), [(TWO_RUNGS, 0.94), (EarlyExit(), 0.6)], ids=["two rungs", "default"])
def test_slots_are_used_until_fewer_jobs_than_slots_are_left(
    name: str, num_slots: int, settings: EarlyExit, least: float
) -> None:
    """The recorded jobs run as in the executor: rungs, waves, running ahead.

    The 40 jobs of dpo fill 16 slots two and a half times, and none may run ahead before a rung that drops half. The
    default's fields of two to ten jobs leave slots idle in their last wave, before a rung that keeps fewer.
    """
    recording = Recording.read(RECORDINGS / f"{name}.json.gz")
    selection = Selection(
        policy_from(settings), ema_alpha=settings.ema_alpha, total_steps={j.job: j.total_steps for j in recording.jobs}
    )
    tapes = {job.job: job for job in recording.jobs}
    evaluations = {job.job: dict(job.evaluations) for job in recording.jobs}
    steps = dict.fromkeys(tapes, 0)
    slot_of: dict[str, int] = {}
    used = offered = 0
    while selection.training:
        certain = selection.rungs.certain_to_be_kept()
        demands = [
            JobDemand(
                job=job,
                batch_size=tapes[job].rows_per_step,
                num_tokens=tapes[job].rows_per_step,
                slot=slot_of.get(job),
                is_waiting=selection.rungs.is_waiting(job),
                may_run_ahead=job in certain,
                has_started=steps[job] > 0,
            )
            for job in selection.training
        ]
        plan = plan_residents(demands, ResidentLimits(num_slots=num_slots))
        for parking in plan.park:
            del slot_of[parking.job]
        slot_of |= {admission.job: admission.slot for admission in plan.admit}
        train = [job for job in slot_of if not selection.rungs.is_waiting(job) or job in plan.ahead]
        # The residents stay until a job is evaluated or ends.
        count = min(
            next(
                (s for s in evaluations[job] if s > steps[job]), len(tapes[job].train_losses)
            ) - steps[job]
            for job in train
        )  # fmt: skip
        if len(selection.training) >= num_slots:
            used += count * len(train)
            offered += count * num_slots
        for job in train:
            first, steps[job] = steps[job], steps[job] + count
            selection.observe_losses(job, first + 1, tapes[job].train_losses[first : steps[job]])
            if selection.is_training(job) and steps[job] in evaluations[job]:
                selection.observe(job, steps[job], evaluations[job][steps[job]])
            if not selection.is_training(job):
                del slot_of[job]
        while selection.rungs.is_ready():
            for decision in selection.select().dropped:
                slot_of.pop(decision.job, None)
    assert offered
    assert used / offered >= least


@pytest.mark.parametrize(
    ("limit_s", "kept"),
    [
        (276, [10, 8, 5, 3, 2, 1]),
        (263, [8, 6, 4, 3, 2, 1]),
        (198, [5, 4, 3, 2, 1, 1]),
        (170, [3, 2, 2, 1, 1, 1]),
        (100, [1, 1, 1, 1, 1, 1]),
    ],
)
def test_rungs_keep_as_many_jobs_as_a_budget_of_time_pays_for(limit_s: int, kept: list[int]) -> None:
    jobs, limits = [work(f"job-{index}", 4, 1000) for index in range(60)], ResidentLimits(num_slots=60)
    rungs = policy_from(EarlyExit()).rungs
    cost = {"throughput": Throughput(step_s=0, job_s=0.1, token_s=0, eval_token_s=0, points=()), "limits": limits}
    found = fitted_rungs(jobs, **cost, validation_tokens=0, rungs=rungs, limit_s=limit_s)
    assert [places_at(found, index, 60) for index in range(len(found))] == kept
    assert [rung.progress for rung in found] == [rung.progress for rung in rungs]
    fits = expected_duration_s(jobs, **cost, validation_tokens=0, rungs=found) <= limit_s
    assert fits == (limit_s > 100)
