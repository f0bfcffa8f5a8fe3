"""CP-SAT against exhaustive search, the validator, and its own bounds."""

from __future__ import annotations

import dataclasses
import pickle
import re
import sys
from typing import Any

import pytest
from budgets import examples
from counting import num_calls
from hypothesis import given, settings
from schedules import least, nodes_of, paper_case, problems, random_problem, tasks_of

from alto.errors import UnsupportedError
from alto.records import Schedule
from alto.scheduler import SchedulingProblem, check_schedule, schedule_tasks
from alto.scheduler.inter_task.cp_sat import CpModel
from alto.scheduler.inter_task.lists import Solved
from alto.version import install_command

LIMIT_S = 600.0
"""A limit that none of these tests reaches."""


def costs(schedule: Schedule) -> tuple[float, float]:
    return schedule.makespan_s, sum(placement.end_s for placement in schedule.placements)


@pytest.mark.parametrize("first_seed", range(0, 200, 20))
def test_small_problems_are_solved_as_by_trying_everything(first_seed: int) -> None:
    for seed in range(first_seed, first_seed + 20):
        problem = random_problem(seed)
        schedule = schedule_tasks(problem, method="cp-sat", time_limit_s=60.0)
        check_schedule(problem, schedule)
        assert costs(schedule) == pytest.approx(least(problem)), seed
        assert schedule.status == "optimal"
        assert schedule.bound_s == pytest.approx(schedule.makespan_s), seed


def test_priorities_are_solved_as_by_trying_everything_one_after_the_other() -> None:
    for seed in range(1000, 1030):
        problem = random_problem(seed, priorities=2)
        schedule = schedule_tasks(problem, method="cp-sat", time_limit_s=60.0)
        check_schedule(problem, schedule)
        priorities = {demand.task: demand.priority for demand in problem.pending}
        placed = [placement for placement in schedule.placements if priorities[placement.task] == 1]
        high = dataclasses.replace(problem, pending=tuple(task for task in problem.pending if task.priority == 1))
        ends = [placement.end_s for placement in placed]
        assert (max(ends, default=0), sum(ends)) == pytest.approx(least(high)), seed
        makespan_s, sum_s = least(problem, placed)
        assert costs(schedule) == pytest.approx((makespan_s, sum_s + sum(ends))), seed


@settings(max_examples=examples(25))
@given(problems(max_tasks=12))
def test_any_schedule_is_valid(problem: SchedulingProblem) -> None:
    schedule = schedule_tasks(problem, method="cp-sat", time_limit_s=0.2)
    check_schedule(problem, schedule)
    assert schedule.status == "optimal" or schedule.bound_s <= schedule.makespan_s


def test_the_paper_case_is_proven_with_little_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """The solver's work in its own measure is some tens of milliseconds; the rest is measured by calls of functions."""
    problem = paper_case()
    schedule_tasks(SchedulingProblem(nodes=nodes_of(1), pending=tasks_of((1, 1.0))), method="cp-sat")  # loads OR-tools
    from ortools.sat.python import cp_model

    class Hurried(cp_model.CpSolver):
        def __init__(self) -> None:
            super().__init__()
            self.parameters.max_deterministic_time = 0.02

    solved: list[Solved] = []
    solve = CpModel._solve

    def noted(model: CpModel, *args: Any) -> Solved:
        solved.append(solve(model, *args))
        return solved[-1]

    monkeypatch.setattr(cp_model, "CpSolver", Hurried)
    monkeypatch.setattr(CpModel, "_solve", noted)
    _, schedule = num_calls(lambda: schedule_tasks(problem, method="cp-sat", time_limit_s=LIMIT_S), at_most=1_000_000)
    check_schedule(problem, schedule)
    assert schedule.status == "optimal"
    assert schedule.gap == 0.0
    assert solved
    assert all(found.is_optimal for found in solved), "the search was complete"
    assert schedule_tasks(problem, method="sjf").makespan_s / schedule.makespan_s > 1.2


