"""Many tasks through the engine and the command line: folders, results, names, and refusals before anything starts."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import ANY

import pytest
import yaml
from journals import entries
from queues import one_by_one, tiny_tasks
from tiny import make_task
from typer.testing import CliRunner

import alto
from alto.cli import app
from alto.cluster import AttemptEnded, Cluster, ClusterEvent, EntryWritten, Launch, Outcome, dispatcher
from alto.early_exit import audit
from alto.engine.estimates import UNKNOWN_DURATION_S, Measurement, base_key, estimate_of
from alto.engine.queue_setup import tasks_by_name
from alto.engine.queues import _saving
from alto.engine.work import PLAN_ANEW, PLAN_FILE
from alto.errors import (
    DataFileNotFoundError,
    ProfileError,
    RunBusyError,
    RunError,
    SpecError,
    TasksFailedError,
    UnsupportedError,
)
from alto.records import Gpu, MemoryProfile, Node, Sharing, TaskEstimate, TaskPlan, Throughput
from alto.runs import JournalEntry, QueueAction, QueueDir, QueueMailbox, TaskStage, read_events, read_queue_history
from alto.runs.events import MeasuringBegun, TaskMeasured, TaskRelayed

Ran = tuple[QueueDir, list[alto.TaskResult], list[Any]]


@pytest.fixture(scope="module")
def ran(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """A queue of three tasks, two with the same name, on two slots."""
    folder = tmp_path_factory.mktemp("ran")
    seen: list[Any] = []
    tasks = tiny_tasks(folder, model, ["a", "b", "a"])
    engine = alto.Engine(total_gpus=2, output_dir=folder / "runs", observers=[seen.append])
    results = engine.batched_execution(tasks, one_by_one(tasks, ["a", "b", "a-2"], num_gpus=2))
    (root,) = (folder / "runs").iterdir()
    return QueueDir(root), results, seen


def test_results_are_in_the_order_of_the_tasks_and_their_runs_in_the_queues_folder(ran: Ran) -> None:
    queue, results, _ = ran
    assert [Path(result.run_dir).name for result in results] == ["a", "b", "a-2"]
    assert {path.name for path in queue.root.iterdir()} == {
        "queue.yaml",
        "control",
        "journal.jsonl",
        "tasks",
        "report.html",
        "run.lock",
    }
    for result in results:
        assert (Path(result.adapter_dir) / "adapter_model.safetensors").is_file()
        assert (Path(result.run_dir) / "report.html").is_file()
        assert alto.load_task(Path(result.run_dir) / "task.yaml").max_slots is not None


def test_the_journal_tells_plans_and_executors(ran: Ran) -> None:
    queue, _, seen = ran
    events = read_events(queue.run.journal_file)
    kinds = [event["event"] for event in events]
    assert (kinds[0], kinds[1], kinds[-1]) == ("queue_started", "planned", "queue_completed")
    assert kinds.count("executor_started") == kinds.count("executor_ended") == 3
    assert [entry.to_dict() for entry in seen if not isinstance(entry.event, TaskRelayed)] == events
    assert {entry.event.task for entry in seen if isinstance(entry.event, TaskRelayed)} == {"a", "b", "a-2"}
    history = read_queue_history(queue.root)
    assert all(task.state is TaskStage.FINISHED for task in history.tasks.values())
    assert {gpu.index for task in history.tasks.values() for gpu in task.attempts[0].gpus} == {0, 1}


def test_a_finished_queue_gives_its_results_again(ran: Ran) -> None:
    queue, results, _ = ran
    engine = alto.Engine(output_dir=queue.root.parent)
    before, journal = engine._setup, queue.run.journal_file.read_bytes()
    again = engine.resume_queue(queue.root)
    assert engine._setup == before, "the queue's own settings are not the engine's"
    assert before.total_gpus is None
    assert [result.best_validation_loss for result in again] == [result.best_validation_loss for result in results]
    assert queue.run.journal_file.read_bytes() == journal
    assert (
        "3 of 3 tasks done on 2 CPU slots: finished after"
        in CliRunner().invoke(app, ["resume", str(queue.root)]).stdout
    )
    assert queue.run.journal_file.read_bytes() == journal


@pytest.mark.parametrize("command", ["show", "report", "resume"])
def test_commands_know_a_queue_by_its_folder(ran: Ran, command: str) -> None:
    queue, _, _ = ran
    done = CliRunner().invoke(app, [command, str(queue.root)])
    assert done.exit_code == 0, done.output
    assert "3 of 3 tasks done on 2 CPU slots" in done.stdout
    assert "a-2" in done.stdout
    assert len(re.findall(r"finished .* 100 % +\d+\.\d+ ", done.stdout)) == 3  # progress and loss of every task


def test_a_queue_whose_journal_is_torn_goes_on(ran: Ran, tmp_path: Path) -> None:
    """The disk was full when an executor ended: its line is torn, and its task has its result without an export."""
    root = shutil.copytree(ran[0].root, tmp_path / "queue")
    journal = root / "journal.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    ends = [number for number, line in enumerate(lines) if b'"executor_ended"' in line]
    journal.write_bytes(b"".join(lines[: ends[-2]]) + lines[ends[-2]][:25])
    shutil.rmtree(root / "tasks" / "a-2" / "best")
    for command in ("report", "resume", "report"):
        done = CliRunner().invoke(app, [command, str(root)])
        assert done.exit_code == 0, done.output
    assert "3 of 3 tasks done" in done.stdout
    assert [event["seq"] for event in read_events(journal)] == list(range(len(journal.read_bytes().splitlines())))
    history = read_queue_history(root)
    assert {task.state for task in history.tasks.values()} == {TaskStage.FINISHED}
    assert (root / "tasks" / "a-2" / "best" / "adapter_model.safetensors").is_file()


def test_a_queue_with_a_damaged_line_says_what_it_lost_and_goes_on(ran: Ran, tmp_path: Path) -> None:
    root = shutil.copytree(ran[0].root, tmp_path / "queue")
    journal = root / "journal.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join([*lines[:2], b"\x00\x00\n", *lines[3:]]))
    refused = CliRunner().invoke(app, ["report", str(root)])
    assert refused.exit_code == 1
    assert "Delete this line" in str(refused.exception)
    done = CliRunner().invoke(app, ["resume", str(root)])
    assert done.exit_code == 0, done.output
    history = read_queue_history(root)
    assert {task.state for task in history.tasks.values()} == {TaskStage.FINISHED}
    assert history.notices[-1].startswith("The journal of the queue was damaged: its last")


@pytest.mark.parametrize("is_damaged", [True, False])
def test_a_queue_that_has_lost_its_journal_keeps_its_results_and_says_so(
    is_damaged: bool, ran: Ran, tmp_path: Path
) -> None:
    root = shutil.copytree(ran[0].root, tmp_path / "queue")
    journal = root / "journal.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join([b"\x00\n", *lines[1:]]) if is_damaged else b"")
    done = CliRunner().invoke(app, ["resume", str(root)])
    assert done.exit_code == 0, done.output
    history = read_queue_history(root)
    assert {task.state for task in history.tasks.values()} == {TaskStage.FINISHED}
    assert [notice.startswith("The journal of the queue was damaged") for notice in history.notices] == [
        True
    ] * is_damaged


@pytest.mark.parametrize(
    "change",
    [
        lambda facts: facts["settings"].pop("strategy"),
        lambda facts: facts["settings"].update(strategy="none"),
        lambda facts: facts["settings"].update(method="none"),
        lambda facts: facts["settings"].update(cluster=7),
        lambda facts: facts["settings"].update(total_gpus=0),
        lambda facts: facts["settings"].update(quotas={"a": "many"}),
        lambda facts: facts["settings"].update(quotas=[1]),
        lambda facts: facts["tasks"][0].update(duration_s=0),
    ],
)
def test_a_queue_whose_file_is_damaged_is_refused(change: Callable[[Any], object], ran: Ran, tmp_path: Path) -> None:
    root = shutil.copytree(ran[0].root, tmp_path / "queue")
    facts = yaml.safe_load((root / "queue.yaml").read_text("utf-8"))
    change(facts)
    (root / "queue.yaml").write_text(yaml.safe_dump(facts), encoding="utf-8")
    with pytest.raises(RunError, match=r"queue\.yaml"):
        alto.Engine().resume_queue(root)


def test_the_report_of_a_queue_is_left_to_who_holds_its_lock(ran: Ran, tmp_path: Path) -> None:
    root = shutil.copytree(ran[0].root, tmp_path / "queue")
    journal = root / "journal.jsonl"
    journal.write_bytes(b"".join(journal.read_bytes().splitlines(keepends=True)[:-1]))  # it is not finished
    (root / "report.html").write_text("of another process", encoding="utf-8")

    def remove_lock() -> bool:
        (root / "run.lock").unlink(missing_ok=True)
        return False

    with pytest.raises(RunBusyError, match="found it removed or replaced"):
        alto.Engine(is_interrupted=remove_lock).resume_queue(root)
    assert (root / "report.html").read_text("utf-8") == "of another process"


def test_show_as_json(ran: Ran) -> None:
    queue, results, _ = ran
    facts = json.loads(CliRunner().invoke(app, ["show", str(queue.root), "--json"]).stdout)
    assert facts["state"] == "finished"
    assert [task["best_validation_loss"] for task in facts["tasks"]] == [r.best_validation_loss for r in results]


def test_the_report_names_every_task_and_loads_nothing(ran: Ran) -> None:
    page = (ran[0].root / "report.html").read_text(encoding="utf-8")
    assert all(f'href="tasks/{name}/report.html"' in page for name in ("a", "b", "a-2"))
    assert "default-src 'none'" in page


def test_a_task_that_fails_by_its_own_fault_leaves_the_others_their_results(model: Path, tmp_path: Path) -> None:
    good, bad = tiny_tasks(tmp_path, model, ["good", "bad"])
    bad = bad.replace(search_space={"lr": [1e30]}, early_exit=False)
    engine = alto.Engine(output_dir=tmp_path / "runs")
    with pytest.raises(TasksFailedError, match=r"1 that were given up \(bad: task 'bad': expected at") as caught:
        engine.batched_execution([good, bad], one_by_one([good, bad], ["good", "bad"]))
    assert [result.task for result in caught.value.results] == ["good"]
    (root,) = (tmp_path / "runs").iterdir()
    stages = {name: task.state for name, task in read_queue_history(root).tasks.items()}
    assert stages == {"good": TaskStage.FINISHED, "bad": TaskStage.FAILED}


def test_more_gpus_than_there_are_are_refused_before_anything_starts(tmp_path: Path) -> None:
    task = make_task(tmp_path, num_gpus=3)
    engine = alto.Engine(total_gpus=2, output_dir=tmp_path / "runs")
    with pytest.raises(SpecError, match="num_gpus from 1 to 2"):
        engine.schedule([task])
    with pytest.raises(SpecError, match="num_gpus from 1 to 2"):
        engine.batched_execution([task], one_by_one([task], ["tiny"]))
    assert not (tmp_path / "runs").exists()


def test_a_wide_task_with_one_job_left_gives_a_slot_to_who_waits_for_it(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Restarting on fewer slots costs a second, however busy the machine is.
    monkeypatch.setattr(dispatcher.RunningAttempt, "start_s", property(lambda _: 1.0, lambda *_: None))
    # After the rung the job needs some seconds, far more than that.
    changes = {"num_train_epochs": 600, "early_exit": {"rungs": [[0.01, 0.5]]}, "checkpoint_interval_s": 60}
    # A task whose limits are all set is not measured, and has no pace.
    open_limits = {"max_slots": None, "max_tokens_per_step": None, "max_tokens_per_pass": None}
    (wide,) = tiny_tasks(tmp_path, model, ["wide"], num_gpus=2, **changes, **open_limits)
    (next_one,) = tiny_tasks(tmp_path, model, ["next"])
    engine = alto.Engine(total_gpus=2, output_dir=tmp_path / "runs")
    schedule = engine.schedule([wide, next_one], method="fifo")  # measures them, which gives the wide one a pace
    result, _ = engine.batched_execution([wide, next_one], schedule)
    (root,) = (tmp_path / "runs").iterdir()
    history = read_queue_history(root)
    before, after = history.tasks["wide"].attempts
    (beside,) = history.tasks["next"].attempts
    assert (len(before.gpus), len(after.gpus), len(beside.gpus)) == (2, 1, 1)
    assert before.end is not None
    assert after.end is not None
    assert before.end <= beside.start < after.end
    events = read_events(Path(result.run_dir) / "journal.jsonl")
    assert [event["num_ranks"] for event in events if event["event"] in ("task_started", "task_resumed")] == [2, 1]
    assert audit(entries(events)) == ()
    ranks = [event["ranks"] for event in events if event["event"] == "job_admitted"]
    assert sorted(ranks) == [[0], [1]]


def test_the_single_strategy_refuses_a_task_on_several_real_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("alto.cluster.local.LocalCluster.has_gpus", True)
    engine = alto.Engine(strategy="single", total_gpus=2, output_dir=tmp_path / "runs")
    with pytest.raises(UnsupportedError, match="expected 1 under the strategy 'single', found 2 for 'tiny'"):
        engine.schedule([make_task(tmp_path, num_gpus=2)])


class Measuring:
    """A cluster of two nodes whose executors claim to take ten seconds per GPU, and end at once."""

    nodes = (Node(name="a", gpus=(0,)), Node(name="b", gpus=(0, 1)))

    def __init__(self, *, has_gpus: bool = True, fails: str = "", says: MeasuringBegun | None = None) -> None:
        self._says = says
        self.has_gpus = has_gpus
        self.launches: list[Launch] = []
        self.most_at_once = 0
        self._running: list[Launch] = []
        self._fails = fails

    def start(self, launch: Launch) -> None:
        self.launches.append(launch)
        self._running.append(launch)
        self.most_at_once = max(self.most_at_once, len(self._running))

    def poll(self, timeout_s: float) -> list[ClusterEvent]:
        time.sleep(0.01)  # so that others are submitted before this has ended
        ended, self._running = self._running, []
        for launch in ended:
            plan = plan_of(10.0 * len(launch.gpus))
            (Path(launch.run_dir) / PLAN_FILE).write_text(json.dumps(asdict(plan)), encoding="utf-8")
        begun = [JournalEntry(seq=0, time=1.0, event=self._says)] if self._says is not None else []
        events = [EntryWritten(task=launch.task, attempt=1, entry=entry) for launch in ended for entry in begun]
        return [*events, *(self._end(launch) for launch in ended)]

    def _end(self, launch: Launch) -> AttemptEnded:
        is_failed = launch.task == self._fails
        outcome = Outcome.LOST if is_failed else Outcome.FINISHED
        return AttemptEnded(task=launch.task, attempt=1, outcome=outcome, reason="was killed" * is_failed)

    def stop(self, task: str) -> None:
        pass

    def close(self) -> None:
        pass


def plan_of(duration_s: float) -> TaskPlan:
    memory = MemoryProfile(
        fixed_bytes=1e6,
        bytes_per_token=10.0,
        capacity_bytes=10**9,
        margin=0.5,
        error_median=0.0,
        error_worst=0.0,
        points=(),
    )
    return TaskPlan(
        task="t",
        model="m",
        device="cpu",
        num_jobs=3,
        num_parameters=(1, 2),
        row_tokens=(5.0, 9),
        slot_bytes=100,
        max_slots=8,
        max_tokens_per_step=1000,
        max_tokens_per_pass=500,
        gradient_checkpointing=False,
        peak_bytes=10**7,
        packings=(),
        memory=memory,
        throughput=Throughput(step_s=0.1, job_s=0.0, token_s=0.0, eval_token_s=0.0, points=()),
        duration_s=2 * duration_s,
        expected_duration_s=duration_s,
        expected_step_s=duration_s / 2,
        modules="all",
        is_cached=False,
        profile_s=1.0,
    )


def test_what_is_measured_says_how_a_task_can_share(tmp_path: Path) -> None:
    task = make_task(tmp_path)
    sharing = estimate_of(plan_of(10.0), task).sharing
    assert sharing == Sharing(
        base=f"{base_key(task)} all False",
        step_s=5.0,
        num_slots=3,
        slot_bytes=100,
        pass_bytes=1_005_000,
        capacity_bytes=5 * 10**8,
    )
    assert estimate_of(plan_of(10.0), task.replace(num_gpus=2)).sharing is None
    assert estimate_of(plan_of(10.0), task.replace(trust_remote_code=True)).sharing is None


def measurement(cluster: Measuring, shown: list[Any], *, is_interrupted: bool = False) -> Measurement:
    return Measurement(
        cluster=cast(Cluster, cluster),
        is_parallel=True,
        refresh=True,
        show=lambda event: shown.append(
            (event.task, event.duration_s) if isinstance(event, TaskMeasured) else event.task
        ),
        is_interrupted=lambda: is_interrupted,
    )


@pytest.mark.parametrize("has_gpus", [True, False])
def test_tasks_are_measured_side_by_side_on_gpus_and_each_on_one_node(has_gpus: bool, tmp_path: Path) -> None:
    tasks = [make_task(tmp_path, name="wide", num_gpus=2), make_task(tmp_path, name="small")]
    cluster, shown = Measuring(has_gpus=has_gpus), list[Any]()
    assert measurement(cluster, shown).estimates(tasks) == [
        TaskEstimate(duration_s=20.0),
        TaskEstimate(duration_s=10.0, sharing=ANY),
    ]
    assert shown == [("wide", 20.0), ("small", 10.0)], "executors that report no measurement have measured nothing"
    wide, small = cluster.launches
    assert (wide.gpus, wide.num_ranks, wide.host) == ((Gpu("b", 0), Gpu("b", 1)), 2, PLAN_ANEW)
    assert (len(small.gpus), small.num_ranks) == (1, 1)
    if not has_gpus:
        assert cluster.most_at_once == 1


def test_a_task_that_cannot_be_measured_ends_it_and_is_tried_once(tmp_path: Path) -> None:
    tasks = [make_task(tmp_path, name="good"), make_task(tmp_path, name="bad")]
    cluster = Measuring(fails="1")
    with pytest.raises(ProfileError, match="task 'bad': expected to measure its time and memory, found was killed"):
        measurement(cluster, []).estimates(tasks)
    assert [launch.task for launch in cluster.launches] == ["0", "1"]


def test_measuring_is_interrupted(tmp_path: Path) -> None:
    cluster = Measuring()
    cluster.poll = lambda timeout_s: time.sleep(0.01) or []  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        measurement(cluster, [], is_interrupted=True).estimates([make_task(tmp_path)])


def test_more_gpus_than_the_tenants_quota_are_refused_before_anything_starts(tmp_path: Path) -> None:
    task = make_task(tmp_path, num_gpus=2, tenant="research")
    engine = alto.Engine(total_gpus=4, quotas={"research": 1}, output_dir=tmp_path / "runs")
    with pytest.raises(SpecError, match="the quota of tenant 'research'"):
        engine.schedule([task])


def test_bad_data_is_a_named_error_before_anything_starts(tmp_path: Path) -> None:
    task = make_task(tmp_path, dataset="absent.jsonl")
    with pytest.raises(DataFileNotFoundError):
        alto.Engine(output_dir=tmp_path / "runs").schedule([task])


def test_a_schedule_of_other_tasks_is_refused(tmp_path: Path) -> None:
    task = make_task(tmp_path)
    with pytest.raises(SpecError, match=r"expected a placement for each of the 2 tasks.*engine\.schedule\(tasks\)"):
        alto.Engine(output_dir=tmp_path / "runs").batched_execution([task, task], one_by_one([task], ["tiny"]))
    assert not (tmp_path / "runs").exists()


def test_unknown_names(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="expected one of"):
        alto.Engine().schedule([make_task(tmp_path)], method="magic")
    with pytest.raises(SpecError, match="cluster should be one of local, auto, ray"):
        alto.Engine(cluster="slurm").schedule([make_task(tmp_path)])


def test_a_queue_is_resumed_whatever_end_an_earlier_process_was_to_come_to(tmp_path: Path) -> None:
    engine = alto.Engine(output_dir=tmp_path / "runs")
    with engine.queue() as queue:
        pass
    mailbox = QueueMailbox(QueueDir(queue.root).run)
    command = mailbox.ask(QueueAction.DRAIN)  # it came too late
    assert engine.resume_queue(queue.root) == []
    answer = mailbox.wait_for_answer(command, 0)
    assert answer is not None
    assert answer.message == "The queue had ended already."


def test_a_task_whose_model_has_a_link_to_nothing_does_not_end_the_queue_it_is_submitted_to(
    model: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(model, tmp_path / "model")
    (folder / "old.safetensors").symlink_to(tmp_path / "gone")
    (task,) = tiny_tasks(tmp_path, folder, ["task"])
    with alto.Engine(output_dir=tmp_path / "runs").queue() as queue:
        mailbox = QueueMailbox(QueueDir(queue.root).run)
        answer = mailbox.wait_for_answer(mailbox.submit(task.to_dict()), 60.0)
        assert answer is not None
        assert not answer.done
        assert "old.safetensors" in answer.message
        assert queue.status().open_tasks == ()


@pytest.mark.parametrize(
    ("error", "saves"),
    [
        (SpecError("of the block"), True),
        (SystemExit(1), True),
        (asyncio.CancelledError(), True),
        (KeyboardInterrupt(), False),
    ],
)
def test_what_runs_saves_where_an_error_ends_the_block(error: BaseException, saves: bool) -> None:
    done: list[str] = []
    controller = SimpleNamespace(
        has_ended=False,
        status=lambda: SimpleNamespace(open_tasks=("t",)),
        drain=lambda: done.append("drain"),
    )
    live = SimpleNamespace(finish=lambda: done.append("finish"))
    with pytest.raises(type(error)), _saving(cast(Any, live), cast(Any, controller)):
        raise error
    assert done == (["finish", "drain"] if saves else [])


def test_names_are_unique(tmp_path: Path) -> None:
    tasks = [make_task(tmp_path, name=name) for name in ("a", "a", "a-2", "a", "b")]
    by_name = tasks_by_name(tasks)
    assert list(by_name) == ["a", "a-3", "a-2", "a-4", "b"]
    assert list(by_name.values()) == tasks


def test_a_queue_has_its_folder_before_its_tasks_are_measured_and_is_resumed_from_there(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = tiny_tasks(tmp_path, model, ["a", "a"])
    measured = list[list[str]]()

    def stopped(measurement: Measurement, tasks: Sequence[alto.Task]) -> list[TaskEstimate]:
        measured.append([task.name for task in tasks])
        measurement.show(MeasuringBegun(task=tasks[0].name, model="tiny"))
        measurement.show(TaskMeasured(task=tasks[0].name, duration_s=7.0))
        measurement.show(MeasuringBegun(task=tasks[1].name, model="tiny"))
        raise KeyboardInterrupt

    def estimates(measurement: Measurement, tasks: Sequence[alto.Task]) -> list[TaskEstimate]:
        measured.append([task.name for task in tasks])
        measurement.show(MeasuringBegun(task=tasks[1].name, model="tiny"))
        measurement.show(TaskMeasured(task=tasks[1].name, duration_s=9.0))
        return [TaskEstimate(duration_s=7.0), TaskEstimate(duration_s=9.0)]

    monkeypatch.setenv("ALTO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(Measurement, "estimates", stopped)
    engine = alto.Engine(total_gpus=2, output_dir=tmp_path / "runs")
    with pytest.raises(KeyboardInterrupt) as stop:
        engine.batched_execution(tasks)
    (root,) = (tmp_path / "runs").iterdir()
    assert stop.value.__notes__ == [f"continue with: alto resume {root}"]
    queue = read_queue_history(root)
    assert [
        (task.demand.duration_s, task.measuring is not None, task.is_unmeasured) for task in queue.tasks.values()
    ] == [
        (7.0, False, False),
        (UNKNOWN_DURATION_S, True, True),
    ]
    shown = CliRunner().invoke(app, ["show", str(root)]).output
    assert "not measured yet" in shown
    assert "measuring memory" not in shown  # nobody measures
    monkeypatch.setattr(Measurement, "estimates", estimates)
    assert [result.task for result in engine.resume_queue(root)] == ["a", "a"]
    assert measured == [["a", "a-2"]] * 2
    assert [(entry.duration_s, entry.is_unmeasured) for entry in QueueDir(root).read()[0]] == [
        (7.0, False),
        (9.0, False),
    ]
    engine.resume_queue(root)
    assert len(measured) == 2
    assert not any(task.measuring for task in read_queue_history(root).tasks.values())


def test_a_queue_whose_tasks_cannot_be_measured_leaves_no_folder(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> list[TaskEstimate]:
        raise ProfileError("task 'a': expected to measure its time and memory, found less memory")

    monkeypatch.setattr(Measurement, "estimates", fails)
    with pytest.raises(ProfileError, match="found less memory"):
        alto.Engine(output_dir=tmp_path / "runs").batched_execution(tiny_tasks(tmp_path, model, ["a"]))
    assert list((tmp_path / "runs").iterdir()) == []


def test_what_a_process_says_of_its_measurement_is_passed_on(tmp_path: Path) -> None:
    begun = MeasuringBegun(task="small", model="tiny", remaining_s=40.0)
    shown = list[MeasuringBegun | TaskMeasured]()
    measuring = replace(measurement(Measuring(says=begun), []), show=shown.append)
    measuring.estimates([make_task(tmp_path, name="small")])
    assert [event for event in shown if isinstance(event, MeasuringBegun)] == [begun]
