"""Local search between nodes: it loses nobody, keeps to the GPUs there are, and makes nodes end alike."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
from schedules import nodes_of, tasks_of

from alto.records import Gpu
from alto.scheduler import RunningTask, SchedulingProblem, check_schedule
from alto.scheduler.inter_task import cp_sat
from alto.scheduler.inter_task.cp_sat import balanced_reservations
from alto.scheduler.inter_task.lists import Reservation, place
from alto.scheduler.inter_task.problem import schedule_from


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
    """By a clock on which every look takes a tenth of a second: there are ten looks, and no more than 16 tries each."""
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
