"""What a cluster of a package does wrong is said by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from fake_cluster import Clock, FakeCluster
from journals import entries

from alto.cluster import Cluster, EntryWritten, ExecutorEnded, GpuGone, Launch, Outcome, TaskTicket
from alto.cluster.choice import CheckedCluster
from alto.errors import ClusterLostError, UnsupportedError
from alto.records import Gpu, Node


def launch(task: str = "a", attempt: int = 1) -> Launch:
    ticket = TaskTicket(task=task, run_dir="unused", entry="nothing:at_all")
    return Launch(ticket=ticket, gpus=(Gpu("n", 0),), attempt=attempt)


def cluster(**changes: Any) -> FakeCluster:
    return FakeCluster(clock=Clock(), seconds={"a": 1.0}, **changes)


def ended(attempt: int = 1, task: str = "a") -> ExecutorEnded:
    return ExecutorEnded(task=task, attempt=attempt, outcome=Outcome.FINISHED)


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
    assert isinstance(interrupted, ExecutorEnded)
    assert (interrupted.attempt, interrupted.outcome) == (3, Outcome.INTERRUPTED)
    checked.close()
    assert [found.attempt for found in inner.launches] == [1, 2, 3]


def test_lost_gpus_are_passed_on() -> None:
    gone = GpuGone(gpu=Gpu("n", 1))
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
def test_nodes_that_are_none_are_refused(nodes: Any, message: str) -> None:
    with pytest.raises(UnsupportedError, match=f"^FakeCluster.nodes: .*{message}"):
        CheckedCluster(cluster(nodes=nodes))


@pytest.mark.parametrize(
    ("events", "message"),
    [
        (None, "expected a list of events, found NoneType"),
        (["finished"], "expected events of alto.cluster, found str"),
        ([ExecutorEnded(task="a", attempt=1, outcome="finished")], "expected an outcome .*, found 'finished'"),  # type: ignore[arg-type]
        ([ended(2)], "ExecutorEnded of attempt 2 at task 'a', of which attempt 1 runs; correct"),
        ([ended(task="b")], "ExecutorEnded of attempt 1 at task 'b', of which no attempt runs"),
        ([ended(), ended()], "ExecutorEnded of attempt 1 at task 'a', of which no attempt runs"),
        (
            [ended(), EntryWritten(task="a", attempt=1, entry=entries([{"event": "began", "time": 0.0}])[0])],
            "EntryWritten of attempt 1 at task 'a', of which no attempt runs",
        ),
    ],
)
def test_events_that_nobody_waits_for_are_refused(events: Any, message: str) -> None:
    inner = cluster()
    checked = CheckedCluster(inner)
    checked.start(launch())
    inner.poll = lambda timeout_s: events  # type: ignore[method-assign]
    with pytest.raises(UnsupportedError, match=f"^FakeCluster.poll: .*{message}"):
        checked.poll(0)
