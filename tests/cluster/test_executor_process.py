"""The environment of an executor's process, and the end of its runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from alto.cluster.base import AttemptEnded, Gpu, Launch, TaskTicket
from alto.cluster.executor_process import _ALLOCATOR_VARIABLES, ExecutorProcess, ProcessShape, Timeouts, WatchedRun


@pytest.fixture(autouse=True)
def _nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in _ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)


def allocator_of(devices: tuple[str, ...]) -> dict[str, str]:
    found = os.environ | ProcessShape(devices=devices, num_threads=2).environment()
    return {name: value for name, value in found.items() if name in _ALLOCATOR_VARIABLES}


def test_segments_of_memory_grow_on_a_gpu() -> None:
    assert allocator_of(("0",)) == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


def test_a_machine_without_a_gpu_is_left_alone() -> None:
    assert allocator_of(()) == {}


@pytest.mark.parametrize("name", _ALLOCATOR_VARIABLES)
def test_settings_of_the_user_are_kept(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "max_split_size_mb:256")
    assert allocator_of(("0", "1")) == {name: "max_split_size_mb:256"}


class FakeGroup:
    """Processes that are gone from the ``num_looks``-th look on."""

    exit_code = -9
    why_not_started = ""

    def __init__(self, num_looks: int) -> None:
        self.num_looks = num_looks

    def has_ended(self) -> bool:
        self.num_looks -= 1
        return self.num_looks < 0


def watched(folder: Path, process: ExecutorProcess, task: str) -> WatchedRun:
    (folder / task).mkdir()
    (folder / task / "journal.jsonl").touch()
    ticket = TaskTicket(task=task, run_dir=str(folder / task), host="nothing:at_all")
    launch = Launch(ticket=ticket, gpus=(Gpu("n", 0),), attempt=1)
    return WatchedRun(launch, process, Timeouts(heartbeat_s=60, start_s=60, drain_s=60))


@pytest.mark.parametrize("num_looks", range(4))
def test_a_run_whose_process_dies_at_any_instant_before_starting_it_moves(
    num_looks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups: list[Any] = [FakeGroup(num_looks), FakeGroup(1000)]
    monkeypatch.setattr("alto.cluster.executor_process.ProcessGroup", lambda *_, **__: groups.pop(0))
    shape = ProcessShape(devices=(), num_threads=1)
    zygote: Any = None
    first, second = (ExecutorProcess(zygote, shape, "nothing:at_all", grace_s=1) for _ in range(2))
    watched(tmp_path, first, "a")
    run = watched(tmp_path, first, "b")
    while not run.was_ignored:
        assert run.watch() == []
    run.move(lambda: second)
    assert second.runs == [run]
    assert run.watch() == []


def test_the_first_run_of_a_process_that_dies_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("alto.cluster.executor_process.ProcessGroup", lambda *_, **__: FakeGroup(0))
    zygote: Any = None
    process = ExecutorProcess(zygote, ProcessShape(devices=(), num_threads=1), "nothing:at_all", grace_s=1)
    (event,) = watched(tmp_path, process, "a").watch()
    assert isinstance(event, AttemptEnded)
    assert process.runs == []
