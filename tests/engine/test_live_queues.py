"""Running queues with real executors: tasks are added and cancelled, from Python and from another process."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from queues import tiny_tasks
from typer.testing import CliRunner

import alto
from alto.cli import app
from alto.errors import QueueCommandError, SpecError
from alto.runs import JobAction, QueueDir, TaskStage, events, read_events, read_queue_history
from alto.scheduler.queue import TaskState

LIMIT_S = 240.0
LONG = {"num_train_epochs": 2000, "early_exit": False}


def wait_for(found: Callable[[], Any], what: str) -> Any:
    gives_up_at = time.monotonic() + LIMIT_S
    while not (result := found()):
        assert time.monotonic() < gives_up_at, f"waited for {what}"
        time.sleep(0.05)
    return result


def test_tasks_are_submitted_to_and_cancelled_from_a_queue_that_runs(model: Path, tmp_path: Path) -> None:
    short, other, wide = tiny_tasks(tmp_path, model, ["short", "other", "wide"])
    (long,) = tiny_tasks(tmp_path, model, ["long"], **LONG)
    engine = alto.Engine(total_gpus=2, output_dir=tmp_path / "runs", quotas={"guest": 1})
    with engine.queue() as queue:
        assert queue.submit(long, tenant="guest", priority=3) == "long"
        waits = queue.submit(other, tenant="guest")
        with pytest.raises(SpecError, match="the quota of tenant 'guest'"):
            queue.submit(wide.replace(num_gpus=2), tenant="guest")
        for entry in queue.events():  # follows the live queue, and leaves it
            if isinstance(entry.event, events.AttemptStarted):
                break
        trains = lambda: queue.status().tasks["long"].state is TaskState.RUNNING  # noqa: E731
        wait_for(trains, "the long task to train")
        status = queue.status().tasks["long"]
        assert (status.tenant, status.priority, len(status.gpus)) == ("guest", 3, 1)
        answer = queue.job_command("long", JobAction.STOP, "job-000")
        assert answer is not None
        assert answer.done, answer.message
        assert queue.submit(short) == "short"
        assert queue.submit(short) == "short-2"
        assert queue.status().tasks[waits].state is TaskState.WAITING, "its tenant has used its quota"
        queue.cancel("long")
        queue.cancel("short-2")
        results = queue.results()
        assert {result.task for result in results} == {"other", "short"}
        with pytest.raises(QueueCommandError, match="'long', which is stopped"):
            queue.cancel("long")
    journal = read_events(queue.root / "journal.jsonl")
    assert journal[-1]["event"] == "queue_completed"
    assert [entry.to_dict() for entry in queue.events(since=3)] == journal[3:]
    history = read_queue_history(queue.root)
    assert {name: task.state for name, task in history.tasks.items()} == {
        "long": TaskStage.CANCELLED,
        "other": TaskStage.FINISHED,
        "short": TaskStage.FINISHED,
        "short-2": TaskStage.CANCELLED,
    }
    last = read_events(queue.root / "tasks" / "long" / "journal.jsonl")[-1]
    assert last["event"] == "task_interrupted", "it has saved"
    assert (queue.root / "report.html").is_file()


@contextlib.contextmanager
def waiting_queue(folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], QueueDir]]:
    """Run ``alto run --wait-for-tasks`` in a session of its own."""
    command = [
        *(sys.executable, "-c", "from alto.cli import main; main()", "run", "--wait-for-tasks", "--total-gpus", "2"),
        *("--output-dir", str(folder / "runs"), "--quiet"),
    ]
    process = subprocess.Popen(command, start_new_session=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    try:
        root = wait_for(lambda: next((folder / "runs").glob("queue-*"), None), "the queue")
        wait_for(lambda: QueueDir(root).run.is_locked(), "the queue to begin")
        yield process, QueueDir(root)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def alto_command(*words: object) -> str:
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == 0, f"{done.output} {done.exception}"
    return done.stdout


def states(queue: QueueDir) -> dict[str, str]:
    listed = json.loads(alto_command("list", queue.root, "--json"))
    return {task["task"]: task["state"] for task in listed["tasks"]}


@pytest.mark.slow("queues")
def test_tasks_are_submitted_and_cancelled_by_another_process(model: Path, tmp_path: Path) -> None:
    files = {}
    for name, changes in (("short", {}), ("long", LONG), ("next", {})):
        (task,) = tiny_tasks(tmp_path, model, [name], **changes)
        files[name] = tmp_path / f"{name}.yaml"
        files[name].write_text(task.to_yaml(), encoding="utf-8")
    with waiting_queue(tmp_path) as (process, queue):
        printed = alto_command("submit", queue.root, files["long"], files["short"], "--tenant", "research")
        assert printed == "long was submitted.\nshort was submitted.\n"
        wait_for(lambda: states(queue).get("short") == "finished", "the short task")
        assert "is cancelled" in alto_command("cancel", queue.root, "long")
        wait_for(lambda: states(queue)["long"] == "cancelled", "the long task to end")
        assert "research" in alto_command("list", queue.root)
        refused = CliRunner().invoke(app, ["cancel", str(queue.root), "absent"])
        assert isinstance(refused.exception, QueueCommandError)

        os.kill(process.pid, signal.SIGKILL)  # tasks submitted meanwhile run when the queue is resumed
        process.wait()
        wait_for(lambda: not queue.run.is_locked(), "the lock")
        assert "the command takes effect with: alto resume" in alto_command("submit", queue.root, files["next"])
    alto_command("resume", queue.root)
    assert states(queue) == {"long": "cancelled", "short": "finished", "next": "finished"}
    submitted = [line["task"] for line in read_events(queue.run.journal_file) if line["event"] == "task_submitted"]
    assert submitted == ["long", "short", "next"]


@pytest.mark.slow("queues")
def test_a_queue_that_waits_ends_when_it_is_told_to(tmp_path: Path) -> None:
    with waiting_queue(tmp_path) as (process, queue):
        assert "no further tasks" in alto_command("drain", queue.root, "--when-done")
        assert process.wait(LIMIT_S) == 0
    assert alto_command("drain", queue.root) == "No process works on this queue.\n"
    assert [line["event"] for line in read_events(queue.run.journal_file)] == ["queue_started", "queue_completed"]
