"""A queue on disk that a controller works on: what its mailbox asks takes effect once, and is answered."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_cluster import NODE, Clock, FakeCluster
from journals import event
from tiny import make_task

import alto
from alto.cluster import Controller, LiveQueue, QueueIntake
from alto.errors import QueueCommandError, SpecError, TaskInterruptedError, UnsupportedError
from alto.runs import Answer, Journal, QueueAction, QueueDir, QueueMailbox, read_events
from alto.scheduler import schedule_tasks
from alto.scheduler.queue import Queue, QueueSettings

SETTINGS = {"method": "lpt", "strategy": "single", "cluster": "local", "total_gpus": None, "quotas": {}}


def refuse_wide(task: alto.Task) -> None:
    if task.num_gpus > 2:
        raise UnsupportedError("too wide")


class Bench:
    """A queue of no tasks yet, its mailbox, and who works on it."""

    def __init__(self, folder: Path, *, trusts_commands: bool = False) -> None:
        self.folder = folder
        self.queue_dir = QueueDir.create(folder / "runs", [], [], SETTINGS)
        self.box = QueueMailbox(self.queue_dir.run)
        self.task = make_task(folder, name="t")
        self.clock = Clock()
        self.cluster = FakeCluster(self.clock, dict.fromkeys(["t", "t-2", "t-3"], 5.0), leaves_results=True)
        self._trusts_commands = trusts_commands

    @contextlib.contextmanager
    def working(self) -> Iterator[tuple[LiveQueue, Controller]]:
        with Journal(self.queue_dir.run.journal_file) as journal:
            if not journal.past:
                nodes = [{"name": "n", "gpus": [0, 1]}]
                journal.append(event("queue_started", method="lpt", devices="gpus", nodes=nodes, tasks=[]))
            queue = Queue((NODE,), QueueSettings(quotas={"guest": 1}), lambda p, _: schedule_tasks(p, method="lpt"))
            with Controller(self.cluster, queue, journal, clock=self.clock) as controller:
                intake = QueueIntake(
                    entry="none:none",
                    is_parallel=True,
                    check=refuse_wide,
                    estimate_s=lambda task: 5.0,
                    trusts_commands=self._trusts_commands,
                )
                live = LiveQueue(self.queue_dir, controller, journal, intake)
                live.begin(())
                yield live, controller

    def answer(self, command: str) -> Answer:
        found = self.box.wait_for_answer(command, 0)
        assert found is not None
        return found

    def kinds(self) -> list[str]:
        return [line["event"] for line in read_events(self.queue_dir.run.journal_file)]


def test_a_task_is_submitted_by_command_with_the_tenant_of_whoever_submits(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    claims = bench.task.replace(tenant="somebody", priority=9)
    with bench.working() as (live, controller):
        command = bench.box.submit(claims.to_dict(), tenant="guest", priority=2)
        controller.turn()
        assert bench.answer(command) == Answer(done=True, message="t was submitted.")
        live.finish()
        live.wait()
    (entry,) = bench.queue_dir.read()[0]
    assert (entry.tenant, entry.priority, entry.command, entry.duration_s) == ("guest", 2, command, 5.0)
    task = alto.load_task(bench.queue_dir.run_of("t").task_file)
    assert (task.tenant, task.priority) == ("guest", 2)
    assert bench.kinds().count("task_submitted") == 1
    assert bench.kinds()[-1] == "queue_completed"
    (launch,) = bench.cluster.launches
    assert (launch.entry, launch.num_ranks, launch.trust_remote_code) == ("none:none", 1, False)


@pytest.mark.parametrize(
    ("changes", "tenant", "why"),
    [
        ({"num_gpus": 3}, "", "too wide"),
        ({"num_gpus": 2}, "guest", "the quota of tenant 'guest'"),
        ({"learning_rat": 1.0}, "", "did you mean|Did you mean|learning_rate"),
        ({"trust_remote_code": True}, "", "found neither; start the queue with"),
    ],
)
def test_a_task_that_is_refused_leaves_nothing(changes: dict[str, Any], tenant: str, why: str, tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    with bench.working() as (_, controller):
        command = bench.box.submit(bench.task.to_dict() | changes, tenant=tenant)
        controller.turn()
        answer = bench.answer(command)
    assert not answer.done
    assert any(part in answer.message for part in why.split("|")), answer.message
    assert bench.queue_dir.read()[0] == []
    assert bench.kinds() == ["queue_started"]
    assert not bench.queue_dir.run_of("t").root.exists()


def test_code_of_a_model_is_run_where_whoever_started_the_queue_allows_it(tmp_path: Path) -> None:
    bench = Bench(tmp_path, trusts_commands=True)
    with bench.working() as (_, controller):
        bench.box.submit(bench.task.replace(trust_remote_code=True).to_dict())
        controller.turn()
    assert [launch.trust_remote_code for launch in bench.cluster.launches] == [True]


@pytest.mark.parametrize("lost", ["answer", "answer and journal"])
def test_a_command_whose_answer_was_lost_takes_effect_once(lost: str, tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    with bench.working() as (_, controller):
        command = bench.box.submit(bench.task.to_dict())
        file = bench.queue_dir.run.control / f"{command}.command.json"
        written = file.read_text("utf-8")
        controller.turn()
    file.write_text(written, encoding="utf-8")
    if lost == "answer and journal":  # the controller died before it could write the line
        journal = bench.queue_dir.run.journal_file
        journal.write_text(journal.read_text("utf-8").splitlines(keepends=True)[0], encoding="utf-8")
    bench.cluster.close()
    with bench.working() as (live, _):
        live.finish()
        live.wait()
    assert bench.answer(command) == Answer(done=True, message="t was submitted.")
    assert [entry.task for entry in bench.queue_dir.read()[0]] == ["t"]
    assert bench.kinds().count("task_submitted") == 1


def test_what_an_interrupted_submission_left_is_no_task(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.queue_dir.run_of("t").begin(bench.task)
    with bench.working() as (live, _):
        assert live.submit(bench.task, tenant="", priority=0) == "t"
        assert live.submit(bench.task, tenant="", priority=0) == "t-2"
        live.finish()
        live.wait()
    assert [launch.task for launch in bench.cluster.launches] == ["t", "t-2"]


def test_a_task_is_cancelled_by_command_and_stays_so(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    with bench.working() as (live, controller):
        for _ in range(3):
            live.submit(bench.task, tenant="", priority=0)
        command = bench.box.ask(QueueAction.CANCEL, "t-3")
        again = bench.box.ask(QueueAction.CANCEL, "t-3")
        controller.turn()
        assert bench.answer(command).done
        assert bench.answer(again).done
        unknown = bench.box.ask(QueueAction.CANCEL, "x")
        controller.turn()
        assert bench.answer(unknown) == Answer(
            done=False,
            message="expected a task of this queue that waits or runs, found 'x', which is none of its tasks",
        )
    bench.cluster.close()
    with bench.working() as (live, _):
        live.finish()
        live.wait()
    assert {launch.task for launch in bench.cluster.launches} == {"t", "t-2"}
    assert bench.kinds().count("task_cancelled") == 1
    assert [entry.is_cancelled for entry in bench.queue_dir.read()[0]] == [False, False, True]


def test_a_queue_waits_for_tasks_until_it_is_told_to_finish(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    asked: list[str] = []

    def ask(cluster: FakeCluster) -> tuple[()]:
        """Long after the only task has ended: another one, and then the end."""
        if cluster.clock() > 150.0 and not asked:
            asked.append(bench.box.submit(bench.task.to_dict()))
            asked.append(bench.box.ask(QueueAction.FINISH))
        return ()

    bench.cluster.script = ask
    with bench.working() as (live, controller):
        live.submit(bench.task, tenant="", priority=0)
        live.wait()
        late = bench.box.submit(bench.task.to_dict())
        controller.turn()
        assert "one that has completed" in bench.answer(late).message
        with pytest.raises(QueueCommandError, match="one that has completed"):
            live.submit(bench.task, tenant="", priority=0)
    assert [bench.answer(command).done for command in asked] == [True, True]
    assert [launch.task for launch in bench.cluster.launches] == ["t", "t-2"]


def test_a_queue_is_drained_by_command(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    with bench.working() as (live, _):
        live.submit(bench.task, tenant="", priority=0)
        command = bench.box.ask(QueueAction.DRAIN)
        with pytest.raises(TaskInterruptedError, match="1 of 1 tasks still to finish"):
            live.wait()
        assert bench.answer(command).done
    assert bench.kinds()[-1] == "queue_interrupted"


def test_a_file_that_is_no_command_is_answered_and_disturbs_nobody(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.queue_dir.run.control.mkdir()
    facts = ["[]", "{", json.dumps({"action": "submit", "values": 7}), json.dumps({"action": "fly"})]
    for number, text in enumerate(facts):
        (bench.queue_dir.run.control / f"{number}.command.json").write_text(text, encoding="utf-8")
    with bench.working() as (_, controller):
        controller.turn()
    for number in range(len(facts)):
        answer = bench.answer(str(number))
        assert not answer.done
        assert "as `alto submit` or `alto cancel` writes it" in answer.message


def test_a_name_that_cannot_be_taken_in_is_no_end_of_the_queue(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    with bench.working() as (live, controller):
        with pytest.raises(SpecError):
            live.submit(bench.task.replace(num_gpus=2), tenant="guest", priority=0)
        controller.turn()
        assert live.submit(bench.task, tenant="guest", priority=0) == "t"
