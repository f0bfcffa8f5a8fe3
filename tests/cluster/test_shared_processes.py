"""Several runs in one process, at once and one after the other."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from clusters import Started, is_alive, wait_for

from alto.base import replace_file
from alto.cluster import Outcome
from alto.cluster.local import LocalCluster


@pytest.fixture
def machine(start_cluster: Callable[..., Started]) -> Started:
    return start_cluster("Together", 2)


@pytest.fixture
def local(tmp_path: Path) -> Iterator[Started]:
    """A local cluster, for what Ray does otherwise: it sets its nodes' environment, and reserves GPUs for each
    actor."""
    cluster = LocalCluster(total_gpus=2)
    yield Started(cluster, tmp_path, "Together")
    cluster.close()
    cluster.close()


def begin(machine: Started, task: str, executor: str = "x", *, base: str = "m", gpu: int = 0, attempt: int = 1) -> int:
    """Start a task; return the process that works on it."""
    machine.start(task, gpus=(gpu,), executor=executor, base=base, attempt=attempt, tenant=f"tenant of {task}")
    return int(machine.until_event("began", task, attempt)["pid"])


def end(machine: Started, task: str, error: str = "", attempt: int = 1) -> Outcome:
    replace_file(machine.run_dir(task) / "end", error)
    return machine.until_ended(task, attempt).outcome


def test_tasks_of_one_executor_are_in_one_process_and_end_one_by_one(machine: Started) -> None:
    pid = begin(machine, "a")
    assert begin(machine, "b") == pid
    assert begin(machine, "c") == pid
    assert machine.lines_of("c")[0]["num_runs"] == 3
    assert machine.lines_of("c")[0]["tenant"] == "tenant of c"
    assert end(machine, "b") is Outcome.FINISHED
    assert machine.until_ended("b").notices == ("well", "done")
    assert end(machine, "a") is end(machine, "c") is Outcome.FINISHED


def test_a_task_that_fails_ends_alone(machine: Started) -> None:
    pid = begin(machine, "a")
    begin(machine, "b")
    assert end(machine, "b", "SpecError") is Outcome.FAILED
    (machine.run_dir("c") / "refused").touch()
    machine.start("c", executor="x", base="m")
    refused = machine.until_ended("c")
    assert (refused.outcome, refused.reason, refused.error) == (Outcome.FAILED, "refused before it began", "SpecError")
    assert begin(machine, "d") == pid
    assert end(machine, "a") is end(machine, "d") is Outcome.FINISHED


def test_one_task_is_stopped_and_the_others_continue(machine: Started) -> None:
    pid = begin(machine, "a")
    begin(machine, "b")
    machine.cluster.stop("a")
    assert machine.until_ended("a").outcome is Outcome.INTERRUPTED
    assert begin(machine, "a", attempt=2) == pid
    assert end(machine, "b") is end(machine, "a", attempt=2) is Outcome.FINISHED


def test_a_process_that_is_killed_loses_all_its_tasks_and_no_other(machine: Started) -> None:
    pid = begin(machine, "a")
    begin(machine, "b")
    other = begin(machine, "c", "y", gpu=1)
    os.kill(pid, signal.SIGKILL)
    for task in "ab":
        ended = machine.until_ended(task)
        assert ended.outcome is Outcome.LOST
        assert "was killed by SIGKILL" in ended.reason
        assert "logs" not in ended.reason, "its output belongs to no single task"
    assert machine.ended("c") is None
    assert begin(machine, "a", attempt=2) not in (pid, other)
    assert end(machine, "c") is end(machine, "a", attempt=2) is Outcome.FINISHED


def test_an_unexpected_error_ends_the_process_after_the_others(machine: Started) -> None:
    pid = begin(machine, "a")
    begin(machine, "b")
    assert end(machine, "a", "RuntimeError") is Outcome.LOST
    machine.start("c", executor="x", base="m")
    assert machine.until_ended("c").outcome is Outcome.LOST, "it takes no further task"
    assert end(machine, "b") is Outcome.FINISHED
    wait_for(lambda: not is_alive(pid), "the end of the process", meanwhile=machine.poll)


def test_a_task_that_needs_the_same_base_gets_the_process_that_has_it(local: Started) -> None:
    pid = begin(local, "a", "")
    assert end(local, "a") is Outcome.FINISHED
    assert begin(local, "b", "", gpu=1) == pid, "all slots of a CPU are equal"
    assert end(local, "b") is Outcome.FINISHED
    other = begin(local, "c", "", base="n", gpu=1)
    assert other != pid
    assert not is_alive(pid), "its memory may be needed"
    assert end(local, "c") is Outcome.FINISHED


@pytest.mark.parametrize("change", ["variable", "folder", "trust_remote_code", "num_ranks"])
def test_what_a_process_cannot_change_needs_another(
    local: Started, change: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pid = begin(local, "a")
    assert end(local, "a") is Outcome.FINISHED
    settings = {}
    if change == "variable":
        monkeypatch.setenv("SOMETHING", "else")
    elif change == "folder":
        monkeypatch.chdir(tmp_path)
    else:
        settings = {"trust_remote_code": True} if change == "trust_remote_code" else {"num_ranks": 2, "gpus": (0, 1)}
    local.start("b", base="m", **settings)
    assert local.until_event("began", "b")["pid"] != pid
    assert end(local, "b") is Outcome.FINISHED


def test_an_idle_process_ends_after_a_while(tmp_path: Path) -> None:
    cluster = LocalCluster(idle_timeout_s=0.5)
    machine = Started(cluster, tmp_path, "Together")
    pid = begin(machine, "a")
    assert end(machine, "a") is Outcome.FINISHED
    assert is_alive(pid)
    wait_for(lambda: not is_alive(pid), "the end of the process", meanwhile=machine.poll)
    cluster.close()


def test_a_task_is_not_lost_where_its_process_ends_at_that_moment(machine: Started) -> None:
    pid = begin(machine, "a")
    assert end(machine, "a") is Outcome.FINISHED
    os.kill(pid, signal.SIGSTOP)
    machine.start("b", base="m", executor="x")
    os.kill(pid, signal.SIGKILL)
    assert machine.until_event("began", "b")["pid"] != pid
    assert end(machine, "b") is Outcome.FINISHED


def test_a_task_that_was_asked_to_stop_is_not_begun_in_another_process(local: Started) -> None:
    pid = begin(local, "a")
    assert end(local, "a") is Outcome.FINISHED
    os.kill(pid, signal.SIGSTOP)
    local.start("b", base="m", executor="x")
    local.cluster.stop("b")
    os.kill(pid, signal.SIGKILL)
    assert local.until_ended("b").outcome is Outcome.LOST
    assert not local.lines_of("b")


def test_no_process_and_no_folder_is_left_when_the_cluster_is_closed(local: Started, tmp_path: Path) -> None:
    pids = [begin(local, "a"), begin(local, "b", "y", gpu=1)]
    folders = [process._orders.root for process in local.cluster._machine._pool._gpus]  # type: ignore[attr-defined]
    assert all(folder.stat().st_mode & 0o777 == 0o700 for folder in folders)
    local.cluster.close()
    assert not any(map(is_alive, pids))
    assert not any(folder.exists() for folder in folders)


def test_what_one_task_prints_is_in_its_own_log_alone(machine: Started) -> None:
    begin(machine, "alder")
    begin(machine, "birch")
    assert end(machine, "alder") is end(machine, "birch") is Outcome.FINISHED
    for task, other in (("alder", "birch"), ("birch", "alder")):
        (log,) = machine.run_dir(task).glob("logs/*/stdout.log")
        assert log.read_text() == f"{task} is attached\n"
        assert not any(other in path.read_text() for path in machine.run_dir(task).rglob("*") if path.is_file())


def test_other_gpus_or_another_base_are_refused(machine: Started) -> None:
    begin(machine, "a")
    for wrong in ({"gpus": (1,)}, {"base": "n"}):
        with pytest.raises(ValueError, match="the GPUs and the base model of its executor 'x'"):
            machine.start("b", executor="x", **({"base": "m"} | wrong))
    with pytest.raises(ValueError, match="expected GPUs among the free ones"):
        machine.start("b", executor="y", base="m")


def test_a_controller_that_dies_leaves_no_task_unsaved(machine: Started) -> None:
    """SIGTERM, which its process gets too, ends all of them."""
    pid = begin(machine, "a")
    begin(machine, "b")
    os.kill(pid, signal.SIGTERM)
    for task in "ab":
        assert machine.until_ended(task).outcome is Outcome.INTERRUPTED
    gives_up_at = time.monotonic() + 60
    while is_alive(pid) and time.monotonic() < gives_up_at:
        machine.poll()
    assert not is_alive(pid)


def test_an_order_to_end_does_not_interrupt_what_is_attached_beside_others(local: Started) -> None:
    pid = begin(local, "a")
    folder = local.run_dir("b")
    (folder / "slow").touch()
    local.start("b", executor="x", base="m")
    wait_for((folder / "attaching").exists, "the second task", meanwhile=local.poll)
    os.kill(pid, signal.SIGTERM)
    time.sleep(0.2)
    (folder / "go").touch()
    for task in "ab":
        ended = local.until_ended(task)
        assert (ended.outcome, ended.reason) == (Outcome.INTERRUPTED, "stopped on request, with everything on disk")
