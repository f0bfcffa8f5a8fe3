"""The paper's program against exhaustive search and against CP-SAT."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

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


class _Clock:
    """A clock that advances by ``step_s`` with each reading."""

    def __init__(self, step_s: float) -> None:
        self._now_s, self._step_s = 0.0, step_s

    def monotonic(self) -> float:
        self._now_s += self._step_s
        return self._now_s


def _spread_out(num_tasks: int) -> SchedulingProblem:
    """Return a problem whose list schedule is above the bound, so that it can be improved."""
    return SchedulingProblem(nodes=nodes_of(2), pending=tasks_of(*([(1, 3), (1, 2)] * num_tasks)[:num_tasks]))


def test_a_program_that_takes_too_long_to_make_is_not_solved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(milp, "time", _Clock(0.01))
    monkeypatch.setattr(milp._Model, "solve", lambda model, deadline: pytest.fail("SCIP was asked"))
    num_tasks = 40  # 780 pairs with a reading every 10 ms, 250 of which take a quarter of the 10 s
    schedule = schedule_tasks(_spread_out(num_tasks), method="milp", time_limit_s=10.0)
    check_schedule(_spread_out(num_tasks), schedule)
    assert schedule.notice == "scheduled by lpt: 40 tasks were too many for milp in 10 s"


def test_the_solver_is_given_what_making_the_program_left(monkeypatch: pytest.MonkeyPatch) -> None:
    from ortools.linear_solver import pywraplp

    given: list[int] = []
    monkeypatch.setattr(pywraplp.Solver, "SetTimeLimit", lambda solver, milliseconds: given.append(milliseconds))
    monkeypatch.setattr(milp, "time", _Clock(0.1))
    problem = _spread_out(5)
    check_schedule(problem, schedule_tasks(problem, method="milp", time_limit_s=10.0))
    # 17 readings for 15 checks (5 tasks, 10 pairs): 1.6 s, and one and a half times as much for SCIP to read it.
    assert given == [pytest.approx(10_000 - 2.5 * 1_600, abs=500)]


def test_making_a_large_program_never_goes_on_for_long_without_looking_at_the_clock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without the limit, making the program and having SCIP read it takes half a minute and more."""
    from ortools.linear_solver import pywraplp

    num_tasks, num_gpus = 200, 16
    clock, added = _Clock(0.001), [0]  # constraints since the last reading
    add, monotonic = pywraplp.Solver.Add, clock.monotonic

    def counted(solver: object, *args: object) -> object:
        added[-1] += 1
        return add(solver, *args)

    def looked() -> float:
        added.append(0)
        return monotonic()

    monkeypatch.setattr(pywraplp.Solver, "Add", counted)
    monkeypatch.setattr(pywraplp.Solver, "Solve", lambda solver, *_: pytest.fail("SCIP was asked"))
    monkeypatch.setattr(milp, "time", SimpleNamespace(monotonic=looked))
    problem = SchedulingProblem(nodes=nodes_of(8, 8), pending=tasks_of(*[(1, 3 + i % 7) for i in range(num_tasks)]))
    schedule = schedule_tasks(problem, method="milp", time_limit_s=1.0)
    check_schedule(problem, schedule)
    assert schedule.notice.startswith("scheduled by lpt: 200 tasks were too many for milp")
    assert 0 < max(added) <= 2 * num_gpus, "the constraints of one pair of tasks"
    assert len(added) <= 260, "a quarter of a second at a millisecond per reading"
    assert added[-1] == 0, "nothing is added when that is over"
