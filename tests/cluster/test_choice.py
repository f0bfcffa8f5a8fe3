"""Clusters by name, including those of installed packages, and the errors of one that does not work."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import packages
import pytest
from fake_cluster import Clock, FakeCluster
from journals import entries
from tiny import make_task, save_model

import alto
from alto.cluster import AttemptEnded, Cluster, EntryWritten, GpuLost, Launch, Outcome, TaskTicket, open_cluster
from alto.cluster.choice import CheckedCluster
from alto.cluster.local import LocalCluster
from alto.errors import ClusterLostError, SpecError, UnsupportedError
from alto.records import Gpu, Node

FILES = packages.files_of(
    "clusters.md", after="### A cluster that wraps another", until="### A cluster that starts executors"
)


def test_local_is_this_machine() -> None:
    cluster = open_cluster("local", total_gpus=2)
    assert isinstance(cluster, LocalCluster)
    cluster.close()


@pytest.mark.parametrize("name", ["locl", "slurm://head", "ray", ""])
def test_an_unknown_cluster_is_refused_by_name(name: str) -> None:
    with pytest.raises(SpecError, match="cluster"):
        open_cluster(name, total_gpus=None)


def test_one_of_a_package_that_is_no_function_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = {**FILES, "accounts/__init__.py": "open_accounted = 3\n"}
    packages.install(tmp_path, broken, monkeypatch)
    with pytest.raises(UnsupportedError, match=r"accounts:open_accounted of the package .* expected a function"):
        open_cluster("accounts://x", total_gpus=1)


@pytest.mark.parametrize(
    ("line", "wrong", "message"),
    [
        ("return AccountedCluster(", "return (", r"that the package opens, tuple, .* without nodes, has_gpus"),
        (
            "return AccountedCluster(",
            "1 / 0; (",
            r"the cluster 'accounts': .* ZeroDivisionError: .* in __init__.py:4\d of accounts",
        ),
        ("    def stop(", "    def end(", r"AccountedCluster, .* found it without stop; fix the cluster plugin"),
        ("return self._inner.nodes", "return None", r"AccountedCluster.nodes: expected a sequence of .* found None"),
    ],
)
def test_one_that_opens_no_cluster_is_refused(
    line: str, wrong: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = FILES["accounts/__init__.py"]
    assert line in source
    packages.install(tmp_path, {**FILES, "accounts/__init__.py": source.replace(line, wrong)}, monkeypatch)
    with pytest.raises(UnsupportedError, match=message):
        open_cluster("accounts://x", total_gpus=1)


def test_a_package_cannot_take_the_name_of_alto_s_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toml = FILES["pyproject.toml"].replace("accounts = ", "local = ")
    packages.install(tmp_path, {**FILES, "pyproject.toml": toml}, monkeypatch)
    with pytest.raises(
        UnsupportedError, match=r"cluster: expected 'local' to be registered by ALTO only, .*accounts:open_"
    ):
        open_cluster("local", total_gpus=1)


def test_the_page_s_cluster_runs_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packages.install(tmp_path, FILES, monkeypatch)
    accounts = tmp_path / "accounts.jsonl"
    engine = alto.Engine(cluster=f"accounts://{accounts}", output_dir=tmp_path / "runs")
    model = str(save_model(tmp_path / "model"))
    (result,) = engine.batched_execution([make_task(tmp_path, model=model, num_train_epochs=1)])
    assert Path(result.adapter_dir).is_dir()
    lines = [json.loads(line) for line in accounts.read_text(encoding="utf-8").splitlines()]
    assert [line["outcome"] for line in lines if "outcome" in line] == ["finished", "finished"], (
        "measured, then trained"
    )
    assert {line["host"].rpartition(":")[2] for line in lines if "host" in line} == {"Planning", "Training"}


def launch(task: str = "a", attempt: int = 1) -> Launch:
    ticket = TaskTicket(task=task, run_dir="unused", host="nothing:at_all")
    return Launch(ticket=ticket, gpus=(Gpu("n", 0),), attempt=attempt)


def cluster(**changes: Any) -> FakeCluster:
    return FakeCluster(clock=Clock(), seconds={"a": 1.0}, **changes)


def ended(attempt: int = 1, task: str = "a") -> AttemptEnded:
    return AttemptEnded(task=task, attempt=attempt, outcome=Outcome.FINISHED)


def test_a_cluster_that_does_as_it_should_is_passed_on() -> None:
    inner = cluster()
    checked: Cluster = CheckedCluster(inner)
    assert (checked.nodes, checked.has_gpus) == (inner.nodes, False)
    for attempt in (1, 2):
        checked.start(launch(attempt=attempt))
        assert checked.poll(2.0) == [ended(attempt)]
        assert checked.poll(0) == []
    checked.start(launch(attempt=3))
    checked.stop("a")
    (interrupted,) = checked.poll(0)
    assert isinstance(interrupted, AttemptEnded)
    assert (interrupted.attempt, interrupted.outcome) == (3, Outcome.INTERRUPTED)
    checked.close()
    assert [found.attempt for found in inner.launches] == [1, 2, 3]


def test_lost_gpus_are_passed_on() -> None:
    gone = GpuLost(gpu=Gpu("n", 1))
    assert CheckedCluster(cluster(script=lambda _: [gone])).poll(0) == [gone]


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda checked: checked.start(launch()), "start"),
        (lambda checked: checked.stop("a"), "stop"),
        (lambda checked: checked.poll(0), "poll"),
        (lambda checked: checked.close(), "close"),
    ],
)
def test_what_a_method_raises_is_named(call: Callable[[Cluster], object], name: str) -> None:
    inner = cluster()

    def fails(*_: object) -> None:
        raise KeyError("slot")

    setattr(inner, name, fails)
    with pytest.raises(UnsupportedError, match=rf"^FakeCluster.{name}: expected .* raises KeyError: 'slot'"):
        call(CheckedCluster(inner))


def test_errors_of_alto_pass() -> None:
    def fails(_: object) -> Any:
        raise ClusterLostError("gone")

    with pytest.raises(ClusterLostError, match=r"^gone$"):
        CheckedCluster(cluster(script=fails)).poll(0)


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        (None, "expected a sequence of alto.records.Node, found None"),
        (["slot-0"], r"expected a sequence of alto.records.Node, found \['slot-0'\]"),
        ([], "at least one GPU or CPU slot, found"),
        ([Node(name="n", gpus=())], "at least one GPU or CPU slot, found"),
        ([Node(name="n", gpus=(0,)), Node(name="n", gpus=(1,))], "machines with different names"),
    ],
)
def test_invalid_nodes_are_refused(nodes: Any, message: str) -> None:
    with pytest.raises(UnsupportedError, match=f"^FakeCluster.nodes: .*{message}"):
        CheckedCluster(cluster(nodes=nodes))


@pytest.mark.parametrize(
    ("events", "message"),
    [
        (None, "expected a list of events, found NoneType"),
        (["finished"], "expected events of alto.cluster, found str"),
        ([AttemptEnded(task="a", attempt=1, outcome="finished")], "expected an outcome .*, found 'finished'"),  # type: ignore[arg-type]
        ([ended(2)], "AttemptEnded of attempt 2 at task 'a', while attempt 1 is running; fix the cluster plugin"),
        ([ended(task="b")], "AttemptEnded of attempt 1 at task 'b', while no attempt is running"),
        ([ended(), ended()], "AttemptEnded of attempt 1 at task 'a', while no attempt is running"),
        (
            [ended(), EntryWritten(task="a", attempt=1, entry=entries([{"event": "began", "time": 0.0}])[0])],
            "EntryWritten of attempt 1 at task 'a', while no attempt is running",
        ),
    ],
)
def test_unexpected_events_are_refused(events: Any, message: str) -> None:
    inner = cluster()
    checked = CheckedCluster(inner)
    checked.start(launch())
    inner.poll = lambda timeout_s: events  # type: ignore[method-assign]
    with pytest.raises(UnsupportedError, match=f"^FakeCluster.poll: .*{message}"):
        checked.poll(0)
