"""Queues whose executors, controllers and nodes are killed: nothing is lost or run twice, the results are the same."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from clusters import LIMIT_S
from deaths import HOLD, TRAIN, plan_deaths
from journals import entries
from queues import tiny_tasks
from ray_machine import RayMachine
from run_queue import INTERRUPTED
from tiny import curves_of, save_model

import alto
from alto.early_exit import audit
from alto.records import Gpu, Placement, Schedule
from alto.runs import JournalEntry, QueueDir, QueueHistory, RunDir, TaskStage, read_events, read_queue_history
from alto.runs.events import CheckpointSaved, TaskRelayed, decode

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*:ResourceWarning"),  # ray does not close the output of its processes
]

PROGRAM = Path(__file__).parents[1] / "support" / "run_queue.py"
ONE_PROCESS, CONTROLLER, STOPPED, UNDISTURBED = "executor-killed", "controller-killed", "stopped", "undisturbed"
HALF_WAY = 5
"""The step at which processes die; every turn before it writes a checkpoint."""


@pytest.fixture(
    params=[
        pytest.param("local", marks=pytest.mark.slow("campaigns")),
        pytest.param("ray", marks=pytest.mark.slow("ray")),
    ]
)
def cluster(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A cluster of each kind, as a user names it."""
    if request.param == "local":
        return "local"
    pytest.importorskip("ray", reason="needs the ray extra: pip install 'alto-lora[ray]'")
    monkeypatch.setenv("RAY_ADDRESS", request.getfixturevalue("ray_nodes").address)
    return "auto"


class Program:
    """``run_queue.py``, and the events that its observer gets."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def until_saved(self, task: str) -> None:
        """Wait until the executor of ``task`` has a checkpoint."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            match decode(json.loads(line)).event:
                case TaskRelayed(task=found, entry=JournalEntry(event=CheckpointSaved())) if found == task:
                    return
        raise AssertionError(f"the program ended, with {self._process.wait()}, before {task} had a checkpoint")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def stop(self) -> int:
        """Ask the program to save and end; return its exit code."""
        self._process.terminate()
        self._process.communicate()
        return self._process.returncode


@contextlib.contextmanager
def program(*arguments: object) -> Iterator[Program]:
    """Run ``run_queue.py`` in its own session; kill the rest of the session at the end, at the latest when it hangs."""
    command = [sys.executable, PROGRAM, *map(str, arguments)]
    with subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE, text=True) as process:

        def end() -> None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

        hangs = threading.Timer(10 * LIMIT_S, end)
        hangs.start()
        try:
            yield Program(process)
        finally:
            hangs.cancel()
            end()


def facts(run: RunDir) -> dict[str, Any]:
    """Return curves, exits and winner of a run, and check its journal."""
    events = read_events(run.journal_file)
    assert audit(entries(events)) == ()
    curves = {job: (curve.train, curve.validation) for job, curve in curves_of(events).items()}
    assert curves
    exits = [(event["job"], event["reason"], event["step"]) for event in events if event["event"] == "job_exited"]
    return {"curves": curves, "exits": exits, "best": events[-1]["best_job"]}


def num_ranks_resumed(run: RunDir) -> list[int]:
    """Return the number of ranks of each resumption of a run, and check its journal."""
    events = read_events(run.journal_file)
    assert audit(entries(events)) == ()
    return [event["num_ranks"] for event in events if event["event"] == "task_resumed"]


def finished(queue: QueueDir) -> QueueHistory:
    """Check that each task has its result once, and return the queue's history."""
    history = read_queue_history(queue.root)
    assert {task.state for task in history.tasks.values()} == {TaskStage.FINISHED}
    for name, task in history.tasks.items():
        outcomes = [attempt.outcome for attempt in task.attempts]
        assert outcomes.count("finished") == 1, "a finished task ran again"
        assert outcomes[-1] == "finished"
        kinds = Counter(event["event"] for event in read_events(queue.run_of(name).journal_file))
        assert (kinds["task_resumed"], kinds["task_completed"]) == (len(outcomes) - 1, 1), name
        assert (queue.run_of(name).best / "adapter_model.safetensors").is_file()
    return history


