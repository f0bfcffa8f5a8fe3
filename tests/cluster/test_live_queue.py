"""A queue on disk with a controller: each command in its mailbox takes effect once, and is answered."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from fake_cluster import NODE, Clock, FakeCluster
from journals import event
from tiny import make_task

import alto
from alto.cluster import Controller, LiveQueue, QueueIntake, answer_past_ends, past_ends
from alto.errors import DiskFullError, QueueCommandError, SpecError, TaskInterruptedError, UnsupportedError
from alto.records import Node, TaskEstimate
from alto.runs import CommandAnswer, Journal, QueueAction, QueueContent, QueueDir, QueueEntry, QueueMailbox, read_events
from alto.runs.events import Event, TaskSubmitted
from alto.scheduler import schedule_tasks
from alto.scheduler.queue import Queue, QueueSettings

SETTINGS = {"method": "lpt", "strategy": "single", "cluster": "local", "total_gpus": None, "quotas": {}}


def refuse_wide(task: alto.Task, nodes: Sequence[Node]) -> None:
    if task.num_gpus > 2:
        raise UnsupportedError("too wide")


class Bench:
    """A queue without tasks, its mailbox, and the objects that work on it."""

    def __init__(self, folder: Path, *, trust_remote_code: bool = False) -> None:
        self.folder = folder
        self.queue_dir = QueueDir.create(folder / "runs", [], [], SETTINGS)
        self.box = QueueMailbox(self.queue_dir.run)
        self.task = make_task(folder, name="t")
        self.clock = Clock()
        self.cluster = FakeCluster(self.clock, dict.fromkeys(["t", "t-2", "t-3"], 5.0), leaves_results=True)
        self.nodes = (NODE,)
        self.estimate: Callable[[alto.Task], TaskEstimate] = lambda task: TaskEstimate(duration_s=5.0)
        self._trust_remote_code = trust_remote_code

    @contextlib.contextmanager
    def working(self) -> Iterator[tuple[LiveQueue, Controller]]:
        with Journal(self.queue_dir.run.journal_file) as journal:
            if not journal.past:
                nodes = [{"name": "n", "gpus": [0, 1]}]
                journal.append(event("queue_started", method="lpt", devices="gpus", nodes=nodes, tasks=[]))
            queue = Queue(self.nodes, QueueSettings(quotas={"guest": 1}), lambda p, _: schedule_tasks(p, method="lpt"))
            with Controller(self.cluster, queue, journal, clock=self.clock) as controller:
                intake = QueueIntake(
                    host="none:none",
                    is_parallel=True,
                    check=refuse_wide,
                    estimate=lambda task: self.estimate(task),
                    base_of=lambda task: task.model,
                    trust_remote_code=self._trust_remote_code,
                )
                live = LiveQueue(self.queue_dir, journal, intake)
                live.begin(controller, ())
                yield live, controller

    def answer(self, command: str) -> CommandAnswer:
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
        assert bench.answer(command) == CommandAnswer(done=True, message="t was submitted.")
        live.finish()
        live.wait()
    (entry,) = bench.queue_dir.read()[0]
    assert (entry.tenant, entry.priority, entry.command, entry.duration_s) == ("guest", 2, command, 5.0)
    task = alto.load_task(bench.queue_dir.run_of("t").task_file)
    assert (task.tenant, task.priority) == ("guest", 2)
    assert bench.kinds().count("task_submitted") == 1
    assert bench.kinds()[-1] == "queue_completed"
    (launch,) = bench.cluster.launches
    assert (launch.host, launch.num_ranks, launch.trust_remote_code) == ("none:none", 1, False)


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
    bench = Bench(tmp_path, trust_remote_code=True)
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
    assert bench.answer(command) == CommandAnswer(done=True, message="t was submitted.")
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
        assert bench.answer(unknown) == CommandAnswer(
            done=False,
            message="expected a task of this queue that waits or runs, found 'x', which is not in the queue",
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
    commands: list[str] = []

    def ask(cluster: FakeCluster) -> tuple[()]:
        """Submit another task long after the only one has ended, and then finish."""
        if cluster.clock() > 150.0 and not commands:
            commands.append(bench.box.submit(bench.task.to_dict()))
            commands.append(bench.box.ask(QueueAction.FINISH))
        return ()

    bench.cluster.script = ask
    with bench.working() as (live, controller):
        live.submit(bench.task, tenant="", priority=0)
        live.wait()
        late = bench.box.submit(bench.task.to_dict())
        controller.turn()
        assert "has completed and no longer accepts tasks" in bench.answer(late).message
        with pytest.raises(QueueCommandError, match="has completed and no longer accepts tasks"):
            live.submit(bench.task, tenant="", priority=0)
    assert [bench.answer(command).done for command in commands] == [True, True]
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


def test_a_file_that_is_no_command_is_answered_and_changes_nothing(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.queue_dir.run.control.mkdir(exist_ok=True)
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


@pytest.mark.parametrize(
    "error", [FileNotFoundError(2, "No such file", "model/gone.safetensors"), RuntimeError("~who")]
)
def test_a_task_whose_files_cannot_be_looked_at_is_refused_and_the_queue_goes_on(
    error: Exception, tmp_path: Path
) -> None:
    bench = Bench(tmp_path)

    def estimate(task: alto.Task) -> TaskEstimate:
        raise error

    with bench.working() as (live, controller):
        live.submit(bench.task, tenant="", priority=0)
        bench.estimate = estimate
        command = bench.box.submit(bench.task.to_dict())
        controller.turn()
        answer = bench.answer(command)
        assert not answer.done
        assert f"found {type(error).__name__}: {error}; correct it" in answer.message
        live.finish()
        live.wait()
    assert [entry.task for entry in bench.queue_dir.read()[0]] == ["t"]


def test_a_task_that_is_cancelled_without_a_controller_is_not_begun(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    with bench.working() as (live, _):
        live.submit(bench.task, tenant="", priority=0)
    num_launches = len(bench.cluster.launches)
    command = bench.box.ask(QueueAction.CANCEL, "t")
    with bench.working() as (live, _):
        live.finish()
        live.wait()
    assert bench.answer(command).done
    assert len(bench.cluster.launches) == num_launches
    assert bench.kinds().count("task_cancelled") == 1


def test_a_task_that_cannot_run_here_any_more_can_be_cancelled_so_that_the_others_go_on(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    with bench.working() as (live, _):
        live.submit(bench.task.replace(num_gpus=2), tenant="", priority=0)
        live.submit(bench.task, tenant="", priority=0)
    bench.nodes = (Node(name="n", gpus=(0,)),)
    with pytest.raises(SpecError, match="task 't': expected num_gpus from 1 to 1"), bench.working():
        pass
    bench.box.ask(QueueAction.CANCEL, "t")
    with bench.working() as (live, _):
        live.finish()
        live.wait()
    assert bench.cluster.launches[-1].task == "t-2"


def test_a_queue_that_was_told_to_finish_takes_no_more_tasks(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    with bench.working() as (live, controller):
        live.submit(bench.task, tenant="", priority=0)
        bench.box.ask(QueueAction.FINISH)
        late = bench.box.submit(bench.task.to_dict())
        controller.turn()
        assert "asked to stop after its last task" in bench.answer(late).message
        with pytest.raises(QueueCommandError, match="asked to stop after its last task"):
            live.submit(bench.task, tenant="", priority=0)
        live.wait()
    assert [entry.task for entry in bench.queue_dir.read()[0]] == ["t"]


def test_a_queue_that_has_completed_is_not_interrupted(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    with bench.working() as (live, controller):
        live.finish()
        live.wait()
        late = bench.box.ask(QueueAction.DRAIN)
        controller.turn()
        assert bench.answer(late).message == "The queue has completed."
        live.wait()
    assert bench.kinds()[-1] == "queue_completed"


def test_who_wanted_an_earlier_process_to_end_does_not_end_the_next(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    commands = [bench.box.ask(QueueAction.DRAIN), bench.box.ask(QueueAction.FINISH)]
    submitted = bench.box.submit(bench.task.to_dict())
    ends = past_ends(bench.queue_dir)
    late = bench.box.ask(QueueAction.DRAIN)
    answer_past_ends(bench.queue_dir, ends)
    assert ends == commands
    assert all(bench.answer(command).message == "The queue had ended already." for command in commands)
    assert [command.id for command in bench.box.pending()] == [submitted, late]


def test_a_disk_without_room_for_a_new_task_is_no_end_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path)

    def add(queue: QueueDir, entry: QueueEntry, task: alto.Task, *, to: QueueContent) -> None:
        raise DiskFullError("expected to write task.yaml, found: No space left on device")

    with bench.working() as (live, controller):
        live.submit(bench.task, tenant="", priority=0)
        with monkeypatch.context() as patch:
            patch.setattr(QueueDir, "add", add)
            command = bench.box.submit(bench.task.to_dict())
            controller.turn()
        assert "No space left" in bench.answer(command).message
        live.finish()
        live.wait()
    assert bench.kinds()[-1] == "queue_completed"


def test_a_command_of_which_the_journal_could_not_be_written_waits_for_who_resumes_the_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path)
    append = Journal.append

    def full(journal: Journal, event: Event) -> Any:
        if isinstance(event, TaskSubmitted):
            raise DiskFullError("expected to write journal.jsonl, found: No space left on device")
        return append(journal, event)

    with bench.working() as (_, controller), monkeypatch.context() as patch:
        patch.setattr(Journal, "append", full)
        command = bench.box.submit(bench.task.to_dict())
        with pytest.raises(DiskFullError):
            controller.turn()
        assert [found.id for found in bench.box.pending()] == [command]
    with bench.working() as (live, _):
        live.finish()
        live.wait()
    assert bench.answer(command).message == "t was submitted."
    assert [launch.task for launch in bench.cluster.launches] == ["t"]
