"""Whatever fails in a simulated cluster, the simulation ends and every task is accounted for."""

from __future__ import annotations

import pytest
from budgets import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from alto.records import SimulationOutcome
from alto.scheduler.simulate import simulate
from alto.spec import ArrivingTask, Simulation

SEVERAL_GPUS = st.builds(
    ArrivingTask,
    arrival_s=st.floats(0, 1e5),
    gpus=st.integers(1, 4),
    duration_s=st.floats(0.001, 1e5),
    tenant=st.sampled_from(["", "a"]),
    priority=st.integers(0, 1),
)


def check(simulation: Simulation, outcome: SimulationOutcome, num_tasks: int) -> None:
    assert outcome.num_finished + outcome.num_failed == num_tasks
    assert outcome.num_attempts == len(outcome.actual)
    assert outcome.num_attempts <= num_tasks * 10 * simulation.max_attempts
    assert outcome.num_finished <= len({attempt.task for attempt in outcome.actual}) <= num_tasks
    assert 0 <= outcome.utilisation <= 1 + 1e-9


@given(
    trace=st.lists(SEVERAL_GPUS, min_size=1, max_size=8),
    method=st.sampled_from(["fifo", "sjf", "lpt"]),
    early_exit=st.booleans(),
    crashes_per_hour=st.sampled_from([0.0, 0.01, 1.0, 60.0, 1e6]),
    gpu_mtbf_hours=st.sampled_from([None, 0.01, 1.0, 100.0]),
    gpu_repair_hours=st.sampled_from([0.01, 1.0, 10.0]),
    checkpoint_interval_s=st.sampled_from([0.0, 60.0, 1e9]),
    max_attempts=st.integers(1, 4),
    backoff_s=st.sampled_from([0.0, 10.0, 1e9]),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=examples(60))
def test_every_task_finishes_or_is_given_up(
    trace: list[ArrivingTask], method: str, early_exit: bool, **bad_luck: object
) -> None:
    simulation = Simulation(nodes=2, gpus_per_node=2, trace=trace, quotas={"a": 4}, estimate_error=3.0, **bad_luck)
    outcome = simulate(simulation, method=method, early_exit=early_exit)
    check(simulation, outcome, len(trace))


@pytest.mark.parametrize("method", ["fifo", "lpt"])
@pytest.mark.parametrize("bad_luck", [{"crashes_per_hour": 1.0}, {"gpu_mtbf_hours": 100.0, "max_attempts": 1}], ids=str)
def test_tasks_that_are_given_up_after_a_pause_are_counted(bad_luck: dict[str, object], method: str) -> None:
    simulation = Simulation(nodes=1, gpus_per_node=4, num_tasks=30, gpus={1: 0.5, 4: 0.5}, **bad_luck)
    outcome = simulate(simulation, method=method, early_exit=False)
    check(simulation, outcome, 30)
    assert (outcome.num_failed > 0) == ("crashes_per_hour" in bad_luck)


def test_a_task_that_never_finds_as_many_gpus_as_it_needs_is_given_up() -> None:
    wide = ArrivingTask(arrival_s=10.0, gpus=8, duration_s=1e5)
    later = ArrivingTask(arrival_s=1e7, gpus=1, duration_s=0.5)
    simulation = Simulation(trace=(wide, later), gpu_mtbf_hours=0.1, gpu_repair_hours=5.0)
    outcome = simulate(simulation, method="lpt", early_exit=False)
    assert (outcome.num_finished, outcome.num_failed) == (1, 1)
    assert outcome.actual[-1].task == "task-1"
