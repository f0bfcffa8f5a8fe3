"""Edge cases: solved by every method, or refused by name; and seconds as whole ticks."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from schedules import nodes_of, problems, tasks_of

from alto.errors import SpecError
from alto.records import Gpu, Node
from alto.scheduler import RunningTask, SchedulingProblem, check_schedule, schedule_tasks
from alto.scheduler.inter_task import TaskDemand
from alto.scheduler.inter_task.problem import in_ticks

NODES = (Node(name="n", gpus=(0, 1)),)
RUNNING = RunningTask(task="r", gpus=(Gpu("n", 0),), remaining_s=3.0, tenant="b")


def task(name: str = "t", **changes: Any) -> TaskDemand:
    return TaskDemand(**{"task": name, "num_gpus": 1, "duration_s": 5.0, **changes})


@pytest.mark.parametrize("method", ["lpt", "fifo", "cp-sat", "milp"])
@pytest.mark.parametrize(
    "problem",
    [
        SchedulingProblem(nodes=(Node(name="empty", gpus=()), *NODES), pending=(task(), task("u"))),
        SchedulingProblem(nodes=(Node(name="empty", gpus=()),), pending=()),
        SchedulingProblem(nodes=(), pending=()),
        SchedulingProblem(nodes=NODES, pending=(task(duration_s=1e-6), task("u", duration_s=1e12))),
        SchedulingProblem(nodes=NODES, pending=(task(duration_s=1e-6), task("u", duration_s=1e-6))),
        SchedulingProblem(nodes=NODES, pending=(task(release_s=1e12), task("u"))),
        SchedulingProblem(nodes=NODES, pending=(task(),), running=(RUNNING,), quotas={"b": 1}),
    ],
    ids=["node without GPUs", "no GPUs", "no nodes", "far apart", "short", "late", "quota of others"],
)
def test_what_is_odd_is_solved(problem: SchedulingProblem, method: str) -> None:
    check_schedule(problem, schedule_tasks(problem, method=method, time_limit_s=2.0))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"quotas": {"a": 0}}, "quota of tenant 'a': expected 1 GPU or more, found 0"),
        ({"quotas": {"a": -1}}, "expected 1 GPU or more, found -1"),
        ({"quotas": {"a": 0.5}}, "expected 1 GPU or more, found 0.5"),
        ({"pending": (task(duration_s=1e-320),)}, "expected a duration above 0 seconds"),
        ({"pending": (task(duration_s=1e300),)}, "expected a duration above 0 seconds"),
        ({"pending": (task(duration_s=math.nan),)}, "expected a duration above 0 seconds"),
        ({"pending": (task(release_s=1e300),)}, "expected a release of 0 or more"),
        ({"running": (RunningTask(task="r", gpus=(), remaining_s=math.nan),)}, "expected to run for 0 to"),
        ({"nodes": (*NODES, *NODES)}, "a unique name for each node, found 'n' twice"),
        ({"nodes": (Node(name="n", gpus=(1, 1)),)}, "expected each GPU once, found 1, 1"),
        ({"nodes": (Node(name="n", gpus=()),)}, "expected num_gpus from 1 to 0"),
    ],
    ids=repr,
)
def test_what_cannot_be_is_refused_by_name(values: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        SchedulingProblem(**{"nodes": NODES, "pending": (task(),), **values})


@pytest.mark.parametrize(
    ("durations_s", "tick_s", "ticks"),
    [
        ((3600.0, 5400.0), 1800.0, [2, 3]),
        ((0.3, 0.4), 0.1, [3, 4]),
        ((1.0, 2.005), 0.005, [200, 401]),
        ((0.007,), 0.007, [1]),
    ],
)
def test_a_tick_is_as_long_as_all_times_allow(
    durations_s: tuple[float, ...], tick_s: float, ticks: list[float]
) -> None:
    problem = SchedulingProblem(nodes=nodes_of(1), pending=tasks_of(*((1, duration_s) for duration_s in durations_s)))
    found, found_tick_s, is_exact = in_ticks(problem)
    assert is_exact
    assert found_tick_s == pytest.approx(tick_s)
    assert [demand.duration_s for demand in found.pending] == ticks


@given(problems())
def test_no_time_becomes_shorter_and_none_longer_by_more_than_a_tick(problem: SchedulingProblem) -> None:
    found, tick_s, is_exact = in_ticks(problem)
    for before, after in zip(problem.pending, found.pending, strict=True):
        for one, other in ((before.duration_s, after.duration_s), (before.release_s, after.release_s)):
            assert other == int(other)
            assert one * (1 - 1e-9) <= other * tick_s <= one * (1 + 1e-9) + (not is_exact) * tick_s


def test_a_long_horizon_stays_within_what_a_solver_counts() -> None:
    problem = SchedulingProblem(nodes=nodes_of(1), pending=tasks_of((1, 1e12), (1, 1e-3)))
    found, _, is_exact = in_ticks(problem)
    assert not is_exact
    assert max(demand.duration_s for demand in found.pending) <= 1e8
    assert min(demand.duration_s for demand in found.pending) == 1
