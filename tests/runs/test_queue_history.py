"""The history of a queue, read from its journal."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from journals import entries

from alto.engine.queue_setup import journal_begin
from alto.records import Node
from alto.runs import Journal, QueueHistory, read_events


def attempts(*spans: tuple[str, int, float, float]) -> list[dict[str, Any]]:
    """Return a queue on two CPU slots: executors by task, slot, start and end."""
    lines: list[dict[str, Any]] = []
    for task, slot, start, end in spans:
        common = {"task": task, "attempt": 1}
        lines.append({"event": "executor_started", "time": start, "gpus": [["local", slot]], **common})
        lines.append({"event": "executor_ended", "time": end, "outcome": "finished", "reason": "", **common})
    begin = {
        "event": "queue_started",
        "time": 0.0,
        "method": "lpt",
        "devices": "cpu slots",
        "nodes": [{"name": "local", "gpus": [0, 1]}],
        "tasks": [{"task": task, "num_gpus": 1, "duration_s": 20.0} for task, *_ in spans],
    }
    return [begin, *sorted(lines, key=lambda line: line["time"])]


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ([("a", 0, 0.0, 10.0), ("b", 1, 0.0, 10.0)], 1.0),
        ([("a", 0, 0.0, 10.0), ("b", 0, 10.0, 20.0)], 0.5),
        ([("a", 0, 0.0, 10.0), ("b", 0, 2.0, 20.0), ("c", 0, 3.0, 8.0)], 0.5),  # they share a process
        ([("a", 0, 0.0, 4.0), ("b", 0, 6.0, 10.0), ("c", 0, 7.0, 9.0)], 0.4),
    ],
)
def test_gpu_time_that_tasks_share_counts_once(spans: list[tuple[str, int, float, float]], expected: float) -> None:
    assert QueueHistory.of(entries(attempts(*spans))).utilisation() == pytest.approx(expected)


def test_machines_that_leave_and_join_count_while_they_are_there() -> None:
    begin, *attempt = attempts(("a", 0, 0.0, 20.0))
    changes = [
        {"event": "gpu_lost", "time": 5.0, "node": "local", "index": 1},
        {"event": "gpu_added", "time": 15.0, "node": "other", "index": 0},
    ]
    lines = sorted([begin, *attempt, *changes], key=lambda line: line["time"])
    queue = QueueHistory.of(entries(lines))
    assert queue.nodes == (Node(name="local", gpus=(0,)), Node(name="other", gpus=(0,)))
    assert queue.num_gpus == 2
    assert queue.utilisation() == pytest.approx(20.0 / (20.0 + 5.0 + 5.0))


def test_a_queue_that_is_resumed_elsewhere_has_other_machines() -> None:
    lines = attempts(("a", 0, 0.0, 10.0))
    again = {"event": "queue_resumed", "time": 50.0, "done": [], "nodes": [{"name": "other", "gpus": [0]}]}
    queue = QueueHistory.of(entries([*lines, again]))
    assert queue.nodes == (Node(name="other", gpus=(0,)),)
    assert queue.utilisation() == pytest.approx(0.5)


@pytest.mark.parametrize("name", ["local", "other"])
def test_a_resumption_names_machines_only_if_they_are_others(name: str, tmp_path: Path) -> None:
    for node in ("local", name):
        cluster = SimpleNamespace(nodes=(Node(name=node, gpus=(0,)),), has_gpus=False)
        with Journal(tmp_path / "journal.jsonl") as journal:
            journal_begin(journal, cluster, "lpt")  # type: ignore[arg-type]
    assert QueueHistory.read(tmp_path / "journal.jsonl").nodes == (Node(name=name, gpus=(0,)),)
    assert ("nodes" in read_events(tmp_path / "journal.jsonl")[-1]) == (name == "other")


def test_a_task_that_runs_counts_until_now() -> None:
    queue = QueueHistory.of(entries(attempts(("a", 0, 0.0, 10.0), ("b", 1, 10.0, 20.0))[:-1]))
    assert [place.duration_s for place in queue.actual_placements()] == [10.0, 0.0], "up to the latest event"
    assert [place.duration_s for place in queue.actual_placements(40.0)] == [10.0, 30.0]
    assert queue.utilisation(40.0) == pytest.approx(40.0 / 80.0)


def test_the_measuring_before_the_first_schedule_counts_without_interruptions() -> None:
    begin, *_ = attempts(("a", 0, 0.0, 0.0), ("b", 0, 0.0, 0.0))
    begun = {"event": "measuring", "model": "tiny"}
    measured = {"event": "measured", "duration_s": 5.0}
    lines = [
        begin,
        {**begun, "task": "a", "time": 1.0},
        {**begun, "task": "b", "time": 2.0},
        {**measured, "task": "a", "time": 4.0},
    ]
    cut = QueueHistory.of(entries(lines))
    assert cut.tasks["a"].demand.duration_s == 5.0
    assert [task.measuring is not None for task in cut.tasks.values()] == [False, True]
    resumed = [
        *lines,
        {"event": "queue_resumed", "time": 100.0, "done": [], "notes": []},
        {**begun, "task": "b", "time": 101.0},
        {**measured, "task": "b", "time": 111.0},
    ]
    queue = QueueHistory.of(entries(resumed))
    assert (queue.measuring_s, queue.duration_s) == (3.0 + 10.0, 4.0 + 11.0)
    assert not any(task.measuring for task in queue.tasks.values())
