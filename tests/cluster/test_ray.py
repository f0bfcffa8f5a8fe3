"""The parts that only Ray has: placement, actors and nodes that die, leftovers. The rest is in test_contract.py."""

from __future__ import annotations

import importlib
import os
import re
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("ray", reason="needs the ray extra: pip install 'alto-lora[ray]'")

import ray
from clusters import Started, is_alive, wait_for
from ray_machine import RayMachine

from alto import version
from alto.cluster import AttemptEnded, GpuAdded, GpuLost, Outcome
from alto.cluster import ray as of_ray
from alto.cluster.ray import RayCluster
from alto.errors import ClusterLostError, ClusterVersionError, SpecError, UnsupportedError
from alto.runs import read_events
from alto.version import install_command

pytestmark = [
    pytest.mark.slow("ray"),
    pytest.mark.filterwarnings(
        "ignore:.*:ResourceWarning",  # ray does not close the output of its processes
    ),
]


@pytest.fixture
def start_cluster(ray_nodes: RayMachine, tmp_path: Path) -> Iterator[Callable[..., Started]]:
    clusters: list[RayCluster] = []

    def start(host: str, **options: Any) -> Started:
        clusters.append(RayCluster("auto", **options))
        return Started(clusters[-1], tmp_path, host)

    yield start
    for cluster in clusters:
        cluster.close()


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1])


def actor_of(executor: int) -> int:
    return parent(parent(executor))


def has_lost_actor(started: Started) -> bool:
    """Return whether the cluster knows that task a's actor died, even if it has not reported the consequences yet."""
    actors = [actor for actor in started.cluster._actors if "a" in actor.launches]
    return not actors or bool(actors[0].died_because)


def groups() -> list[dict[str, Any]]:
    """Return the placement groups that hold resources or wait for them."""
    return [group for group in ray.util.placement_group_table().values() if group["state"] != "REMOVED"]


def test_each_task_runs_on_the_node_that_its_launch_names(start_cluster: Callable[..., Started]) -> None:
    started = start_cluster("waits")
    first, second = started.cluster.nodes
    assert (first.gpus, second.gpus) == ((0, 1), (0, 1))
    assert not started.cluster.has_gpus
    launches = {"wide": (2, 3), "narrow": (1,)}
    for task, gpus in launches.items():
        started.start(task, gpus=gpus)
    for task in launches:
        started.until_event("began", task)
    placed = [(group["strategy"], group["bundles"][0]["CPU"], group["bundles_to_node_id"][0][:8]) for group in groups()]
    assert sorted(placed) == sorted(
        ("STRICT_PACK", num_gpus, node.name[-8:]) for num_gpus, node in [(2, second), (1, first)]
    )


def test_a_task_larger_than_a_node_reserves_its_gpus_on_both(start_cluster: Callable[..., Started]) -> None:
    started = start_cluster("waits")
    started.start(gpus=(0, 2, 3))
    started.until_event("began")
    [group] = groups()
    assert sorted(bundle["CPU"] for bundle in group["bundles"].values()) == [1, 2]
    assert group["strategy"] == "STRICT_SPREAD"
    started.cluster.stop("a")
    assert started.until_ended().outcome is Outcome.INTERRUPTED


