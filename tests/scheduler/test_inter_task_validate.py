"""The validator refuses every kind of broken schedule and of broken sharing, and nothing else."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
from budgets import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from schedules import nodes_of, problems
from sharing_problems import demand_of, running_of, sharing_of, sharing_problems

from alto.errors import ScheduleError, SpecError
from alto.records import Gpu, Placement, Schedule
from alto.scheduler import RunningTask, SchedulingProblem, TaskDemand, check_schedule, schedule_tasks


def gpus(*names: str) -> tuple[Gpu, ...]:
    return tuple(Gpu(name[:2], int(name[3:])) for name in names)


ALONE = SchedulingProblem(
    nodes=nodes_of(4, 2),
    pending=(
        TaskDemand(task="wide", num_gpus=5, duration_s=3.0),
        TaskDemand(task="half", num_gpus=2, duration_s=4.0, release_s=1.0, tenant="a"),
        TaskDemand(task="one", num_gpus=1, duration_s=5.0, tenant="a"),
    ),
    running=(RunningTask(task="old", gpus=gpus("n0:0"), remaining_s=2.0, tenant="a"),),
    quotas={"a": 3},
)
PLACED_ALONE = {
    "one": Placement(task="one", gpus=gpus("n0:1"), start_s=0.0, duration_s=5.0),
    "half": Placement(task="half", gpus=gpus("n1:0", "n1:1"), start_s=2.0, duration_s=4.0),
    "wide": Placement(task="wide", gpus=gpus("n0:0", "n0:1", "n0:2", "n0:3", "n1:0"), start_s=6.0, duration_s=3.0),
}
G0, G1 = Gpu("n0", 0), Gpu("n0", 1)
SHARING = SchedulingProblem(
    nodes=nodes_of(2),
    pending=(
        demand_of("one", 10.0, 6.0, num_slots=2, capacity_bytes=20),
        demand_of("two", 12.0, 6.0, num_slots=2, capacity_bytes=20),
        demand_of("joins", 8.0, 4.0, base="r", tenant="a"),
        demand_of("later", 5.0, 1.0, base="r", tenant="a"),
    ),
    running=(running_of("old", G1, 20.0, 5.0, base="r", tenant="a"),),
    quotas={"a": 1},
)
PLACED_SHARING = {
    "one": Placement(task="one", gpus=(G0,), start_s=1.0, duration_s=14.0, executor="new"),
    "two": Placement(task="two", gpus=(G0,), start_s=1.0, duration_s=17.0, executor="new"),
    "joins": Placement(task="joins", gpus=(G1,), start_s=0.0, duration_s=12.0, executor="e"),
    "later": Placement(task="later", gpus=(G1,), start_s=24.0, duration_s=5.0),
}
Change = Callable[[dict[str, Placement]], object]
Other = Callable[[SchedulingProblem], SchedulingProblem]


def schedule_of(placements: dict[str, Placement], bound_s: float = 5.0) -> Schedule:
    return Schedule(method="lpt", status="heuristic", placements=tuple(placements.values()), bound_s=bound_s)


def with_(task: str, **changes: object) -> Change:
    return lambda placements: placements.update({task: dataclasses.replace(placements[task], **changes)})


def both(*changes: Change) -> Change:
    return lambda placements: [change(placements) for change in changes]


def changed(task: str, **changes: object) -> Other:
    """Return a change of the problem: another demand of ``task``, or another sharing of it."""

    def change(problem: SchedulingProblem) -> SchedulingProblem:
        of_sharing = {name: changes[name] for name in changes if name in ("base", "capacity_bytes", "slot_bytes")}
        of_demand = {name: changes[name] for name in changes if name not in of_sharing}
        pending = [
            dataclasses.replace(demand, **{"sharing": dataclasses.replace(demand.sharing, **of_sharing), **of_demand})
            if demand.task == task
            else demand
            for demand in problem.pending
        ]
        return dataclasses.replace(problem, pending=tuple(pending))

    return change


def runs(**changes: object) -> Other:
    return lambda problem: dataclasses.replace(problem, running=(dataclasses.replace(problem.running[0], **changes),))


@pytest.mark.parametrize(("problem", "placements"), [(ALONE, PLACED_ALONE), (SHARING, PLACED_SHARING)])
def test_a_valid_schedule_passes(problem: SchedulingProblem, placements: dict[str, Placement]) -> None:
    check_schedule(problem, schedule_of(placements))


REFUSED_ALONE: list[tuple[Change, str]] = [
    (with_("half", gpus=gpus("n0:1", "n0:2")), r"GPU 1 of node 'n0': expected it free at 2.0 s for task 'half'"),
    (with_("one", gpus=gpus("n0:0")), r"GPU 0 of node 'n0': .* found task 'old' on it until 2.0 s"),
    (with_("wide", start_s=5.5), r"GPU 0 of node 'n1': .* found task 'half' on it until 6.0 s"),
    (
        with_("half", gpus=gpus("n0:2", "n1:0")),
        r"'half': expected GPUs on at most 1 node\(s\), found GPUs on 2 nodes: n0, n1",
    ),
    (with_("half", start_s=0.5), r"'half': expected no start before 1.0 s, found 0.5"),
    (with_("one", start_s=-1.0), r"'one': expected no start before 0.0 s, found -1.0"),
    (with_("one", start_s=float("nan")), r"'one': expected no start before 0.0 s, found nan"),
    (with_("half", start_s=1.0), r"tenant 'a': expected at most 3 GPUs at 1.0 s, found 4"),
    (with_("one", duration_s=4.0), r"'one': expected a duration of 5.0 s, found 4.0"),
    (with_("one", gpus=gpus("n0:1", "n0:2")), r"'one': expected 1 different GPUs"),
    (with_("half", gpus=gpus("n1:0", "n1:0")), r"'half': expected 2 different GPUs"),
    (with_("half", gpus=gpus("n1:1", "n1:0")), r"'half': expected GPUs in increasing order"),
    (with_("one", gpus=gpus("n0:9")), r"'one': expected GPUs of the cluster"),
    (lambda placements: placements.pop("one"), r"'one': expected 1 placements, found 0"),
    (lambda placements: placements.update(again=placements["one"]), r"'one': expected 1 placements, found 2"),
    (
        lambda placements: placements.update(new=dataclasses.replace(placements["one"], task="new")),
        r"'new': expected 0 placements, found 1",
    ),
]
REFUSED_SHARING: list[tuple[Change, str]] = [
    (with_("two", gpus=(G1,)), r"executor 'new': expected tasks with the same GPU"),
    (with_("joins", gpus=(G0,)), r"executor 'e': expected tasks with the same GPU"),
    (with_("two", start_s=2.0), r"executor 'new': expected tasks that start together, .* \[1.0, 2.0\]"),
    (with_("joins", start_s=20.0), r"executor 'e': expected tasks that join it before it ends, .* 20.0 s"),
    (with_("one", duration_s=9.0), r"'one': expected a duration of 10.0 s or more beside others, found 9.0"),
    (with_("one", duration_s=float("nan")), r"'one': expected a duration of 10.0 s or more"),
    # 4 + 6 seconds of own work, and 6 of steps
    (with_("two", duration_s=15.5), r"executor 'new': expected the last end no sooner than 17.0 s, found 16.5"),
    (with_("two", executor=""), r"'two': expected a duration of 12.0 s, found 17.0"),
    (
        both(with_("two", executor="", duration_s=12.0), with_("one", duration_s=10.0)),
        r"GPU 0 of node 'n0': expected it free at 1.0 s for task '(one|two)'",
    ),
    (with_("two", executor="other"), r"GPU 0 of node 'n0': expected it free at 1.0 s for task"),
    (with_("two", executor="e"), r"executor 'e': expected tasks with the same (base|GPU)"),
    (with_("joins", executor="new"), r"executor 'new': expected tasks with the same base"),
    # The running task has 20 s, and the one that joins it 4 s of own work.
    (
        with_("later", start_s=23.0),
        r"GPU 1 of node 'n0': expected it free at 23.0 s for task 'later', .* until 24.0",
    ),
    (with_("later", gpus=(G0,), start_s=18.0), r"tenant 'a': expected at most 1 GPUs at 18.0 s, found 2"),
]


@pytest.mark.parametrize(
    ("problem", "placements", "change", "message"),
    [
        *((ALONE, PLACED_ALONE, *row) for row in REFUSED_ALONE),
        *((SHARING, PLACED_SHARING, *row) for row in REFUSED_SHARING),
    ],
)
def test_a_broken_schedule_is_refused(
    problem: SchedulingProblem, placements: dict[str, Placement], change: Change, message: str
) -> None:
    placements = dict(placements)
    change(placements)
    with pytest.raises(ScheduleError, match=message):
        check_schedule(problem, schedule_of(placements))


def test_a_task_uses_no_more_nodes_than_necessary() -> None:
    problem = SchedulingProblem(nodes=nodes_of(4, 4, 4), pending=(TaskDemand(task="x", num_gpus=6, duration_s=1.0),))
    two, three = (
        gpus("n0:0", "n0:1", "n0:2", "n2:0", "n2:1", "n2:2"),
        gpus("n0:0", "n0:1", "n1:0", "n1:1", "n2:0", "n2:1"),
    )
    placement = Placement(task="x", gpus=two, start_s=0.0, duration_s=1.0)
    check_schedule(problem, schedule_of({"x": placement}, bound_s=1.0))
    with pytest.raises(ScheduleError, match="at most 2 node"):
        check_schedule(problem, schedule_of({"x": dataclasses.replace(placement, gpus=three)}, bound_s=1.0))


def test_a_bound_above_the_makespan_is_refused() -> None:
    with pytest.raises(ScheduleError, match=r"bound_s: expected at most the makespan, 9.0 s, found 9.1 s"):
        check_schedule(ALONE, schedule_of(PLACED_ALONE, bound_s=9.1))


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


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (changed("two", base="other"), r"executor 'new': expected tasks with the same base"),
        (changed("two", priority=1), r"executor 'new': expected tasks with the same priority"),
        (changed("two", tenant="a"), r"executor 'new': expected no other tenants beside .* with a quota, found , a"),
        (changed("two", sharing=None), r"executor 'new': expected tasks on one GPU that may share, found one and two"),
        (changed("two", capacity_bytes=13), r"executor 'new': expected tasks that need 13 bytes, found 14"),
        (changed("two", slot_bytes=3), r"executor 'new': expected tasks that need 20 bytes, found 22"),
        (changed("joins", tenant=""), r"executor 'e': expected no other tenants beside a tenant with a quota"),
        (runs(sharing=None), r"executor 'e': expected tasks on one GPU that may share"),
        (runs(priority=3), r"executor 'e': expected tasks with the same priority"),
        (runs(executor=""), r"GPU 1 of node 'n0': expected it free at 0.0 s for task"),
        (
            runs(remaining_s=0.0, sharing=sharing_of(0.0, base="r")),
            r"executor 'e': expected tasks that join it before it ends",
        ),
    ],
)
def test_a_schedule_of_another_problem_is_refused(other: Other, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        check_schedule(other(SHARING), schedule_of(PLACED_SHARING))


@settings(max_examples=examples(100))
@given(sharing_problems(), st.data())
def test_a_task_that_shares_cannot_be_moved_alone(problem: SchedulingProblem, data: st.DataObject) -> None:
    schedule = schedule_tasks(problem, method="lpt")
    shared = [place for place in schedule.placements if place.executor]
    if not shared:
        return
    chosen = data.draw(st.sampled_from(shared))
    # sooner than alone, and later than the end of all that runs
    late_s = 1.0 + max((task.remaining_s for task in problem.running), default=0.0)
    for changes in ({"duration_s": chosen.duration_s * 1e-3}, {"start_s": chosen.start_s + late_s}):
        moved = dataclasses.replace(chosen, **changes)
        others = [place for place in schedule.placements if place is not chosen]
        if "start_s" in changes and not any(place.executor == chosen.executor for place in others):
            running = [task for task in problem.running if task.executor == chosen.executor]
            if not running:
                continue
        with pytest.raises(ScheduleError):
            check_schedule(problem, dataclasses.replace(schedule, placements=(*others, moved), bound_s=0.0))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"base": ""}, "expected a base model in its sharing, found none"),
        ({"step_s": 10.5}, "expected steps that take 0 to 10 seconds \\(its duration\\), found 10.5"),
        ({"step_s": float("nan")}, "expected steps that take 0 to 10 seconds"),
        ({"num_slots": 0}, "expected num_slots of at least 1, found 0"),
        ({"slot_bytes": -1}, "expected slot_bytes of at least 0, found -1"),
        ({"pass_bytes": 0.5}, "expected pass_bytes of at least 0, found 0.5"),
    ],
)
def test_an_impossible_sharing_is_refused(change: dict[str, object], message: str) -> None:
    demand = demand_of("x", 10.0, 6.0)
    broken = dataclasses.replace(demand, sharing=dataclasses.replace(demand.sharing, **change))
    with pytest.raises(SpecError, match=message):
        SchedulingProblem(nodes=nodes_of(1), pending=(broken,))


def test_tasks_of_one_executor_are_on_one_gpu() -> None:
    running = (running_of("x", G0, 5.0, 1.0), running_of("y", G1, 5.0, 1.0))
    with pytest.raises(SpecError, match="task 'y': expected the GPUs of its executor 'e'"):
        SchedulingProblem(nodes=nodes_of(2), pending=(), running=running)


def test_another_duration_keeps_the_share_of_the_steps() -> None:
    longer = demand_of("x", 10.0, 4.0).lasting(25.0)
    assert longer.sharing is not None
    assert (longer.duration_s, longer.sharing.step_s) == (25.0, pytest.approx(10.0))
    assert dataclasses.replace(longer, sharing=None).lasting(1.0).duration_s == 1.0
