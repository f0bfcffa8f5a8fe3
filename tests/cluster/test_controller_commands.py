"""What is asked of a controller while tasks run: tasks that come and are cancelled, commands to jobs, its events."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from controller_bench import Bench, new_run
from fake_cluster import FakeCluster

from alto.cluster import ClusterEvent, Controller, TaskTicket
from alto.errors import QueueCommandError, SpecError, TaskInterruptedError
from alto.runs import Action, Answer, Mailbox, TaskStage, read_events, read_queue_history


@pytest.fixture
def live(tmp_path: Path) -> Iterator[tuple[Bench, Controller]]:
    """Two GPUs, on which tasks a and b run; c waits."""
    bench = Bench(tmp_path, {"a": 50.0, "b": 50.0, "c": 50.0})
    with bench.controller() as controller:
        controller.turn()
        assert set(bench.cluster.running) == {"a", "b"}
        yield bench, controller


def test_a_task_is_submitted_while_others_run(live: tuple[Bench, Controller]) -> None:
    bench, controller = live
    assert controller.submit(new_run(bench, "d", tenant="t", priority=7)) == "d"
    assert controller.wait("d")
    status = controller.status().tasks["d"]
    assert (status.tenant, status.priority, status.has_ended, status.share_done) == ("t", 7, True, 1.0)
    (event,) = bench.events("task_submitted")
    assert (event["task"], event["tenant"], event["priority"], event["duration_s"]) == ("d", "t", 7, 5.0)
    assert controller.status().open_tasks
    history = read_queue_history(bench.queue_dir.root)
    assert (history.tasks["d"].state, history.tasks["d"].demand.tenant) == (TaskStage.FINISHED, "t")
    assert bench.starts["d"] == 1


@pytest.mark.parametrize(
    ("run", "match"),
    [
        ({"name": "a"}, "expected a name that is new to the queue"),
        ({"name": "wide", "num_gpus": 3}, "num_gpus from 1 to 2"),
    ],
)
def test_a_task_that_cannot_be_taken_in_changes_nothing(
    live: tuple[Bench, Controller], run: dict[str, Any], match: str
) -> None:
    bench, controller = live
    with pytest.raises(SpecError, match=match):
        controller.submit(TaskTicket(task=run.pop("name"), run_dir="none", entry="none:none", **run))
    assert bench.events("task_submitted") == []
    assert set(controller.status().tasks) == {"a", "b", "c"}
    assert controller.wait()


def test_a_task_that_waits_is_cancelled_at_once(live: tuple[Bench, Controller]) -> None:
    bench, controller = live
    controller.cancel("c")
    assert controller.status().tasks["c"].has_ended
    controller.wait()
    assert bench.starts == {"a": 1, "b": 1}
    assert read_queue_history(bench.queue_dir.root).tasks["c"].state is TaskStage.CANCELLED


def test_a_task_that_runs_is_cancelled_saves_and_gives_its_gpu_to_who_waits(live: tuple[Bench, Controller]) -> None:
    bench, controller = live
    controller.cancel("a")
    controller.cancel("a")  # again, before it has ended
    assert not controller.status().tasks["a"].has_ended
    assert controller.wait("a")
    controller.turn()
    assert set(bench.cluster.running) == {"b", "c"}
    controller.wait()
    assert len(bench.events("task_cancelled")) == 1
    assert bench.starts == {"a": 1, "b": 1, "c": 1}
    tasks = read_queue_history(bench.queue_dir.root).tasks
    assert (tasks["a"].state, tasks["a"].attempts[0].outcome) == (TaskStage.CANCELLED, "interrupted")


def test_only_a_task_that_is_there_is_cancelled(live: tuple[Bench, Controller]) -> None:
    _, controller = live
    with pytest.raises(QueueCommandError, match="'x', which is not in the queue"):
        controller.cancel("x")
    controller.wait()
    with pytest.raises(QueueCommandError, match="'a', which is finished"):
        controller.cancel("a")


def test_drained_executors_save_and_nothing_is_started_any_more(live: tuple[Bench, Controller]) -> None:
    bench, controller = live
    controller.begin_drain()
    for command in (lambda: controller.cancel("c"), lambda: controller.submit(new_run(bench, "d"))):
        with pytest.raises(QueueCommandError, match="being drained"):
            command()
    controller.drain()
    assert not bench.cluster.running
    assert bench.starts == {"a": 1, "b": 1}
    assert bench.events("queue_interrupted")[0]["open"] == ["a", "b", "c"]
    with pytest.raises(TaskInterruptedError, match="3 of 3"):
        controller.wait()
    controller.drain()
    assert len(bench.events("queue_interrupted")) == 1


def test_a_job_command_reaches_the_executor_and_its_answer_comes_back(live: tuple[Bench, Controller]) -> None:
    bench, controller = live
    seen = []

    def answer(cluster: FakeCluster) -> Iterable[ClusterEvent]:
        mailbox = Mailbox(bench.queue_dir.run_of("a"))
        for command in mailbox.pending():
            seen.append((command.action, command.job, dict(command.changes)))
            mailbox.answer(command.id, Answer(done=True, message="cloned"))
        return ()

    bench.cluster.script = answer
    found = controller.job_command("a", Action.CLONE, "job-000", changes={"r": 4})
    assert found == Answer(done=True, message="cloned")
    assert seen == [(Action.CLONE, "job-000", {"r": 4})]
    with pytest.raises(QueueCommandError, match="not in the queue"):
        controller.job_command("x", Action.STOP, "job-000")


def test_events_are_followed_from_any_number_on_and_end_with_the_controller(live: tuple[Bench, Controller]) -> None:
    bench, controller = live
    first = [entry.seq for entry in controller.events(follow=False)]
    assert first == list(range(len(first)))
    followed = []
    for entry in controller.events(since=len(first)):
        followed.append(entry)
        if entry.name == "executor_ended":
            break  # left in the middle
    followed += list(controller.events(since=followed[-1].seq + 1, follow=False))
    controller.wait()
    controller.close()
    followed += list(controller.events(since=followed[-1].seq + 1))
    lines = read_events(bench.queue_dir.run.journal_file)
    assert [entry.to_dict() for entry in followed] == lines[len(first) :]
