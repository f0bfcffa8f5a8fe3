"""The validator: it refuses every kind of broken schedule, and nothing else."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedules import nodes_of, problems

from alto.errors import ScheduleError
from alto.records import Gpu, Placement, Schedule
from alto.scheduler import RunningTask, SchedulingProblem, TaskDemand, check_schedule, schedule_tasks


def gpus(*names: str) -> tuple[Gpu, ...]:
    return tuple(Gpu(name[:2], int(name[3:])) for name in names)


PROBLEM = SchedulingProblem(
    nodes=nodes_of(4, 2),
    pending=(
        TaskDemand(task="wide", num_gpus=5, duration_s=3.0),
        TaskDemand(task="half", num_gpus=2, duration_s=4.0, release_s=1.0, tenant="a"),
        TaskDemand(task="one", num_gpus=1, duration_s=5.0, tenant="a"),
    ),
    running=(RunningTask(task="old", gpus=gpus("n0:0"), remaining_s=2.0, tenant="a"),),
    quotas={"a": 3},
)
PLACEMENTS = {
    "one": Placement(task="one", gpus=gpus("n0:1"), start_s=0.0, duration_s=5.0),
    "half": Placement(task="half", gpus=gpus("n1:0", "n1:1"), start_s=2.0, duration_s=4.0),
    "wide": Placement(task="wide", gpus=gpus("n0:0", "n0:1", "n0:2", "n0:3", "n1:0"), start_s=6.0, duration_s=3.0),
}
Change = Callable[[dict[str, Placement]], object]


def schedule_of(placements: dict[str, Placement], bound_s: float = 5.0) -> Schedule:
    return Schedule(method="lpt", status="heuristic", placements=tuple(placements.values()), bound_s=bound_s)


def with_(task: str, **changes: object) -> Change:
    return lambda placements: placements.update({task: dataclasses.replace(placements[task], **changes)})


def test_a_valid_schedule_passes() -> None:
    check_schedule(PROBLEM, schedule_of(PLACEMENTS))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (with_("half", gpus=gpus("n0:1", "n0:2")), r"GPU 1 of node 'n0': expected it free at 2.0 s for task 'half'"),
        (with_("one", gpus=gpus("n0:0")), r"GPU 0 of node 'n0': .* found task 'old' on it until 2.0 s"),
        (with_("wide", start_s=5.5), r"GPU 0 of node 'n1': .* found task 'half' on it until 6.0 s"),
        (with_("half", gpus=gpus("n0:2", "n1:0")), r"'half': expected GPUs of at most 1 nodes, found n0, n1"),
        (with_("half", start_s=0.5), r"'half': expected no start before 1.0 s, found 0.5"),
        (with_("one", start_s=-1.0), r"'one': expected no start before 0.0 s, found -1.0"),
        (with_("one", start_s=float("nan")), r"'one': expected no start before 0.0 s, found nan"),
        (with_("half", start_s=1.0), r"tenant 'a': expected at most 3 GPUs at 1.0 s, found 4"),
        (with_("one", duration_s=4.0), r"'one': expected a duration of 5.0 s, found 4.0"),
        (with_("one", gpus=gpus("n0:1", "n0:2")), r"'one': expected 1 different GPUs"),
        (with_("half", gpus=gpus("n1:0", "n1:0")), r"'half': expected 2 different GPUs"),
        (with_("half", gpus=gpus("n1:1", "n1:0")), r"'half': expected GPUs in rising order"),
        (with_("one", gpus=gpus("n0:9")), r"'one': expected GPUs of the cluster"),
        (lambda placements: placements.pop("one"), r"'one': expected 1 placements, found 0"),
        (lambda placements: placements.update(again=placements["one"]), r"'one': expected 1 placements, found 2"),
        (
            lambda placements: placements.update(new=dataclasses.replace(placements["one"], task="new")),
            r"'new': expected 0 placements, found 1",
        ),
    ],
)
def test_a_broken_schedule_is_refused(change: Change, message: str) -> None:
    placements = dict(PLACEMENTS)
    change(placements)
    with pytest.raises(ScheduleError, match=message):
        check_schedule(PROBLEM, schedule_of(placements))


def test_as_few_nodes_as_hold_a_task_are_enough() -> None:
    problem = SchedulingProblem(nodes=nodes_of(4, 4, 4), pending=(TaskDemand(task="x", num_gpus=6, duration_s=1.0),))
    two, three = (
        gpus("n0:0", "n0:1", "n0:2", "n2:0", "n2:1", "n2:2"),
        gpus("n0:0", "n0:1", "n1:0", "n1:1", "n2:0", "n2:1"),
    )
    placement = Placement(task="x", gpus=two, start_s=0.0, duration_s=1.0)
    check_schedule(problem, schedule_of({"x": placement}, bound_s=1.0))
    with pytest.raises(ScheduleError, match="at most 2 nodes"):
        check_schedule(problem, schedule_of({"x": dataclasses.replace(placement, gpus=three)}, bound_s=1.0))


def test_a_bound_above_the_makespan_is_refused() -> None:
    with pytest.raises(ScheduleError, match=r"bound_s: expected at most the makespan, 9.0 s, found 9.1 s"):
        check_schedule(PROBLEM, schedule_of(PLACEMENTS, bound_s=9.1))


@given(problems(), st.sampled_from(["fifo", "sjf", "lpt"]), st.data())
def test_a_task_on_a_gpu_that_is_not_free_yet_is_refused(
    problem: SchedulingProblem, method: str, data: st.DataObject
) -> None:
    schedule = schedule_tasks(problem, method=method)
    check_schedule(problem, schedule)
    for placement in schedule.placements[:1]:
        gpu = data.draw(st.sampled_from(placement.gpus))
        late = RunningTask(task="late", gpus=(gpu,), remaining_s=placement.start_s + placement.duration_s / 2)
        with pytest.raises(ScheduleError, match="found task 'late' on it"):
            check_schedule(dataclasses.replace(problem, running=(late,), quotas={}), schedule)
