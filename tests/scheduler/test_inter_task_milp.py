"""The paper's program against exhaustive search and against CP-SAT."""

from __future__ import annotations

import dataclasses

import pytest
from schedules import least, nodes_of, random_problem, tasks_of

from alto.scheduler import SchedulingProblem, check_schedule, schedule_tasks
from alto.scheduler.inter_task import milp


@pytest.mark.parametrize("seed", range(40))
def test_the_makespan_is_that_of_trying_everything(seed: int) -> None:
    problem = random_problem(seed)
    problem = dataclasses.replace(problem, pending=problem.pending[:3])
    schedule = schedule_tasks(problem, method="milp", time_limit_s=60.0)
    check_schedule(problem, schedule)
    assert schedule.status == "optimal"
    assert schedule.makespan_s == pytest.approx(least(problem)[0])


@pytest.mark.parametrize("seed", range(2000, 2010))
def test_higher_priorities_come_first(seed: int) -> None:
    problem = random_problem(seed, priorities=2)
    problem = dataclasses.replace(problem, pending=problem.pending[:3])
    schedule = schedule_tasks(problem, method="milp", time_limit_s=60.0)
    check_schedule(problem, schedule)
    high = dataclasses.replace(problem, pending=tuple(task for task in problem.pending if task.priority == 1))
    names = {demand.task for demand in high.pending}
    ends = [placement.end_s for placement in schedule.placements if placement.task in names]
    assert max(ends, default=0.0) == pytest.approx(least(high)[0])


def test_a_program_that_was_not_solved_in_time_is_a_list_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(milp._Model, "solve", lambda model, deadline: None)
    problem = SchedulingProblem(nodes=nodes_of(2), pending=tasks_of((1, 3), (1, 3), (1, 2), (1, 2), (1, 2)))
    schedule = schedule_tasks(problem, method="milp")
    check_schedule(problem, schedule)
    assert schedule.placements == schedule_tasks(problem, method="lpt").placements
    assert schedule.status == "feasible"
