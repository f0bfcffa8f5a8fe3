"""The progress of a queue that is resumed: what the journals on disk hold, and no entry counted twice."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from journals import entries, event
from tiny import make_task

from alto.runs import JournalEntry, QueueDir, QueueEntry, QueueProgress, events

NAMES = ("done", "cut")
SETTINGS = {"method": "lpt", "strategy": "single", "cluster": "local", "total_gpus": None, "quotas": {}}


@pytest.fixture
def queue(tmp_path: Path, small_run: list[dict[str, Any]], interrupted_run: list[dict[str, Any]]) -> QueueDir:
    """A queue with a finished task and one that was interrupted after three evaluations."""
    added = [QueueEntry(task=name, num_gpus=1, duration_s=5.0) for name in NAMES]
    queue = QueueDir.create(tmp_path / "runs", added, [make_task(tmp_path, name=name) for name in NAMES], SETTINGS)
    for name, journal in zip(NAMES, (small_run, interrupted_run), strict=True):
        lines = (json.dumps({**line, "seq": seq}) + "\n" for seq, line in enumerate(journal))
        queue.run_of(name).journal_file.write_text("".join(lines), encoding="utf-8")
    queue.run.journal_file.write_text("".join(json.dumps(line) + "\n" for line in past()), encoding="utf-8")
    return queue


def past() -> list[dict[str, Any]]:
    """The queue's own journal."""
    tasks = [{"task": name, "num_gpus": 1, "duration_s": 5.0} for name in NAMES]
    starts = [
        {"event": "executor_started", "task": name, "attempt": 1, "gpus": [["n", 0]]} for name in NAMES
    ]  # fmt: skip
    return [
        {"seq": seq, "time": float(seq), **line}
        for seq, line in enumerate(
            [
                {"event": "queue_started", "devices": "gpus", "nodes": [{"name": "n", "gpus": [0]}], "tasks": tasks},
                *starts,
                {"event": "executor_ended", "task": "done", "attempt": 1, "outcome": "finished", "reason": ""},
            ]
        )
    ]


def facts(progress: QueueProgress) -> list[tuple[str, float, float | None]]:
    return [(task.task, progress.share(task), progress.best_loss(task)) for task in progress.queue.tasks.values()]


def relayed(task: str, entry: JournalEntry) -> JournalEntry:
    return JournalEntry(seq=0, time=entry.time, event=events.TaskRelayed(task=task, entry=entry))


def test_a_resumed_queue_begins_with_what_its_journals_hold(queue: QueueDir) -> None:
    resumed = QueueProgress.before_resume(queue.root)
    for entry in entries(past()):  # the engine shows them again
        resumed.apply(entry)
    assert facts(resumed) == facts(QueueProgress.read(queue.root))
    assert facts(resumed)[0] == ("done", 1.0, 1.9)
    assert len(resumed.queue.tasks["done"].attempts) == 1


@pytest.mark.parametrize("begin", [QueueProgress.before_resume, QueueProgress.read])
def test_what_was_trained_after_the_checkpoint_is_not_counted_twice(
    queue: QueueDir, begin: Callable[[Path], QueueProgress]
) -> None:
    progress = begin(queue.root)
    run = queue.run_of("cut").journal_file
    lines = run.read_text(encoding="utf-8").splitlines(keepends=True)
    run.write_text("".join(lines[:-2]), encoding="utf-8")  # as the executor cuts it back to its checkpoint
    trained_before = progress.runs["cut"].samples_trained
    checkpoint = len(lines) - 2
    for seq, line in enumerate([{"event": "task_resumed"}, *map(json.loads, lines[-2:])], start=checkpoint):
        (entry,) = entries([{**line, "seq": seq, "time": 0.0}])
        progress.apply(relayed("cut", entry))
    assert progress.runs["cut"].samples_trained == trained_before


def test_a_damaged_journal_is_reported_until_its_run_is_resumed(queue: QueueDir) -> None:
    run = queue.run_of("cut").journal_file
    first, *_ = run.read_text(encoding="utf-8").splitlines(keepends=True)
    run.write_text(first + "{}\n" + first, encoding="utf-8")
    progress = QueueProgress.before_resume(queue.root)
    assert "Expected" in progress.unreadable["cut"]
    progress.apply(relayed("cut", JournalEntry(seq=1, time=2.0, event=event("task_resumed"))))
    assert progress.unreadable == {}
    assert progress.runs["cut"].started is not None
