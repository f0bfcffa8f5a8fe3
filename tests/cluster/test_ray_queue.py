"""A real queue on Ray: tasks train, a node dies in the middle, nothing is lost."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="needs the ray extra: pip install 'alto-lora[ray]'")

from journals import entries
from queues import tiny_tasks
from ray_machine import RayMachine
from tiny import save_model

import alto
from alto.cluster.ray import RayCluster
from alto.early_exit import audit
from alto.records import Gpu, Placement, Schedule
from alto.runs import JournalEntry, QueueDir, TaskStage, read_events, read_queue_history
from alto.runs.events import CheckpointSaved, TaskRelayed

pytestmark = [
    pytest.mark.slow("ray"),
    pytest.mark.filterwarnings("ignore:.*:ResourceWarning"),  # ray leaves the output of its processes open
]

NAMES = ("on-it", "elsewhere")


def side_by_side(gpus: Mapping[str, Gpu]) -> Schedule:
    return Schedule(
        method="lpt",
        status="heuristic",
        placements=tuple(Placement(task=name, gpus=(gpu,), start_s=0.0, duration_s=60.0) for name, gpu in gpus.items()),
        bound_s=60.0,
    )


def test_a_queue_one_of_whose_nodes_is_killed_gives_every_result(ray_nodes: RayMachine, tmp_path: Path) -> None:
    doomed = ray_nodes.add_node(num_cpus=1)
    nodes = RayCluster("auto").nodes
    (lost,) = (Gpu(node.name, 0) for node in nodes if node.name.endswith(doomed.node_id[:8]))
    kept = next(Gpu(node.name, 0) for node in nodes if node.name != lost.node)
    half_way: list[str] = []

    def kill(entry: JournalEntry) -> None:
        """The node, once the task on it can be resumed from a checkpoint."""
        match entry.event:
            case TaskRelayed(task=task, entry=JournalEntry(event=CheckpointSaved(), seq=seq)):
                if not half_way and task == NAMES[0] and seq > 2:
                    half_way.append(task)
                    ray_nodes.kill_node(doomed)

    tasks = tiny_tasks(tmp_path, save_model(tmp_path / "model"), NAMES, num_train_epochs=20, early_exit=False)
    engine = alto.Engine(cluster="auto", output_dir=tmp_path / "runs", observers=[kill])
    results = engine.batched_execution(tasks, side_by_side({NAMES[0]: lost, NAMES[1]: kept}))

    assert half_way, "its node was killed while it trained"
    assert [result.task for result in results] == list(NAMES)
    queue = QueueDir(next((tmp_path / "runs").iterdir()))
    history = read_queue_history(queue.root)
    assert {task.state for task in history.tasks.values()} == {TaskStage.FINISHED}
    attempts = history.tasks[NAMES[0]].attempts
    assert [attempt.outcome for attempt in attempts] == ["lost", "finished"]
    assert [attempt.gpus[0].node == lost.node for attempt in attempts] == [True, False]
    told = [(event["event"], event.get("task")) for event in read_events(queue.run.journal_file)]
    assert told.index(("gpu_lost", None)) < told.index(("executor_ended", NAMES[0]))
    for name in NAMES:
        events = read_events(queue.run_of(name).journal_file)
        assert audit(entries(events)) == ()
        assert [event["event"] for event in events].count("task_completed") == 1
    assert "task_resumed" in [event["event"] for event in read_events(queue.run_of(NAMES[0]).journal_file)]


def test_ranks_whose_node_is_killed_go_on_together_on_another(ray_nodes: RayMachine, tmp_path: Path) -> None:
    doomed = ray_nodes.add_node(num_cpus=2)
    nodes = RayCluster("auto").nodes
    (lost,) = (node for node in nodes if node.name.endswith(doomed.node_id[:8]))
    gpus = tuple(Gpu(lost.name, index) for index in lost.gpus)
    half_way: list[str] = []

    def kill(entry: JournalEntry) -> None:
        match entry.event:
            case TaskRelayed(task=task, entry=JournalEntry(event=CheckpointSaved())) if not half_way:
                half_way.append(task)
                ray_nodes.kill_node(doomed)

    (task,) = tiny_tasks(
        tmp_path, save_model(tmp_path / "model"), ["wide"], num_gpus=2, num_train_epochs=20, early_exit=False
    )
    schedule = Schedule(
        method="lpt",
        status="heuristic",
        placements=(Placement(task="wide", gpus=gpus, start_s=0.0, duration_s=60.0),),
        bound_s=60.0,
    )
    engine = alto.Engine(cluster="auto", output_dir=tmp_path / "runs", observers=[kill])
    (result,) = engine.batched_execution([task], schedule)

    assert half_way, "its node was killed while it trained"
    history = read_queue_history(Path(result.run_dir).parents[1])
    attempts = history.tasks["wide"].attempts
    assert [attempt.outcome for attempt in attempts] == ["lost", "finished"]
    assert {gpu.node for gpu in attempts[0].gpus} == {lost.name}
    assert len({gpu.node for gpu in attempts[1].gpus}) == 1
    events = read_events(Path(result.run_dir) / "journal.jsonl")
    assert audit(entries(events)) == ()
    assert [event["num_ranks"] for event in events if event["event"] == "task_resumed"] == [2]
