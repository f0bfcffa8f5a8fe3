"""The number of slots of a CPU for the tasks of a queue: one per task, limited by cores and memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny import make_task

from alto import Engine
from alto.engine import queue_setup
from alto.engine.queue_setup import QueueSetup
from alto.executor.profiling.meter import capacity_bytes
from alto.records import ThreadTime
from alto.runs import read_queue_history

GIB = 2**30


def setup(**changes: object) -> QueueSetup:
    values = {"strategy": "single", "cluster": "local", "total_gpus": None, "quotas": {}}
    return QueueSetup(**(values | changes))  # type: ignore[arg-type]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine of eight cores and 64 GiB, and base models with files of 1 GiB."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(queue_setup, "num_cores", lambda: 8)
    monkeypatch.setattr(queue_setup, "capacity_bytes", lambda device: 64 * GIB)
    monkeypatch.setattr(queue_setup.cache, "weights_of", lambda model: [("config.json", 0, 0), ("w", GIB, 0)])
    return monkeypatch


@pytest.mark.parametrize(("num_tasks", "num_gpus", "slots"), [(1, 1, 1), (3, 1, 3), (20, 1, 7), (2, 3, 6)])
@pytest.mark.usefixtures("machine")
def test_slots_are_limited_by_tasks_and_memory(num_tasks: int, num_gpus: int, slots: int, tmp_path: Path) -> None:
    tasks = [make_task(tmp_path).replace(num_gpus=num_gpus)] * num_tasks
    assert setup().sized_for(tasks).total_gpus == slots  # 9 GiB per process: seven fit


def test_no_more_than_cores(machine: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine.setattr(queue_setup, "num_cores", lambda: 2)
    assert setup().sized_for([make_task(tmp_path)] * 5).total_gpus == 2


@pytest.mark.parametrize(
    ("num_tasks", "cores", "step_s", "slots"),
    [
        (3, 2, {2: 1.0, 1: 1.75}, 1),  # two rounds on two slots take 3.5, three on one slot take 3
        (3, 2, {2: 1.0, 1: 1.4}, 2),
        (4, 2, {2: 1.0, 1: 1.75}, 2),
        (5, 8, {8: 1.0, 4: 1.5, 2: 2.5, 1: 4.5}, 5),  # five processes of one thread: 4.5; four of two: 5
        (5, 8, {8: 1.0, 4: 1.5, 2: 2.5, 1: 5.5}, 2),  # three rounds of 1.5
        (3, 8, {8: 1.0, 4: 1.0}, 3),  # of the fewer threads, only half were measured: a quarter takes twice as long
        (5, 8, {}, 5),
    ],
)
def test_measured_steps_decide_how_many_threads_a_slot_has(
    num_tasks: int, cores: int, step_s: dict[int, float], slots: int, machine: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine.setattr(queue_setup, "num_cores", lambda: cores)
    known = tuple(ThreadTime(num_threads=number, duration_s=seconds) for number, seconds in step_s.items())
    machine.setattr(queue_setup, "kept_thread_times", lambda model, available: known)
    assert setup().sized_for([make_task(tmp_path)] * num_tasks).total_gpus == slots


@pytest.mark.parametrize("changes", [{"total_gpus": 3}, {"cluster": "auto"}])
@pytest.mark.usefixtures("machine")
def test_a_choice_of_the_user_and_other_clusters_stay(changes: dict[str, object], tmp_path: Path) -> None:
    before = setup(**changes)
    assert before.sized_for([make_task(tmp_path)] * 5) == before


def test_gpus_and_an_empty_queue_and_unknown_sizes_stay(machine: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert setup().sized_for([]).total_gpus is None
    with machine.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        assert setup().sized_for([make_task(tmp_path)] * 5).total_gpus is None
    machine.setattr(queue_setup.cache, "weights_of", lambda model: [])
    assert setup().sized_for([make_task(tmp_path)] * 5).total_gpus is None


def test_an_executor_on_a_slot_plans_with_its_share_of_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = capacity_bytes(torch.device("cpu"))
    monkeypatch.setenv("ALTO_MEMORY_SHARE", "0.25")
    assert capacity_bytes(torch.device("cpu")) == whole // 4


@pytest.mark.skipif(torch.cuda.is_available(), reason="about CPU slots")
def test_tasks_of_a_queue_run_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_setup, "num_cores", lambda: 2)
    tasks = [make_task(tmp_path).replace(name=name, early_exit=False) for name in ("one", "two")]
    engine = Engine(strategy="single", output_dir=tmp_path / "runs")
    schedule = engine.schedule(tasks)
    assert len({gpu for place in schedule.placements for gpu in place.gpus}) <= 2
    assert [result.task for result in engine.batched_execution(tasks, schedule)] == ["one", "two"]
    (root,) = (tmp_path / "runs").glob("queue-*")
    history = read_queue_history(root)
    assert {len(node.gpus) for node in history.nodes} == {2}
