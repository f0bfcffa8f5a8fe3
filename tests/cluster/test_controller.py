"""The controller with a scripted cluster: what it launches, what it journals, and what it never does twice."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from controller_bench import SETTINGS, Bench, new_run
from fake_cluster import FakeCluster, leave_result
from journals import event

from alto.cluster import (
    ClusterEvent,
    Controller,
    EntryWritten,
    GpuAdded,
    GpuLost,
    Launch,
    Outcome,
    Retrying,
    TaskTicket,
)
from alto.errors import QueueCommandError, SpecError, TaskInterruptedError
from alto.records import Gpu
from alto.runs import (
    CommandAnswer,
    JobAction,
    Journal,
    JournalEntry,
    Mailbox,
    TaskStage,
    read_events,
    read_queue_history,
)
from alto.runs.events import TaskRelayed, decode


def test_every_task_is_launched_once_and_finishes(tmp_path: Path) -> None:
    bench = Bench(tmp_path, {"a": 5.0, "b": 3.0, "c": 4.0}, num_gpus={"c": 2})
    bench.run()
    assert bench.starts == {"a": 1, "b": 1, "c": 1}
    assert [event["outcome"] for event in bench.events("executor_ended")] == ["finished"] * 3
    history = read_queue_history(bench.queue_dir.root)
    assert {task.state for task in history.tasks.values()} == {TaskStage.FINISHED}
    assert all(Path(launch.run_dir) == bench.queue_dir.run_of(launch.task).root for launch in bench.cluster.launches)
    assert bench.events("planned")[0]["reason"]


def test_a_lost_executor_is_tried_again_after_a_pause_and_others_go_on(tmp_path: Path) -> None:
    bench = Bench(tmp_path, {"a": 5.0, "b": 5.0})
    bench.cluster.outcomes["a"] = deque([Outcome.LOST])
    bench.run()
    assert bench.starts == {"a": 2, "b": 1}
    first, second = (launch for launch in bench.cluster.launches if launch.task == "a")
    assert (first.attempt, second.attempt, second.run_dir) == (1, 2, first.run_dir)
    times = [event["time"] for event in bench.events("executor_started") if event["task"] == "a"]
    assert len(times) == 2


def test_what_fails_by_its_own_fault_is_given_up_at_once_and_others_go_on(tmp_path: Path) -> None:
    bench = Bench(tmp_path, {"a": 5.0, "b": 5.0})
    bench.cluster.outcomes["a"] = deque([Outcome.FAILED])
    bench.run()
    assert bench.starts == {"a": 1, "b": 1}
    (given_up,) = bench.events("task_given_up")
    assert given_up["task"] == "a"
    assert "was failed" in given_up["reason"]
    tasks = read_queue_history(bench.queue_dir.root).tasks
    assert (tasks["a"].state, tasks["b"].state) == (TaskStage.FAILED, TaskStage.FINISHED)


def test_what_is_lost_again_and_again_is_given_up(tmp_path: Path) -> None:
    bench = Bench(tmp_path, {"a": 1.0})
    bench.cluster.outcomes["a"] = deque([Outcome.LOST] * 10)
    bench.run()
    assert bench.starts == {"a": SETTINGS.max_attempts}


def test_tasks_with_a_result_are_not_run_again(tmp_path: Path) -> None:
    bench = Bench(tmp_path, {"a": 5.0, "b": 5.0})
    bench.run(done=["a"])
    assert bench.starts == {"b": 1}


def test_when_asked_to_stop_executors_save_and_end(tmp_path: Path) -> None:
    bench = Bench(tmp_path, {"a": 50.0, "b": 50.0, "c": 50.0})
    with pytest.raises(TaskInterruptedError, match="3 of 3 tasks still to finish and everything on disk"):
        bench.run(is_interrupted=lambda: bench.clock() > 110.0)
    assert sorted(task for task, count in bench.starts.items() if count) == ["a", "b"]
    assert not bench.cluster.running
    assert bench.events("queue_interrupted")[0]["open"] == ["a", "b", "c"]
    bench.run()
    assert {task.state for task in read_queue_history(bench.queue_dir.root).tasks.values()} == {TaskStage.FINISHED}


def test_a_task_whose_node_is_lost_runs_again_where_gpus_are(tmp_path: Path) -> None:
    bench = Bench(tmp_path, {"a": 20.0, "b": 20.0})

    def lose(cluster: FakeCluster) -> Iterable[ClusterEvent]:
        if cluster.clock() > 105.0 and cluster.script is lose:
            cluster.script = bring_back
            gone = next(launch for _, launch in cluster.running.values() if launch.gpus == (Gpu("n", 1),))
            yield cluster.end(gone, Outcome.LOST)
            yield GpuLost(gpu=Gpu("n", 1))

    def bring_back(cluster: FakeCluster) -> Iterable[ClusterEvent]:
        if cluster.clock() > 110.0:
            cluster.script = lambda cluster: ()
            yield GpuAdded(gpu=Gpu("n", 1))

    bench.cluster.script = lose
    bench.run()
    assert sorted(bench.starts.values()) == [1, 2]
    assert [event["event"] for event in bench.events("gpu_lost") + bench.events("gpu_added")] == [
        "gpu_lost",
        "gpu_added",
    ]


def test_nothing_is_started_on_a_gpu_that_is_lost_with_another(tmp_path: Path) -> None:
    """A node goes with both of its GPUs: between the two losses, the queue still has one of them."""
    bench = Bench(tmp_path, {"a": 20.0, "b": 20.0, "c": 20.0}, num_gpus={"c": 2})
    start = FakeCluster.start
    present = {Gpu("n", 0), Gpu("n", 1)}

    def checked(cluster: FakeCluster, launch: Launch) -> None:
        assert present.issuperset(launch.gpus)
        start(cluster, launch)

    def lose(cluster: FakeCluster) -> Iterable[ClusterEvent]:
        if cluster.clock() > 105.0 and cluster.script is lose:
            cluster.script = bring_back
            present.clear()
            for _, launch in list(cluster.running.values()):
                yield cluster.end(launch, Outcome.LOST)
            yield GpuLost(gpu=Gpu("n", 0))
            yield GpuLost(gpu=Gpu("n", 1))

    def bring_back(cluster: FakeCluster) -> Iterable[ClusterEvent]:
        if cluster.clock() > 110.0:
            cluster.script = lambda cluster: ()
            present.update({Gpu("n", 0), Gpu("n", 1)})
            yield GpuAdded(gpu=Gpu("n", 0))
            yield GpuAdded(gpu=Gpu("n", 1))

    bench.cluster.script = lose
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeCluster, "start", checked)
        bench.run()
    assert {task.state for task in read_queue_history(bench.queue_dir.root).tasks.values()} == {TaskStage.FINISHED}


def test_progress_moves_the_estimate_and_an_estimate_ten_times_off_causes_a_new_plan(tmp_path: Path) -> None:
    bench = Bench(tmp_path, {"a": 10.0, "b": 10.0, "c": 10.0, "d": 10.0})
    bench.cluster.seconds["a"] = 100.0
    jobs = [{"job": "job-000", "config": {}, "total_steps": 100, "samples_budgeted": 100}]
    started = decode({"event": "task_started", "time": 0.0, "task": "a", "jobs": jobs})

    def tell(cluster: FakeCluster) -> Iterable[ClusterEvent]:
        """Report job a's progress in proportion to the part of its hundred seconds that has passed."""
        if "a" not in cluster.running:
            return
        ends_at, launch = cluster.running["a"]
        step = round(100 - (ends_at - cluster.clock()))
        if step <= 1:
            yield EntryWritten(task="a", attempt=1, entry=started)
        yield EntryWritten(
            task="a",
            attempt=launch.attempt,
            entry=decode(
                {
                    "event": "eval",
                    "job": "job-000",
                    "step": step,
                    "train_ema": 1.0,
                    "validation_loss": 1.0,
                    "time": 0.0,
                }
            ),
        )

    bench.cluster.script = tell
    bench.run()
    moved = [event["reason"] for event in bench.events("planned") if "a is now estimated to take" in event["reason"]]
    assert moved
    assert bench.starts == {"a": 1, "b": 1, "c": 1, "d": 1}
    assert {entry.event.task for entry in bench.shown if isinstance(entry.event, TaskRelayed)} == {"a"}
    assert isinstance(bench.shown[0].event, TaskRelayed)
    assert bench.shown[0].event.entry == started


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_a_task_that_has_its_result_is_finished_however_its_executor_ended(
    is_interrupted: bool, tmp_path: Path
) -> None:
    bench = Bench(tmp_path, {"a": 3.0})
    bench.cluster.outcomes["a"] = deque([Outcome.LOST] * 3)
    leave_result(bench.queue_dir.run_of("a").root)
    if is_interrupted:
        with pytest.raises(TaskInterruptedError, match="with 0 of 1 tasks"):
            bench.run(is_interrupted=lambda: bool(bench.cluster.launches))
    else:
        bench.run()
    assert bench.starts == {"a": 1}
    (ended,) = bench.events("executor_ended")
    assert ended["outcome"] == "finished"
    assert ended["reason"].startswith("Ended after its result was complete: was ")
    assert read_queue_history(bench.queue_dir.root).tasks["a"].state is TaskStage.FINISHED