def test_a_queue_whose_executor_and_controller_are_killed_and_that_is_stopped_loses_nothing(
    cluster: str, tmp_path: Path
) -> None:
    """Three of four equal tasks each meet one of these in the middle of a step."""
    names = (ONE_PROCESS, CONTROLLER, STOPPED, UNDISTURBED)
    plan_deaths(
        tmp_path,
        {
            ONE_PROCESS: [(0, "update", signal.SIGKILL, HALF_WAY)],
            CONTROLLER: [(0, "update", HOLD, HALF_WAY)],
            STOPPED: [(0, "update", HOLD, HALF_WAY)],
        },
    )
    with program(tmp_path, cluster, save_model(tmp_path / "model"), *names) as controller:
        controller.until_saved(CONTROLLER)
        controller.kill()
    (root,) = (tmp_path / "runs").glob("queue-*")
    queue = QueueDir(root)
    with program(tmp_path, cluster) as controller:
        controller.until_saved(STOPPED)
        assert controller.stop() == INTERRUPTED
    assert read_events(queue.run.journal_file)[-1]["event"] == "queue_interrupted"
    results = alto.Engine(output_dir=tmp_path / "runs").resume_queue(queue.root)

    assert [result.task for result in results] == list(names)
    history = finished(queue)
    outcomes = {name: [attempt.outcome for attempt in task.attempts] for name, task in history.tasks.items()}
    assert outcomes[ONE_PROCESS] == ["lost", "finished"]
    assert "SIGKILL" in history.tasks[ONE_PROCESS].attempts[0].reason
    assert len(outcomes[CONTROLLER]) == 2
    assert outcomes[STOPPED] == ["interrupted", "finished"]
    assert outcomes[UNDISTURBED] == ["finished"]
    expected = facts(queue.run_of(UNDISTURBED))
    for name in names:
        assert facts(queue.run_of(name)) == expected, name


@pytest.mark.slow("ray")
def test_tasks_whose_node_is_killed_go_on_elsewhere(
    ray_nodes: RayMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One task runs in a single process and one in ranks, while a third trains on another node."""
    from alto.cluster.ray import RayCluster

    doomed = ray_nodes.add_node(num_cpus=3)
    nodes = RayCluster("auto").nodes
    (lost,) = (node for node in nodes if node.name.endswith(doomed.node_id[:8]))
    kept = next(node for node in nodes if node is not lost)
    gpus = {
        "alone": (Gpu(lost.name, 0),),
        "ranks": (Gpu(lost.name, 1), Gpu(lost.name, 2)),
        "elsewhere": (Gpu(kept.name, 0),),
    }
    plan_deaths(tmp_path, {name: [(0, "update", HOLD, HALF_WAY)] for name in ("alone", "ranks")})
    monkeypatch.setattr("alto.engine.queues.TRAIN", TRAIN)
    saved: set[str] = set()

    def kill(entry: JournalEntry) -> None:
        """Kill the node once both tasks on it can be resumed from a checkpoint."""
        match entry.event:
            case TaskRelayed(task=task, entry=JournalEntry(event=CheckpointSaved())) if task not in saved:
                saved.add(task)
                if task != "elsewhere" and saved >= {"alone", "ranks"}:
                    ray_nodes.kill_node(doomed)

    model = save_model(tmp_path / "model")
    tasks = [
        task.replace(num_gpus=len(gpus[task.name]))
        for task in tiny_tasks(tmp_path, model, list(gpus), num_train_epochs=3, early_exit=False)
    ]
    placements = [Placement(task=name, gpus=own, start_s=0.0, duration_s=60.0) for name, own in gpus.items()]
    schedule = Schedule(method="lpt", status="heuristic", placements=tuple(placements), bound_s=60.0)
    engine = alto.Engine(cluster="auto", output_dir=tmp_path / "runs", observers=[kill])
    results = engine.batched_execution(tasks, schedule)

    assert [result.task for result in results] == list(gpus)
    (root,) = (tmp_path / "runs").iterdir()
    queue = QueueDir(root)
    history = finished(queue)
    for name in ("alone", "ranks"):
        first, second = history.tasks[name].attempts
        assert first.outcome == "lost"
        assert {gpu.node for gpu in first.gpus} == {lost.name}
        assert len({gpu.node for gpu in second.gpus} - {lost.name}) == 1, "two nodes"
    events = [(event["event"], event.get("task")) for event in read_events(queue.run.journal_file)]
    assert events.index(("gpu_lost", None)) < events.index(("executor_ended", "alone"))
    resumed = {name: num_ranks_resumed(queue.run_of(name)) for name in gpus}
    assert resumed == {"alone": [1], "ranks": [2], "elsewhere": []}
    alone, ranks, elsewhere = ({job.job: job.best_validation_loss for job in result.job_results} for result in results)
    assert alone == pytest.approx(elsewhere, rel=1e-4)
    assert ranks == pytest.approx(elsewhere, rel=1e-4)
