"""The program that runs on a node of Ray, and nodes as Ray describes them, without Ray."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from alto.cluster import (
    AttemptEnded,
    ClusterEvent,
    EntryWritten,
    GpuAdded,
    GpuLost,
    Launch,
    Outcome,
    TaskTicket,
    machine,
)
from alto.cluster.executor_process import Timeouts
from alto.cluster.ray_nodes import RayNodes, slot_resource, version_problem
from alto.cluster.ray_starter import Starter
from alto.records import Gpu

TIMEOUTS = Timeouts(heartbeat_s=60, start_s=60, drain_s=60)


@pytest.fixture(autouse=True)
def _entries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[1] / "support"), os.environ.get("PYTHONPATH", "")])
    )


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "journal.jsonl").touch()
    return tmp_path


def starter(run_dir: Path, host: str, *, has_gpus: bool = False) -> Starter:
    ticket = TaskTicket(task="a", run_dir=str(run_dir), host=f"cluster_hosts:{host}")
    launch = Launch(ticket=ticket, gpus=(Gpu("node", 7),), attempt=1)
    return started(launch, has_gpus=has_gpus)


def started(launch: Launch, *, has_gpus: bool = False, **versions: str) -> Starter:
    found = Starter(has_gpus=has_gpus, core_fraction=0.5, timeouts=TIMEOUTS, versions=versions)
    found.start(launch)
    return found


def events_of(starter: Starter) -> Iterator[ClusterEvent]:
    """Yield one event at a time, until the executor has ended."""
    num_heard, gives_up_at = 0, time.monotonic() + 120
    while time.monotonic() < gives_up_at:
        for event in starter.poll(num_heard, 1.0)[:1]:
            num_heard += 1
            yield event
            if isinstance(event, AttemptEnded):
                return
    pytest.fail("it did not end")


def test_an_answer_that_was_lost_is_given_again(run_dir: Path) -> None:
    executor = starter(run_dir, "works")
    heard = list(events_of(executor))
    assert [event.entry.name for event in heard if isinstance(event, EntryWritten)] == ["began", "done"]
    assert executor.poll(len(heard) - 1, 0) == heard[-1:]
    assert executor.poll(len(heard) - 1, 0) == heard[-1:]
    assert executor.poll(len(heard), 0) == []


def test_ranks_that_would_reach_over_nodes_are_not_started(run_dir: Path) -> None:
    gpus = (Gpu("one", 0), Gpu("other", 0))
    ticket = TaskTicket(task="a", run_dir=str(run_dir), host="none:none", num_gpus=2, is_parallel=True)
    launch = Launch(ticket=ticket, gpus=gpus, attempt=1)
    [ended] = started(launch).poll(0, 0)
    assert isinstance(ended, AttemptEnded)
    assert ended.outcome is Outcome.LOST
    assert "expected 2 GPUs on one machine" in ended.reason


def test_a_folder_that_the_node_does_not_see_fails_with_the_remedy(tmp_path: Path) -> None:
    [ended] = starter(tmp_path / "elsewhere", "works").poll(0, 0)
    assert isinstance(ended, AttemptEnded)
    assert ended.outcome is Outcome.FAILED
    assert "--output-dir" in ended.reason


def test_an_executor_is_not_started_where_packages_have_been_upgraded(run_dir: Path) -> None:
    launch = Launch(ticket=TaskTicket(task="a", run_dir=str(run_dir), host="none:none"), gpus=(Gpu("n", 0),), attempt=1)
    [ended] = started(launch, torch="0.0.1").poll(0, 0)
    assert isinstance(ended, AttemptEnded)
    assert (ended.outcome, ended.error) == (Outcome.LOST, "ClusterVersionError")
    assert "node n: expected torch 0.0.1, as in the process that starts tasks" in ended.reason


def test_an_executor_that_cannot_start_is_lost(run_dir: Path) -> None:
    (run_dir / "logs").write_text("no folder", encoding="utf-8")
    [ended] = starter(run_dir, "works").poll(0, 0)
    assert isinstance(ended, AttemptEnded)
    assert ended.outcome is Outcome.LOST


def test_the_executor_gets_the_gpus_that_ray_gave_and_its_share_of_the_cores(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    written, _ = events_of(starter(run_dir, "tells_variables", has_gpus=True))
    assert isinstance(written, EntryWritten)
    assert written.entry.to_dict()["CUDA_VISIBLE_DEVICES"] == "3,5"
    assert written.entry.to_dict()["OMP_NUM_THREADS"] == str(max(1, round(len(os.sched_getaffinity(0)) / 2)))


def test_closing_twice_leaves_nothing(run_dir: Path) -> None:
    executor = starter(run_dir, "waits")
    written = next(events_of(executor))
    assert isinstance(written, EntryWritten)
    executor.close()
    assert not Path(f"/proc/{written.entry.to_dict()['pid']}").exists()
    executor.close()


def test_an_executor_that_finds_the_disk_full_is_not_tried_again(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(machine, "WatchedRun", full)
    [ended] = starter(run_dir, "works").poll(0, 0)
    assert isinstance(ended, AttemptEnded)
    assert (ended.outcome, ended.error) == (Outcome.FAILED, "DiskFullError")
    assert "No space left on device" in ended.reason


def row(ray_id: str, *, alive: bool = True, host: str = "host", **resources: float) -> dict[str, Any]:
    return {"NodeID": ray_id * 8, "Alive": alive, "NodeManagerHostname": host, "Resources": resources}


def test_cpus_are_slots_only_where_no_node_has_a_gpu() -> None:
    head, gpu_node = row("a", CPU=8), row("b", CPU=8, GPU=2)
    assert slot_resource([head]) == "CPU"
    assert slot_resource([head, gpu_node]) == "GPU"
    assert slot_resource([head, {**gpu_node, "Alive": False}]) == "CPU"


def test_only_living_nodes_with_slots_take_part() -> None:
    nodes = RayNodes("GPU", None)
    nodes.update([row("a", CPU=8), row("b", GPU=2), row("c", GPU=1.5), row("d", alive=False, GPU=8)])
    assert [(node.name, node.gpus) for node in nodes.nodes] == [("host-bbbbbbbb", (0, 1)), ("host-cccccccc", (0,))]
    assert nodes.id_of("host-bbbbbbbb") == "b" * 8
    assert nodes.id_of("host-dddddddd") is None


def test_nodes_that_come_and_go_are_reported_once() -> None:
    nodes = RayNodes("GPU", None)
    first, second = row("a", GPU=2), row("b", GPU=1)
    nodes.update([first])
    assert nodes.update([first]) == []
    gone = [GpuLost(gpu=Gpu("host-aaaaaaaa", index)) for index in (0, 1)]
    came = [GpuAdded(gpu=Gpu("host-bbbbbbbb", 0))]
    assert nodes.update([{**first, "Alive": False}, second]) == [*gone, *came]
    assert nodes.update([second]) == []


@pytest.mark.parametrize(("total_gpus", "used"), [(1, [1]), (3, [2, 1]), (9, [2, 2])])
def test_no_more_gpus_are_used_than_asked_for(total_gpus: int, used: list[int]) -> None:
    nodes = RayNodes("GPU", total_gpus)
    nodes.update([row("a", GPU=2), row("b", GPU=2)])
    assert [len(node.gpus) for node in nodes.nodes] == used
    assert nodes.num_slots("host-aaaaaaaa") == 2


def test_a_node_that_comes_takes_the_place_of_one_that_went() -> None:
    nodes = RayNodes("GPU", 2)
    nodes.update([row("a", GPU=2), row("b", GPU=2)])
    assert [node.name for node in nodes.nodes] == ["host-aaaaaaaa"]
    nodes.update([row("b", GPU=2)])
    assert [node.name for node in nodes.nodes] == ["host-bbbbbbbb"]


def test_more_of_a_node_is_used_when_others_leave() -> None:
    nodes = RayNodes("GPU", 3)
    first, second = row("a", GPU=2), row("b", GPU=2)
    nodes.update([first, second])
    assert nodes.update([second]) == [
        *(GpuLost(gpu=Gpu("host-aaaaaaaa", index)) for index in (0, 1)),
        GpuAdded(gpu=Gpu("host-bbbbbbbb", 1)),
    ]
    assert [(node.name, node.gpus) for node in nodes.nodes] == [("host-bbbbbbbb", (0, 1))]


def test_a_cluster_may_grow_to_the_maximum_that_is_asked_for() -> None:
    nodes = RayNodes("GPU", 3)
    first, second = row("a", GPU=1), row("b", GPU=4)
    nodes.update([first])
    assert nodes.update([first, second]) == [GpuAdded(gpu=Gpu("host-bbbbbbbb", index)) for index in (0, 1)]


def test_nodes_with_other_versions_are_named_with_the_remedy() -> None:
    expected = {"alto-lora": "0.2.0", "torch": "2.12.1+cpu"}
    assert version_problem("n", expected, {"alto-lora": "0.2.0", "torch": "2.12.1+cu128"}) == ""
    found = version_problem("n", expected, {"alto-lora": "0.1.0", "torch": None})
    assert "node n: expected alto-lora 0.2.0 and torch 2.12.1+cpu" in found
    assert "found alto-lora 0.1.0 and torch (not installed)" in found
    assert found.endswith("pip install 'alto-lora==0.2.0' 'torch==2.12.1'")
    assert "torch" not in version_problem("n", expected, {"alto-lora": None, "torch": "2.12.1"})


def test_an_error_at_the_start_ends_the_attempt_with_the_reason(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found = starter(run_dir, "works", has_gpus=True)
    [ended] = found.poll(0, 0.0)
    assert isinstance(ended, AttemptEnded)
    assert ended.outcome is Outcome.FAILED
    assert "cannot be started on node (KeyError" in ended.reason
    assert "CUDA_VISIBLE_DEVICES" in ended.reason
    found.close()