def test_each_notice_of_a_result_is_kept_and_the_journal_has_all_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, end = Bench(tmp_path, {}), FakeCluster.end
    notices = ("There is no report.", "There is no page.")
    monkeypatch.setattr(FakeCluster, "end", lambda *args: replace(end(*args), notices=notices))
    with bench.controller() as controller:
        controller.submit(new_run(bench, "d", 1.0))
        controller.wait()
        ended = controller.status().tasks["d"].ended
    assert ended is not None
    assert (ended.reason, ended.notices) == ("", notices)
    assert [event["reason"] for event in bench.events("executor_ended")] == [" ".join(notices)]


def test_an_executor_that_was_lost_is_no_failure_in_a_row_where_it_came_further(tmp_path: Path) -> None:
    bench = Bench(tmp_path, {})
    bench.cluster.outcomes["d"] = deque([Outcome.LOST] * 40)
    steps = iter([0, 1, 1, 2, 2, 3, *[3] * 20])  # before and after each attempt: three get further
    with bench.controller(retrying=Retrying(progress_of=lambda run: (next(steps),))) as controller:
        controller.submit(new_run(bench, "d", 1.0))
        controller.wait()
        assert controller.status().tasks["d"].num_failures == SETTINGS.max_attempts
    assert bench.starts == {"d": 3 + SETTINGS.max_attempts}


