"""Simulated tasks that share executors: they end as the model predicts, and no GPU time is counted twice."""

from __future__ import annotations

import itertools

import pytest
from budgets import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from alto.errors import SpecError
from alto.records import Placement, SimulationOutcome
from alto.scheduler import finish_times_s
from alto.scheduler.inter_task.colocation import member_of
from alto.scheduler.simulate import simulate
from alto.scheduler.simulate.workload import draw_tasks
from alto.spec import ArrivingTask, Simulation

ARRIVING = st.builds(
    ArrivingTask,
    arrival_s=st.sampled_from([0.0, 0.0, 50.0]) | st.floats(0, 1e4),
    gpus=st.sampled_from([1, 1, 1, 2]),
    duration_s=st.floats(0.001, 1e4),
    tenant=st.sampled_from(["", "a"]),
    priority=st.sampled_from([0, 0, 1]),
    base=st.sampled_from(["x", "x", "y", ""]),
    step_share=st.sampled_from([0.0, 0.3, 0.9, 1.0]),
)


def spans(outcome: SimulationOutcome) -> list[Placement]:
    """Return one placement per executor, from its first task to its last."""
    found: dict[object, Placement] = {}
    for number, attempt in enumerate(outcome.actual):
        key = attempt.executor or number
        before = found.get(key, attempt)
        assert before.gpus == attempt.gpus
        start_s, end_s = min(before.start_s, attempt.start_s), max(before.end_s, attempt.end_s)
        found[key] = Placement(task=attempt.task, gpus=attempt.gpus, start_s=start_s, duration_s=end_s - start_s)
    return list(found.values())


def check(outcome: SimulationOutcome, num_tasks: int, num_gpus: int) -> None:
    assert outcome.num_finished + outcome.num_failed == num_tasks
    assert outcome.num_attempts == len(outcome.actual)
    assert 0 <= outcome.utilisation <= 1 + 1e-9
    by_gpu: dict[object, list[tuple[float, float]]] = {}
    for span in spans(outcome):
        for gpu in span.gpus:
            by_gpu.setdefault(gpu, []).append((span.start_s, span.end_s))
    for found in by_gpu.values():
        assert all(end <= start + 1e-6 for (_, end), (start, _) in itertools.pairwise(sorted(found)))
    assert len(by_gpu) <= num_gpus


def test_equal_tasks_by_hand():
    trace = tuple(ArrivingTask(arrival_s=0.0, duration_s=10.0, base="b", step_share=0.6) for _ in range(4))
    simulation = Simulation(gpus_per_node=1, trace=trace)
    outcome = simulate(simulation, method="lpt", early_exit=False)
    assert outcome.makespan_s == pytest.approx(4 * 4.0 + 6.0)
    assert outcome.utilisation == pytest.approx(1.0)
    assert {attempt.executor for attempt in outcome.actual} == {"executor-1"}
    assert {placement.executor for placement in outcome.planned} == {"executor-1"}
    fifo = simulate(simulation, method="fifo", early_exit=False)
    assert fifo.makespan_s == 40.0
    assert {attempt.executor for attempt in fifo.actual} == {""}


@given(st.lists(st.tuples(st.floats(1, 1000), st.floats(0, 1)), min_size=2, max_size=8))
def test_tasks_that_all_share_end_as_the_model_says(tasks: list[tuple[float, float]]):
    trace = tuple(
        ArrivingTask(arrival_s=0.0, duration_s=duration_s, base="b", step_share=share) for duration_s, share in tasks
    )
    outcome = simulate(Simulation(gpus_per_node=1, trace=trace), method="lpt", early_exit=False)
    by_executor: dict[str, list[Placement]] = {}
    for attempt in outcome.actual:
        by_executor.setdefault(attempt.executor, []).append(attempt)
    for attempts in by_executor.values():
        if len({attempt.start_s for attempt in attempts}) > 1:
            continue  # some have joined later
        numbers = [int(attempt.task.removeprefix("task-")) for attempt in attempts]
        members = [member_of(tasks[number][0], tasks[number][0] * tasks[number][1]) for number in numbers]
        ends_s = [attempt.start_s + end_s for attempt, end_s in zip(attempts, finish_times_s(members), strict=True)]
        assert [attempt.end_s for attempt in attempts] == pytest.approx(ends_s, rel=1e-6)


