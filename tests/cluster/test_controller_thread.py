"""A controller on its own thread: used by many others, and ended by an error or by being closed."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from controller_bench import Bench, new_run
from fake_cluster import FakeCluster

from alto.cluster import ClusterEvent, Controller
from alto.errors import QueueCommandError, RunBusyError
from alto.runs import JournalEntry, read_events

LIMIT_S = 120.0
"""A limit for what must not hang."""


def wait_a_moment(cluster: FakeCluster) -> tuple[()]:
    """Let the other threads run; the cluster's clock moves with every turn."""
    time.sleep(0.001)
    return ()


def end_what_runs(cluster: FakeCluster) -> tuple[()]:
    """End all tasks in this turn, whatever time they would have taken."""
    cluster.running = {task: (0.0, launch) for task, (_, launch) in cluster.running.items()}
    return ()


@pytest.fixture
def threaded(tmp_path: Path) -> Iterator[tuple[Bench, Controller]]:
    """Two GPUs with tasks that do not end by themselves, and a third task that waits."""
    bench = Bench(tmp_path, dict.fromkeys("abc", 1e9))
    bench.cluster.script = wait_a_moment
    with bench.controller() as controller:
        controller.start()
        yield bench, controller


def test_on_its_thread_it_is_used_from_many(threaded: tuple[Bench, Controller]) -> None:
    bench, controller = threaded
    runs = [new_run(bench, f"task-{number}", 1.0) for number in range(20)]
    seen: list[JournalEntry] = []
    follower = threading.Thread(target=lambda: seen.extend(controller.events()))
    follower.start()
    senders = [threading.Thread(target=controller.submit, args=(run,)) for run in runs]
    for sender in senders:
        sender.start()
    for sender in senders:
        sender.join()
    bench.cluster.script = end_what_runs
    assert controller.wait()
    controller.close()
    follower.join()
    assert {task for task, count in bench.starts.items() if count == 1} == {"a", "b", "c", *(run.task for run in runs)}
    assert [entry.to_dict() for entry in seen] == read_events(bench.queue_dir.run.journal_file)
    assert controller.status().open_tasks == ()
    with pytest.raises(QueueCommandError, match="found one that was closed"):
        controller.cancel("a")


def test_the_error_that_ends_its_thread_is_raised_for_everybody_who_waits(threaded: tuple[Bench, Controller]) -> None:
    bench, controller = threaded
    follower = threading.Thread(target=lambda: list(controller.events()))
    follower.start()
    journal = bench.queue_dir.run.journal_file
    journal.rename(journal.with_suffix(".old"))
    bench.cluster.script = end_what_runs
    with pytest.raises(RunBusyError, match="found it removed or replaced"):
        controller.wait()
    with pytest.raises(RunBusyError):
        controller.cancel("c")
    with pytest.raises(RunBusyError):
        controller.drain()
    follower.join(LIMIT_S)
    assert not follower.is_alive()
    assert not bench.cluster.running, "its executors were ended"


def test_closing_kills_what_runs_and_waits_for_nobody(threaded: tuple[Bench, Controller]) -> None:
    bench, controller = threaded
    assert not controller.wait(timeout_s=1.0)  # by the cluster's clock
    controller.close()
    controller.close()
    assert not bench.cluster.running
    assert controller.has_ended


def test_draining_is_no_error_for_who_asks_while_the_last_executor_ends(tmp_path: Path) -> None:
    bench = Bench(tmp_path, {"a": 1e6})
    errors: list[Exception] = []

    def drain() -> None:
        try:
            controller.drain()
        except Exception as error:
            errors.append(error)

    drainers = [threading.Thread(target=drain) for _ in range(2)]

    def ask_again(cluster: FakeCluster) -> Iterable[ClusterEvent]:
        """Start another thread in the last turn, which the first thread has caused."""
        if cluster.stopped and not drainers[1].ident:
            drainers[1].start()
            while not controller._calls:
                time.sleep(0.001)
        return ()

    bench.cluster.script = ask_again
    with bench.controller() as controller:
        controller.start()
        drainers[0].start()
        for drainer in drainers:
            drainer.join()
    assert errors == []
    assert bench.events("queue_interrupted")[0]["open"] == ["a"]
