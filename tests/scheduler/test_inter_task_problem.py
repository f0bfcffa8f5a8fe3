"""Problems at the edge: solved by every method, or refused by name."""

from __future__ import annotations

import math
from typing import Any

import pytest

from alto.errors import SpecError
from alto.records import Gpu, Node
from alto.scheduler import RunningTask, SchedulingProblem, check_schedule, schedule_tasks
from alto.scheduler.inter_task import TaskDemand

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