@pytest.mark.parametrize(("retries", "num_starts"), [(True, 2), (False, 1)])
def test_an_executor_interrupted_from_outside_restarts_only_with_retries(
    retries: bool, num_starts: int, tmp_path: Path
) -> None:
    bench = Bench(tmp_path, {})
    bench.cluster.outcomes["d"] = deque([Outcome.INTERRUPTED])
    with bench.controller(retrying=Retrying(interrupted=retries)) as controller:
        controller.submit(new_run(bench, "d", 1.0))
        controller.wait()
    assert bench.starts == {"d": num_starts}


def test_a_journal_that_cannot_be_read_is_the_end_of_its_task_alone(tmp_path: Path) -> None:
    bench = Bench(tmp_path, {"a": 2.0, "b": 5.0})
    bench.cluster.outcomes["a"] = deque([Outcome.LOST] * 3)
    damaged = json.dumps({"seq": 0, "time": 0.0, "event": "task_started", "task": 7, "jobs": "none"})
    bench.queue_dir.run_of("a").journal_file.write_text(damaged + "\n", encoding="utf-8")
    bench.run()
    tasks = read_queue_history(bench.queue_dir.root).tasks
    assert (tasks["a"].state, tasks["b"].state) == (TaskStage.FAILED, TaskStage.FINISHED)


@pytest.mark.parametrize(
    "line",
    [
        {"event": "gpus_offered", "num_gpus": 1, "duration_s": "nan", "data_parallel_duration_s": 1.0},
        {"event": "gpus_offered", "num_gpus": 0, "duration_s": 1.0, "data_parallel_duration_s": 10.0},
        {"event": "eval", "job": "x", "step": 1, "train_ema": 1.0, "validation_loss": 1.0, "metrics": {}},
    ],
    ids=["no duration", "no GPUs", "without the metric"],
)
def test_what_no_executor_writes_is_no_end_of_the_queue(line: dict[str, Any], tmp_path: Path) -> None:
    bench = Bench(tmp_path, {"a": 5.0, "b": 5.0, "c": 5.0}, num_gpus={"a": 2})
    started = {"event": "task_started", "task": "a", "metric": "reward_accuracy", "jobs": []}

    def tell(cluster: FakeCluster) -> Iterable[ClusterEvent]:
        if "a" in cluster.running:
            for written in (started, line):
                yield EntryWritten(task="a", attempt=1, entry=decode({"time": 0.0, **written}))

    bench.cluster.script = tell
    bench.run()
    assert bench.starts == {"a": 1, "b": 1, "c": 1}


