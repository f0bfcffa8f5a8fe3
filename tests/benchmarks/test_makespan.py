"""The makespan ablation: its figures and gate on queues that were never run, and its tasks on real rows."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

import alto
from alto.records import Demand, Gpu, TaskOutcome
from alto.runs import Attempt, QueueHistory, TaskHistory
from benchmarks import makespan
from benchmarks.common import GSM8K

RESULT = TaskOutcome(
    task="a",
    run_dir="runs/a",
    adapter_dir="runs/a/best",
    best_job="job-000",
    best_validation_loss=2.0,
    jobs=(),
    duration_s=1.0,
)


def measured(
    seconds: float, *, loss: float = 2.0, starts: tuple[float, ...] = (0.0, 5.0), executor: str = ""
) -> makespan.Measured:
    """Return a measurement of two tasks on one GPU, five seconds each, with these starts."""
    history = QueueHistory()
    for name, start in zip("ab", starts, strict=True):
        attempt = Attempt(number=1, gpus=(Gpu("local", 0),), start=start, end=start + 5.0, outcome="finished")
        attempt.executor = executor
        history.tasks[name] = TaskHistory(demand=Demand(task=name, num_gpus=1, duration_s=1.0), attempts=[attempt])
    result = alto.TaskResult(dataclasses.replace(RESULT, best_validation_loss=loss))
    return makespan.Measured(seconds=seconds, planned_s=10.0, results=[result], history=history)


def four(**others: makespan.Measured) -> dict[str, makespan.Measured]:
    seconds = {"B": 60.0, "B+S": 50.0, "B+EE": 12.0, "B+S+EE": 10.0}
    return {name: measured(taken) for name, taken in seconds.items()} | others


def test_figures_are_ratios_to_batching_alone() -> None:
    assert makespan.figures(four(), 10.0) == {
        "full_over_batched": 6.0,
        "scheduled_over_batched": 1.2,
        "early_exit_over_batched": 5.0,
        "full_over_batched_with_profiling": 3.0,
        "scheduled_over_batched_with_profiling": 1.0,
        "best_loss_ratio": 1.0,
        "worst_loss_ratio": 1.0,
    }
    assert makespan.gate(four()) == []
    assert makespan.gate(four(**{"B+S": measured(50.0, starts=(0.0, 4.0), executor="executor-1")})) == []


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (measured(50.0, starts=(0.0, 4.0)), "B+S: two tasks at a time on local:0"),
        (measured(50.0, loss=2.2), "a: best loss 2.2000 when scheduled, 2.0000 in order"),
    ],
    ids=["shared", "other adapters"],
)
def test_the_gate_refuses(broken: makespan.Measured, message: str) -> None:
    (failure,) = makespan.gate(four(**{"B+S": broken}))
    assert failure.startswith(message)


def test_the_gate_refuses_a_task_that_ran_twice() -> None:
    broken = measured(50.0)
    broken.history.tasks["b"].attempts *= 2
    assert any("3 executors for 2 tasks" in failure for failure in makespan.gate(four(**{"B+S": broken})))


def test_the_cpu_scale_is_eleven_tasks_that_differ() -> None:
    tasks = makespan.PLANS["cpu"].tasks
    assert len(tasks) == len(set(tasks)) == 11
    assert {slots for slots, *_ in tasks} == {1, 2}


@pytest.mark.slow("minutes")
@pytest.mark.filterwarnings("ignore")
def test_the_smallest_scale_passes_its_gate(tmp_path: Path) -> None:
    if not GSM8K.exists():
        pytest.skip(f"needs word problems at {GSM8K}")
    assert makespan.main(["--scale", "smoke", "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "makespan-smoke.json").read_text(encoding="utf-8"))
    assert found["gate"] == "passed"
    assert set(makespan.GOALS) <= set(found["figures"])
