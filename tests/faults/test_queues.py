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
from journals import entries
from tiny import save_model

import alto
from alto.early_exit import audit
from alto.runs import QueueDir, RunDir, TaskStage, read_events, read_history, read_queue_history

PROGRAM = Path(__file__).parents[1] / "support" / "run_queue.py"
NAMES = ("one", "two", "three")
EPOCHS = 5
LIMIT_S = 240.0
INTERRUPTED = 75


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "tiny")


@contextlib.contextmanager
def program(*arguments: object) -> Iterator[subprocess.Popen[bytes]]:
    """``run_queue.py`` as a process in a session of its own; whatever is left of it is killed."""
    process = subprocess.Popen([sys.executable, PROGRAM, *map(str, arguments)], start_new_session=True)
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


def losses_of(root: Path) -> dict[str, float]:
    return {job.job: job.best_validation_loss for job in read_history(root).jobs.values()}


@pytest.mark.slow("campaigns")
def test_a_queue_whose_executor_and_controller_are_killed_and_that_is_stopped_loses_nothing(
    model: Path, tmp_path: Path
) -> None:
    """Of three tasks that are one but for their names, each meets one of these half-way; a fourth run meets none."""
    with program(tmp_path, model, 1, EPOCHS, *NAMES) as controller:
        wait_for(lambda: is_half_way(tmp_path, "one"))
        queue = queue_in(tmp_path)
        assert queue is not None
        os.kill(executor_of(queue.run_of("one")), signal.SIGKILL)
        wait_for(lambda: is_half_way(tmp_path, "two"))
        executor = executor_of(queue.run_of("two"))
        os.kill(controller.pid, signal.SIGKILL)
        controller.wait()
        wait_for(lambda: not Path(f"/proc/{executor}").exists())
    with program(tmp_path, "resume") as controller:
        wait_for(lambda: is_half_way(tmp_path, "three"))
        os.kill(controller.pid, signal.SIGTERM)
        assert controller.wait(LIMIT_S) == INTERRUPTED
    assert read_events(queue.run.journal_file)[-1]["event"] == "queue_interrupted"
    results = alto.Engine(output_dir=tmp_path / "runs").resume_queue(queue.root)

    assert [result.task for result in results] == list(NAMES)
    history = read_queue_history(queue.root)
    assert {task.state for task in history.tasks.values()} == {TaskStage.FINISHED}
    outcomes = {name: [attempt.outcome for attempt in task.attempts] for name, task in history.tasks.items()}
    assert outcomes["one"] == ["lost", "finished"], "what was finished is not run again"
    assert len(outcomes["two"]) == 2
    assert outcomes["two"][-1] == "finished"
    assert outcomes["three"] == ["interrupted", "finished"]
    (tmp_path / "undisturbed").mkdir()
    with program(tmp_path / "undisturbed", model, 1, EPOCHS, NAMES[0]) as controller:
        assert controller.wait(LIMIT_S) == 0
    undisturbed = queue_in(tmp_path / "undisturbed")
    assert undisturbed is not None
    expected = losses_of(undisturbed.run_of(NAMES[0]).root)
    for name in NAMES:
        run = queue.run_of(name)
        assert losses_of(run.root) == expected
        events = read_events(run.journal_file)
        assert audit(entries(events)) == ()
        kinds = Counter(event["event"] for event in events)
        assert (kinds["task_resumed"], kinds["task_completed"]) == (1, 1)
        assert (run.best / "adapter_model.safetensors").is_file()