def share_done_after(bench: Bench, attempt: int, entries: list[JournalEntry]) -> float | None:
    """Return the progress of task ``a`` after its executor has reported ``entries`` in ``attempt``."""
    reported_at: list[float] = []

    def tell(cluster: FakeCluster) -> Iterable[ClusterEvent]:
        if cluster.running and cluster.running["a"][1].attempt == attempt and not reported_at:
            reported_at.append(cluster.clock())
            for entry in entries:
                yield EntryWritten(task="a", attempt=attempt, entry=entry)

    bench.cluster.script = tell
    with bench.controller() as controller:
        while not reported_at:
            controller.turn()
        return controller.status().tasks["a"].fraction_done


def test_what_an_earlier_attempt_has_done_counts_for_the_next(tmp_path: Path) -> None:
    bench = Bench(tmp_path, {"a": 20.0})
    bench.cluster.outcomes["a"] = deque([Outcome.LOST])
    jobs = [{"job": "job-000", "config": {}, "total_steps": 100, "samples_budgeted": 100}]
    point = {"job": "job-000", "train_ema": 1.0, "validation_loss": 1.0}
    with Journal(bench.queue_dir.run_of("a").journal_file) as journal:
        journal.append(event("task_started", task="a", jobs=jobs))
        journal.append(event("eval", step=50, **point))
        resumed = journal.append(event("task_resumed"))
        further = journal.append(event("eval", step=60, **point))

    assert share_done_after(bench, 2, [resumed, further]) == pytest.approx(0.6)


def test_jobs_that_a_rung_has_ended_are_not_taken_for_time_that_has_passed(tmp_path: Path) -> None:
    """Ten jobs of 100 samples, of which two continue after a tenth: 100 samples of 280 are trained, though 820 of the
    1,000 that were budgeted are decided."""
    bench = Bench(tmp_path, {"a": 20.0})
    names = [f"job-{index:03d}" for index in range(10)]
    jobs = [{"job": name, "config": {}, "total_steps": 100, "samples_budgeted": 100} for name in names]
    exits = {"policy": "alto", "rungs": [[0.1, 0.2]], "min_kept": 1}
    with Journal(tmp_path / "journal.jsonl") as journal:
        entries = [journal.append(event("task_started", task="a", jobs=jobs, early_exit=exits))]
        point = {"train_ema": 1.0, "validation_loss": 1.0}
        entries += [journal.append(event("eval", job=name, step=10, **point)) for name in names]
        ended = {"step": 10, "reason": "underperforming", "evidence": {}}
        entries += [journal.append(event("job_exited", job=name, **ended)) for name in names[2:]]
        entries.append(journal.append(event("warmup_ended", progress=0.1, kept=names[:2], dropped=names[2:])))

    assert share_done_after(bench, 1, entries) == pytest.approx(100 / 280)


@pytest.fixture
def live(tmp_path: Path) -> Iterator[tuple[Bench, Controller]]:
    """Tasks a and b on two GPUs, while c waits."""
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
    assert (status.tenant, status.priority, status.has_ended, status.fraction_done) == ("t", 7, True, 1.0)
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
        controller.submit(TaskTicket(task=run.pop("name"), run_dir="none", host="none:none", **run))
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
            mailbox.answer(command.id, CommandAnswer(done=True, message="cloned"))
        return ()

    bench.cluster.script = answer
    found = controller.job_command("a", JobAction.CLONE, "job-000", changes={"r": 4})
    assert found == CommandAnswer(done=True, message="cloned")
    assert seen == [(JobAction.CLONE, "job-000", {"r": 4})]
    with pytest.raises(QueueCommandError, match="not in the queue"):
        controller.job_command("x", JobAction.STOP, "job-000")


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