def test_an_actor_dies_alone_and_the_next_attempt_waits_for_its_executor(
    start_cluster: Callable[..., Started], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(of_ray, "NODE_VERDICT_S", 0)
    started = start_cluster("counts")
    run_dir = started.start()
    executor = started.until_event("waits")["pid"]
    os.kill(actor_of(executor), signal.SIGKILL)
    ended = started.until_ended()
    assert ended.outcome is Outcome.LOST
    assert "actor" in ended.reason
    started.start(attempt=2)
    wait_for((run_dir / "found-locked").exists, "the next executor", meanwhile=started.poll)
    assert started.ended(attempt=2) is None
    assert is_alive(executor), "it saves"
    (run_dir / "go").touch()
    assert started.until_ended(attempt=2).outcome is Outcome.FINISHED
    assert not is_alive(executor)
    journal = [line["event"] for line in read_events(run_dir / "journal.jsonl")]
    assert journal == ["step"] * 3 + ["waits", "checkpoint"] + ["step"] * 3


def test_a_hung_actor_is_found(start_cluster: Callable[..., Started]) -> None:
    started = start_cluster("waits", heartbeat_timeout_s=3)
    started.start()
    executor = started.until_event("began")["pid"]
    actor = actor_of(executor)
    os.kill(actor, signal.SIGSTOP)
    ended = started.until_ended()
    assert ended.outcome is Outcome.LOST
    assert "hung" in ended.reason
    wait_for(lambda: not is_alive(executor) and not is_alive(actor), "the end of a hung actor and its executor")


def test_a_node_that_joins_is_used_and_a_task_that_is_lost_with_it_goes_on_elsewhere(
    start_cluster: Callable[..., Started], ray_nodes: RayMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(of_ray, "NODE_VERDICT_S", 60)
    started = start_cluster("counts")
    node = ray_nodes.add_node(num_cpus=1)
    gpu = wait_for(
        lambda: next((event.gpu for event in started.events if isinstance(event, GpuAdded)), None),
        "a node",
        meanwhile=started.poll,
    )
    assert gpu.node.endswith(node.node_id[:8])
    run_dir = started.start(gpus=(started.gpus().index(gpu),))
    (run_dir / "go").touch()
    executor = started.until_event("waits")["pid"]
    # Ray reports the actor's death before the node's, and much earlier.
    os.kill(actor_of(executor), signal.SIGKILL)
    wait_for(lambda: has_lost_actor(started), "the death of the actor", meanwhile=started.poll)
    started.poll()
    assert not any(isinstance(event, GpuLost | AttemptEnded) for event in started.events)
    ray_nodes.kill_node(node)
    assert started.until_ended().outcome is Outcome.LOST
    assert [event for event in started.events if isinstance(event, GpuLost | AttemptEnded)] == [
        GpuLost(gpu=gpu),
        started.until_ended(),
    ]
    assert gpu not in started.gpus()
    started.start(attempt=2)
    assert started.until_ended(attempt=2).outcome is Outcome.FINISHED
    assert [line["step"] for line in started.lines_of(attempt=2) if line["event"] == "step"] == [3, 4, 5]


def test_gpus_are_used_where_there_are_some(start_cluster: Callable[..., Started], ray_nodes: RayMachine) -> None:
    node = ray_nodes.add_node(num_cpus=0, num_gpus=2)
    try:
        started = start_cluster("tells_variables")
        assert started.cluster.has_gpus
        [seen] = started.cluster.nodes
        assert seen.name.endswith(node.node_id[:8])
        started.start(gpus=(1,))
        environment = started.until_event("environment")
        assert environment["CUDA_VISIBLE_DEVICES"] in ("0", "1")
        assert environment["OMP_NUM_THREADS"] == str(max(1, len(os.sched_getaffinity(0)) // 2))
        assert started.until_ended().outcome is Outcome.FINISHED
    finally:
        ray_nodes.kill_node(node)
        wait_for(lambda: not ray_nodes.is_alive(node), "a node to be found dead")


def test_gpus_that_others_hold_are_not_waited_for_without_end(start_cluster: Callable[..., Started]) -> None:
    others = start_cluster("waits")
    others.start("other", gpus=(0, 1))
    others.until_event("began", "other")
    started = start_cluster("works", placement_timeout_s=1)
    started.start()
    ended = started.until_ended()
    assert ended.outcome is Outcome.LOST
    assert "other programs may hold" in ended.reason


def test_a_node_without_alto_fails_with_the_remedy(
    start_cluster: Callable[..., Started], monkeypatch: pytest.MonkeyPatch
) -> None:
    absent: Any = ModuleType("absent_on_nodes")
    methods = ("__init__(self, **_)", "start(self, launch)", "poll(self, *_)")
    exec("class Starter:\n" + "".join(f"    def {method}: ...\n" for method in methods), vars(absent))
    monkeypatch.setitem(sys.modules, "absent_on_nodes", absent)
    monkeypatch.setattr(of_ray, "Starter", absent.Starter)
    started = start_cluster("works")
    started.start()
    ended = started.until_ended()
    assert ended.outcome is Outcome.FAILED
    assert "No module named 'absent_on_nodes'" in ended.reason
    assert "expected the same version of ALTO on every node" in ended.reason
    assert "pip install" in ended.reason


def test_a_head_that_is_gone_is_named(start_cluster: Callable[..., Started], monkeypatch: pytest.MonkeyPatch) -> None:
    """While its head is away, Ray itself would wait for a minute and then end the process."""
    started = start_cluster("works")
    with socket.create_server(("127.0.0.1", 0)) as server:
        nobody = server.getsockname()
    monkeypatch.setattr(started.cluster, "_head", nobody)
    started.poll()
    started.poll()
    monkeypatch.setattr(of_ray, "HEAD_TIMEOUT_S", 0)
    with pytest.raises(ClusterLostError, match=r"the head at 127\.0\.0\.1:.*alto resume"):
        wait_for(lambda: False, "a lost head", meanwhile=started.poll)
    with pytest.raises(ClusterLostError, match="the head at"):
        started.start()


def test_a_lost_client_is_named(start_cluster: Callable[..., Started], monkeypatch: pytest.MonkeyPatch) -> None:
    def is_lost(*_: Any, **__: Any) -> None:
        raise ConnectionError("Client is shutting down.")

    started = start_cluster("works")
    with monkeypatch.context() as patch:
        patch.setattr(of_ray, "placement_group", is_lost)
        with pytest.raises(ClusterLostError, match="Client is shutting down"):
            started.start()
    with monkeypatch.context() as patch:
        patch.setattr(ray, "is_initialized", lambda: False)
        with pytest.raises(ClusterLostError, match="was disconnected"):
            started.poll()


def test_closing_leaves_no_process_no_actor_and_no_group(start_cluster: Callable[..., Started]) -> None:
    started = start_cluster("has_children")
    started.start()
    pids = [*started.until_event("children")["pids"], started.until_event("began")["pid"]]
    actor = actor_of(pids[-1])
    assert len(groups()) == 1
    started.cluster.close()
    assert not any(map(is_alive, pids))
    wait_for(lambda: not is_alive(actor) and not groups(), "the end of an actor and its group")
    assert ray.is_initialized()
    started.cluster.close()


def test_a_cluster_that_has_fewer_gpus_than_may_be_used_grows(
    start_cluster: Callable[..., Started], ray_nodes: RayMachine
) -> None:
    started = start_cluster("works", total_gpus=1000)
    assert len(started.gpus()) == 4
    node = ray_nodes.add_node(num_cpus=1)
    try:
        wait_for(lambda: len(started.gpus()) == 5, "a node", meanwhile=started.poll)
    finally:
        ray_nodes.kill_node(node)
        wait_for(lambda: not ray_nodes.is_alive(node), "a node to be found dead")


def test_gpus_that_join_a_cluster_of_cpus_are_decided_on_again(
    start_cluster: Callable[..., Started], ray_nodes: RayMachine
) -> None:
    started = start_cluster("counts")
    run_dir = started.start()
    executor = started.until_event("waits")["pid"]
    node = ray_nodes.add_node(num_cpus=0, num_gpus=1)
    try:
        with pytest.raises(ClusterLostError, match="found that nodes with GPUs have joined"):
            wait_for(lambda: False, "a GPU", meanwhile=started.poll)
        (run_dir / "go").touch()
        wait_for(lambda: not is_alive(executor), "the end of an executor")
        saved = [line["event"] for line in read_events(run_dir / "journal.jsonl")]
        assert saved[-1] == "checkpoint"
        again = start_cluster("works")
        assert again.cluster.has_gpus
        assert [found.name[-8:] for found in again.cluster.nodes] == [node.node_id[:8]]
    finally:
        ray_nodes.kill_node(node)
        wait_for(lambda: not ray_nodes.is_alive(node), "a node to be found dead")


def test_nodes_of_another_version_are_refused(ray_nodes: RayMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    found, other = version.__version__, "9.9.9"
    monkeypatch.setattr(version, "__version__", other)
    with pytest.raises(ClusterVersionError) as caught:
        RayCluster("auto")
    assert str(caught.value).count(f"expected alto-lora {other}, as in the process that starts tasks") == 2
    assert f"found alto-lora {found}" in str(caught.value)
    assert f"pip install 'alto-lora=={other}'" in str(caught.value)
    assert ray.is_initialized()


def test_a_node_of_another_version_is_not_used_until_it_is_upgraded(
    start_cluster: Callable[..., Started],
    ray_nodes: RayMachine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(of_ray, "ASK_AGAIN_S", 1.0)
    older = tmp_path / "older" / "torch-0.0.1.dist-info"
    older.mkdir(parents=True)
    (older / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 0.0.1\n", encoding="utf-8")
    started = start_cluster("works")
    node = ray_nodes.add_node(num_cpus=1, python_path=older.parent)
    try:
        wait_for(lambda: caplog.records, "a warning", meanwhile=started.poll)
        assert len(started.gpus()) == 4
        (record,) = caplog.records
        assert f"ClusterVersionError: node {socket.gethostname()}-{node.node_id[:8]}: expected torch" in record.message
        assert "found torch 0.0.1; in the Python environment of Ray on this node: pip install" in record.message
        (older / "METADATA").unlink()
        older.rmdir()
        wait_for(lambda: len(started.gpus()) == 5, "a node", meanwhile=started.poll)
        assert [record] == caplog.records, "it is said once"
    finally:
        ray_nodes.kill_node(node)
        wait_for(lambda: not ray_nodes.is_alive(node), "a node to be found dead")


def test_a_node_whose_packages_change_meanwhile_starts_nothing_and_is_not_used_any_more(
    start_cluster: Callable[..., Started],
    ray_nodes: RayMachine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(of_ray, "ASK_AGAIN_S", 1.0)
    started = start_cluster("works")
    packages = tmp_path / "packages"
    packages.mkdir()
    node = ray_nodes.add_node(num_cpus=1, python_path=packages)
    try:
        wait_for(lambda: len(started.gpus()) == 5, "a node", meanwhile=started.poll)
        other = packages / "torch-0.0.1.dist-info"
        other.mkdir()
        (other / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 0.0.1\n", encoding="utf-8")
        started.start(gpus=(4,))
        ended = started.until_ended()
        assert (ended.outcome, ended.error) == (Outcome.LOST, "ClusterVersionError")
        wait_for(lambda: len(started.gpus()) == 4, "the node to be left out", meanwhile=started.poll)
        wait_for(lambda: caplog.records, "a warning", meanwhile=started.poll)
        assert "found torch 0.0.1" in caplog.records[0].message
        (other / "METADATA").unlink()
        other.rmdir()
        wait_for(lambda: len(started.gpus()) == 5, "the node again", meanwhile=started.poll)
        started.start(gpus=(4,), attempt=2)
        assert started.until_ended(attempt=2).outcome is Outcome.FINISHED
    finally:
        ray_nodes.kill_node(node)
        wait_for(lambda: not ray_nodes.is_alive(node), "a node to be found dead")


def test_no_cluster_at_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(**_: Any) -> None:
        raise ConnectionError("nobody there")

    monkeypatch.setattr(ray, "init", refuses)
    with pytest.raises(SpecError, match=r"expected a Ray cluster at 'ray://nowhere:1', found none \(nobody there\)"):
        RayCluster("ray://nowhere:1")


def test_who_connects_keeps_its_own_answer_to_sigterm(ray_nodes: RayMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray installs its own handler, which ends the process before anything is drained."""
    ray.shutdown()  # the connection of the other tests
    monkeypatch.setenv("RAY_ADDRESS", ray_nodes.address)
    before = signal.getsignal(signal.SIGTERM)
    cluster = RayCluster("auto")
    try:
        assert signal.getsignal(signal.SIGTERM) is before
        assert len(cluster.nodes) == 2
    finally:
        cluster.close()
        assert not ray.is_initialized()
        ray_nodes.connect()


def test_ray_that_is_too_old_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "__version__", "2.49.2")
    with pytest.raises(UnsupportedError, match=r"expected Ray 2\.50 or newer, found 2\.49\.2"):
        RayCluster("auto")


def test_ray_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "alto.cluster.ray")
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UnsupportedError, match=re.escape(install_command("ray"))):
        importlib.import_module("alto.cluster.ray")