def test_one_that_comes_later_joins_and_ends_move():
    trace = (
        ArrivingTask(arrival_s=0.0, duration_s=10.0, base="b", step_share=0.6),
        ArrivingTask(arrival_s=5.0, duration_s=10.0, base="b", step_share=0.6),
    )
    outcome = simulate(Simulation(gpus_per_node=1, trace=trace), method="lpt", early_exit=False)
    # After 5 s the first has 2 s of own work and 3 s of steps left; then the second has as much alone.
    assert [attempt.end_s for attempt in outcome.actual] == pytest.approx([12.0, 17.0])
    assert outcome.utilisation == pytest.approx(1.0)
    assert outcome.num_attempts == 2


def test_a_crash_ends_all_tasks_of_an_executor_and_they_are_alone_afterwards():
    trace = tuple(ArrivingTask(arrival_s=0.0, duration_s=1000.0, base="b", step_share=0.9) for _ in range(3))
    simulation = Simulation(gpus_per_node=1, trace=trace, crashes_per_hour=3.0, max_attempts=50, seed=3)
    outcome = simulate(simulation, method="lpt", early_exit=False)
    check(outcome, 3, 1)
    first = [attempt for attempt in outcome.actual if attempt.executor == "executor-1"]
    assert len(first) == 3
    assert len({attempt.end_s for attempt in first}) == 1
    later = [attempt for attempt in outcome.actual if attempt not in first]
    assert later
    assert {attempt.executor for attempt in later} == {""}
    assert outcome.num_finished == 3


@given(
    trace=st.lists(ARRIVING, min_size=1, max_size=10),
    method=st.sampled_from(["fifo", "sjf", "lpt"]),
    early_exit=st.booleans(),
    crashes_per_hour=st.sampled_from([0.0, 0.01, 1.0, 60.0]),
    gpu_mtbf_hours=st.sampled_from([None, 0.1, 1.0, 100.0]),
    gpu_repair_hours=st.sampled_from([0.01, 1.0]),
    checkpoint_interval_s=st.sampled_from([0.0, 60.0, 1e9]),
    max_attempts=st.integers(1, 4),
    backoff_s=st.sampled_from([0.0, 10.0]),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=examples(100))
def test_whatever_goes_wrong_no_gpu_has_two_executors(
    trace: list[ArrivingTask], method: str, early_exit: bool, **bad_luck: object
):
    simulation = Simulation(nodes=2, gpus_per_node=2, trace=trace, quotas={"a": 2}, estimate_error=3.0, **bad_luck)
    outcome = simulate(simulation, method=method, early_exit=early_exit)
    check(outcome, len(trace), 4)
    assert outcome == simulate(simulation, method=method, early_exit=early_exit)


@pytest.mark.parametrize("method", ["lpt", "sjf"])
def test_many_tasks_on_few_bases_end_sooner_than_apart(method: str):
    values = {"nodes": 1, "gpus_per_node": 4, "num_tasks": 40, "gpus": {1: 0.9, 2: 0.1}}
    apart, shared = (
        simulate(Simulation(**values, bases=bases, step_share=0.7), method=method, early_exit=False) for bases in (0, 2)
    )
    check(shared, 40, 4)
    assert shared.makespan_s < 0.8 * apart.makespan_s


def test_bases_change_nothing_else_about_tasks():
    apart, shared = (draw_tasks(Simulation(bases=bases)) for bases in (0, 3))
    assert {task.task.base for task in shared} == {"base-0", "base-1", "base-2"}
    assert {task.task.base for task in apart} == {""}
    assert [task.task.replace(base="") for task in shared] == [task.task for task in apart]


@pytest.mark.parametrize("values", [{"bases": -1}, {"step_share": 1.5}])
def test_shares_and_bases_have_bounds(values: dict[str, object]):
    with pytest.raises(SpecError, match=next(iter(values))):
        Simulation(**values)
