"""List scheduling: orders, nodes, quotas, priorities, bounds; and the local search between nodes."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedules import least, nodes_of, paper_case, problems, random_problem, tasks_of

from alto.errors import SpecError
from alto.records import Gpu
from alto.scheduler import RunningTask, SchedulingProblem, TaskDemand, check_schedule, schedule_tasks
from alto.scheduler.inter_task import cp_sat
from alto.scheduler.inter_task.bounds import makespan_bound
from alto.scheduler.inter_task.cp_sat import balanced_reservations
from alto.scheduler.inter_task.lists import Reservation, place
from alto.scheduler.inter_task.problem import schedule_from

LISTS = ("fifo", "sjf", "lpt")


def starts(problem: SchedulingProblem, method: str) -> dict[str, float]:
    schedule = schedule_tasks(problem, method=method)
    check_schedule(problem, schedule)
    return {placement.task: placement.start_s for placement in schedule.placements}


@given(problems(), st.sampled_from(LISTS))
def test_any_schedule_is_valid(problem: SchedulingProblem, method: str) -> None:
    check_schedule(problem, schedule_tasks(problem, method=method))


@given(problems(priorities=3), st.sampled_from(LISTS))
def test_lower_priorities_change_nothing_for_higher_ones(problem: SchedulingProblem, method: str) -> None:
    high = dataclasses.replace(problem, pending=tuple(task for task in problem.pending if task.priority == 2))
    both, alone = starts(problem, method), starts(high, method)
    assert {task: both[task] for task in alone} == pytest.approx(alone)


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("fifo", {"t0": 0, "t1": 3, "t2": 4, "t3": 4}),
        ("sjf", {"t0": 1, "t1": 4, "t2": 0, "t3": 0}),
        ("lpt", {"t0": 0, "t1": 3, "t2": 2, "t3": 0}),
    ],
)
def test_each_order_by_hand(method: str, expected: dict[str, float]) -> None:
    problem = SchedulingProblem(nodes=nodes_of(2), pending=tasks_of((1, 3), (2, 1), (1, 1), (1, 2)))
    assert starts(problem, method) == expected


def test_no_task_overtakes_in_fifo() -> None:
    problem = SchedulingProblem(nodes=nodes_of(2), pending=tasks_of((1, 5), (2, 1), (1, 1)))
    assert starts(problem, "fifo") == {"t0": 0, "t1": 5, "t2": 6}
    assert starts(problem, "lpt")["t2"] == 0


def test_no_task_overtakes_one_that_waits_for_a_quota_in_fifo() -> None:
    running = RunningTask(task="r", gpus=(Gpu("n0", 0),), remaining_s=3.0, tenant="a")
    waits, free = tasks_of((1, 1), (1, 1))
    pending = (dataclasses.replace(waits, tenant="a"), free)
    problem = SchedulingProblem(nodes=nodes_of(3), pending=pending, running=(running,), quotas={"a": 1})
    assert starts(problem, "fifo") == {"t0": 3, "t1": 3}
    assert starts(problem, "lpt") == {"t0": 3, "t1": 0}


def test_a_task_goes_where_it_leaves_the_largest_gap() -> None:
    running = RunningTask(task="r", gpus=(Gpu("n1", 0),), remaining_s=9.0)
    problem = SchedulingProblem(nodes=nodes_of(2, 2), pending=tasks_of((1, 5), (2, 4)), running=(running,))
    assert starts(problem, "lpt") == {"t0": 0, "t1": 0}


def test_a_lost_gpu_is_not_waited_for() -> None:
    running = RunningTask(task="r", gpus=(Gpu("n0", 7),), remaining_s=9.0)
    problem = SchedulingProblem(nodes=nodes_of(2), pending=tasks_of((2, 1)), running=(running,))
    assert starts(problem, "lpt") == {"t0": 0}


def test_an_unknown_method_names_the_known_ones() -> None:
    with pytest.raises(SpecError, match="expected one of cp-sat, milp, fifo, sjf, lpt, found 'magic'"):
        schedule_tasks(paper_case(), method="magic")


def test_nothing_to_place_is_an_empty_schedule() -> None:
    for method in (*LISTS, "cp-sat", "milp"):
        schedule = schedule_tasks(SchedulingProblem(nodes=nodes_of(2), pending=()), method=method)
        assert (schedule.placements, schedule.makespan_s, schedule.gap) == ((), 0.0, 0.0)


def test_a_bound_is_never_above_the_least_makespan() -> None:
    for seed in range(3000, 3100):
        problem = random_problem(seed)
        assert makespan_bound(problem) <= least(problem)[0] + 1e-9, seed


@pytest.mark.parametrize(
    ("problem", "expected"),
    [
        (SchedulingProblem(nodes=nodes_of(4), pending=tasks_of((1, 9), (1, 1))), 9),
        (SchedulingProblem(nodes=nodes_of(4), pending=tasks_of((2, 4), (2, 4), (1, 4), (1, 4))), 6),
        (SchedulingProblem(nodes=nodes_of(8), pending=tasks_of((5, 4), (5, 3))), 7),
        (SchedulingProblem(nodes=nodes_of(2, 2), pending=tasks_of((2, 4), (2, 4), (2, 4))), 8),
        (
            SchedulingProblem(
                nodes=nodes_of(8),
                pending=tuple(dataclasses.replace(task, tenant="a") for task in tasks_of((2, 4), (2, 4))),
                quotas={"a": 2},
            ),
            8,
        ),
        (
            SchedulingProblem(
                nodes=nodes_of(2),
                pending=(TaskDemand(task="t", num_gpus=2, duration_s=1.0),),
                running=(RunningTask(task="r", gpus=(Gpu("n0", 1),), remaining_s=5.0),),
            ),
            6,
        ),
    ],
)
def test_each_bound_by_hand(problem: SchedulingProblem, expected: float) -> None:
    assert makespan_bound(problem) == pytest.approx(expected)


def all_on_the_first_node(problem: SchedulingProblem) -> list[Reservation]:
    return [
        Reservation(demand=demand, start=float(number), counts={"n0": demand.num_gpus})
        for number, demand in enumerate(problem.pending)
    ]


def balanced(problem: SchedulingProblem, *, bound: float, deadline: float = math.inf) -> list[Reservation]:
    reservations = balanced_reservations(problem, all_on_the_first_node(problem), bound=bound, deadline=deadline)
    assert {reservation.demand for reservation in reservations} == set(problem.pending)
    check_schedule(problem, schedule_from("cp-sat", place(problem, reservations), bound_s=0.0, status="feasible"))
    return reservations


def test_nodes_end_alike() -> None:
    tasks = tasks_of(*((width, 10.0 + number) for number, width in enumerate((4, 2, 2, 1, 1, 1, 1) * 4)))
    problem = SchedulingProblem(nodes=nodes_of(4, 4, 4), pending=tasks)
    least = sum(task.num_gpus * task.duration_s for task in tasks) / 12
    assert max(reservation.end for reservation in balanced(problem, bound=least)) < 1.05 * least


def test_a_node_where_a_task_runs_gets_less() -> None:
    running = RunningTask(task="r", gpus=(Gpu("n1", 0), Gpu("n1", 1)), remaining_s=6.0)
    problem = SchedulingProblem(nodes=nodes_of(2, 2), pending=tasks_of(*((1, 2.0),) * 10), running=(running,))
    reservations = balanced(problem, bound=8.0)
    assert sum("n0" in reservation.counts for reservation in reservations) == 8
    assert max(reservation.end for reservation in reservations) == 8.0


def test_the_time_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reading of the clock takes a tenth of a second: there are ten readings, with at most 16 tries each."""
    tasks = tasks_of(*((1 + number % 3, 10.0 + number * 7919 % 1000) for number in range(400)))
    problem = SchedulingProblem(nodes=nodes_of(*(8,) * 20), pending=tasks)
    looks_s: list[float] = []

    def look() -> float:
        looks_s.append(len(looks_s) / 10)
        return looks_s[-1]

    tries: list[float] = []
    try_once = cp_sat._try

    def tried(*args: Any) -> bool:
        tries.append(looks_s[-1])
        return try_once(*args)

    monkeypatch.setattr(cp_sat, "time", SimpleNamespace(monotonic=look))
    monkeypatch.setattr(cp_sat, "_try", tried)
    balanced(problem, bound=0.0, deadline=1.0)
    assert 100 < len(tries) <= 160
    assert max(tries) < 1.0


def test_the_same_seats_end_in_the_same_seats() -> None:
    problem = SchedulingProblem(nodes=nodes_of(2, 2), pending=tasks_of((2, 5), (1, 4), (1, 3), (2, 2), (1, 1)))
    assert balanced(problem, bound=0.0) == balanced(problem, bound=0.0)