def test_the_same_problem_has_the_same_schedule() -> None:
    problem = random_problem(3)
    assert schedule_tasks(problem, method="cp-sat") == schedule_tasks(problem, method="cp-sat")


def test_times_that_no_tick_divides_cost_next_to_nothing() -> None:
    problem = SchedulingProblem(nodes=nodes_of(2), pending=tasks_of((1, 1e7 / 3), (1, 1e7 / 7), (2, 0.123456789)))
    schedule = schedule_tasks(problem, method="cp-sat")
    check_schedule(problem, schedule)
    assert schedule.makespan_s == pytest.approx(1e7 / 3 + 0.123456789, abs=1e-6)
    assert schedule.gap < 1e-6


@pytest.mark.parametrize(("num_tasks", "num_nodes"), [(60, 16), (200, 16)])
def test_a_large_problem_is_better_than_lpt_within_its_time(num_tasks: int, num_nodes: int) -> None:
    sizes = (1, 2, 1, 4, 1, 8, 2, 1)
    tasks = tasks_of(*((sizes[index % 8], 100 + index * 7919 % 1000) for index in range(num_tasks)))
    problem = SchedulingProblem(nodes=nodes_of(*(8,) * num_nodes), pending=tasks)
    schedule = schedule_tasks(problem, method="cp-sat", time_limit_s=1.0)
    check_schedule(problem, schedule)
    assert schedule.makespan_s <= schedule_tasks(problem, method="lpt").makespan_s
    hinted = schedule_tasks(problem, method="cp-sat", time_limit_s=0.3, hint=schedule)
    check_schedule(problem, hinted)
    assert hinted.makespan_s <= schedule.makespan_s * (1 + 1e-9)


def test_a_quota_or_a_release_does_not_keep_a_large_problem_from_being_scheduled() -> None:
    problem = SchedulingProblem(
        nodes=nodes_of(*(8,) * 8),
        pending=tuple(
            dataclasses.replace(task, tenant="ab"[index % 2], release_s=float(index % 3))
            for index, task in enumerate(tasks_of(*((1 + index % 8, 10.0 + index) for index in range(100))))
        ),
        quotas={"a": 20},
    )
    schedule = schedule_tasks(problem, method="cp-sat", time_limit_s=0.5)
    check_schedule(problem, schedule)
    assert schedule.makespan_s <= schedule_tasks(problem, method="lpt").makespan_s


def test_problem_and_schedule_cross_processes() -> None:
    problem = paper_case()
    schedule = schedule_tasks(pickle.loads(pickle.dumps(problem)), method="cp-sat", time_limit_s=0.3)
    assert pickle.loads(pickle.dumps(schedule)) == schedule


@pytest.mark.parametrize(("method", "module"), [("cp-sat", "ortools.sat.python"), ("milp", "ortools.linear_solver")])
def test_a_missing_package_is_named(method: str, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UnsupportedError, match=re.escape(install_command("scheduler"))):
        schedule_tasks(paper_case(), method=method)


def test_with_a_gap_it_ends_as_soon_as_that_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = (188.4, 82.13, 36.77, 194.2, 47.31, 106.9, 164.05, 93.4, 88.1, 133.7, 62.2)
    wide = {1, 4, 7}
    problem = SchedulingProblem(
        nodes=nodes_of(2), pending=tasks_of(*((2 if n in wide else 1, s) for n, s in enumerate(seconds)))
    )
    gaps: list[float] = []
    least_makespan = CpModel.least_makespan

    def noted(model: CpModel, *args: Any, gap: float, **options: Any) -> Solved:
        gaps.append(gap)
        return least_makespan(model, *args, gap=gap, **options)

    monkeypatch.setattr(CpModel, "least_makespan", noted)
    found = schedule_tasks(problem, method="cp-sat", time_limit_s=2.0, gap=0.05)
    assert found.gap <= 0.05
    check_schedule(problem, found)
    assert gaps == [], "the start is within the gap"
    schedule_tasks(problem, method="cp-sat", time_limit_s=2.0)
    assert gaps == [0.0], "without a gap it searches for the optimum"
