"""Queues whose executors and controllers are killed: nothing is lost, nothing runs twice, the results are the same."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny import save_model

import alto
from alto.early_exit import audit
from alto.runs import QueueDir, RunDir, TaskStage, read_events, read_history, read_queue_history

PROGRAM = Path(__file__).parents[1] / "support" / "run_queue.py"
NAMES = ("one", "two")
EPOCHS = 5
LIMIT_S = 240.0
INTERRUPTED = 75


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "tiny")


@contextlib.contextmanager
def queue_of(folder: Path, model: Path, num_gpus: int = 1) -> Iterator[subprocess.Popen[bytes]]:
    """The queue as a process in a session of its own; whatever is left of it is killed."""
    process = subprocess.Popen(
        [sys.executable, PROGRAM, folder, model, str(num_gpus), str(EPOCHS), *NAMES], start_new_session=True
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_for(found: Callable[[], Any]) -> Any:
    gives_up_at = time.monotonic() + LIMIT_S
    while not (result := found()):
        assert time.monotonic() < gives_up_at
        time.sleep(0.02)
    return result


def queue_in(folder: Path) -> QueueDir | None:
    root = next((folder / "runs").glob("queue-*"), None)
    return None if root is None else QueueDir(root)


def is_half_way(folder: Path, task: str) -> bool:
    """Whether a task has a checkpoint and has not ended."""
    queue = queue_in(folder)
    if queue is None or not queue.run_of(task).journal_file.exists():
        return False
    kinds = {event["event"] for event in read_events(queue.run_of(task).journal_file)}
    return "checkpoint" in kinds and "eval" in kinds and "task_completed" not in kinds


def executor_of(run: RunDir) -> int:
    """The first process of the executor of a run."""
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            command = (entry / "cmdline").read_bytes().decode(errors="replace") if entry.name.isdecimal() else ""
            if "alto.cluster.worker" in command and str(run.root) in command:
                return int(entry.name)
    raise AssertionError(f"no executor of {run.root}")


def losses_of(queue: QueueDir) -> dict[str, dict[str, float]]:
    return {
        name: {job.job: job.best_validation_loss for job in read_history(queue.run_of(name).root).jobs.values()}
        for name in NAMES
    }


@pytest.fixture(scope="module")
def undisturbed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, float]]:
    folder = tmp_path_factory.mktemp("undisturbed")
    with queue_of(folder, model) as process:
        assert process.wait(LIMIT_S) == 0
    queue = queue_in(folder)
    assert queue is not None
    return losses_of(queue)


def assert_whole(queue: QueueDir, undisturbed: dict[str, dict[str, float]]) -> None:
    """Every task has its result, the one it has where nobody is killed, and every step was taken once."""
    history = read_queue_history(queue.root)
    assert {task.state for task in history.tasks.values()} == {TaskStage.FINISHED}
    assert losses_of(queue) == undisturbed
    for name in NAMES:
        events = read_events(queue.run_of(name).journal_file)
        assert audit(events) == ()
        assert Counter(event["event"] for event in events)["task_completed"] == 1
        assert (queue.run_of(name).best / "adapter_model.safetensors").is_file()


def test_a_killed_executor_goes_on_from_its_checkpoint(
    model: Path, tmp_path: Path, undisturbed: dict[str, dict[str, float]]
) -> None:
    with queue_of(tmp_path, model) as process:
        wait_for(lambda: is_half_way(tmp_path, "one"))
        queue = queue_in(tmp_path)
        assert queue is not None
        os.kill(executor_of(queue.run_of("one")), signal.SIGKILL)
        assert process.wait(LIMIT_S) == 0
    assert_whole(queue, undisturbed)
    attempts = read_queue_history(queue.root).tasks["one"].attempts
    assert [attempt.outcome for attempt in attempts] == ["lost", "finished"]
    assert len(read_queue_history(queue.root).tasks["two"].attempts) == 1
    kinds = [event["event"] for event in read_events(queue.run_of("one").journal_file)]
    assert "task_resumed" in kinds


def test_a_killed_controller_leaves_nobody_behind_and_its_queue_goes_on(
    model: Path, tmp_path: Path, undisturbed: dict[str, dict[str, float]]
) -> None:
    with queue_of(tmp_path, model) as process:
        wait_for(lambda: is_half_way(tmp_path, "two"))
        queue = queue_in(tmp_path)
        assert queue is not None
        first = executor_of(queue.run_of("two"))
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        wait_for(lambda: not Path(f"/proc/{first}").exists())
    results = alto.Engine(output_dir=tmp_path / "runs").resume_queue(queue.root)
    assert [result.task for result in results] == list(NAMES)
    assert_whole(queue, undisturbed)
    # What was finished is not run again.
    assert len(read_queue_history(queue.root).tasks["one"].attempts) == 1
    assert len(read_queue_history(queue.root).tasks["two"].attempts) == 2


def test_a_queue_that_is_asked_to_stop_saves_and_goes_on(
    model: Path, tmp_path: Path, undisturbed: dict[str, dict[str, float]]
) -> None:
    with queue_of(tmp_path, model, num_gpus=2) as process:
        wait_for(lambda: is_half_way(tmp_path, "one") or is_half_way(tmp_path, "two"))
        queue = queue_in(tmp_path)
        assert queue is not None
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(LIMIT_S) == INTERRUPTED
    kinds = [event["event"] for event in read_events(queue.run.journal_file)]
    assert kinds[-1] == "queue_interrupted"
    ends = [event for event in read_events(queue.run.journal_file) if event["event"] == "executor_ended"]
    assert {event["outcome"] for event in ends} <= {"interrupted", "finished"}
    alto.Engine(output_dir=tmp_path / "runs").resume_queue(queue.root)
    assert_whole(queue, undisturbed)
