"""Run directories written by hand, for code that only reads them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from alto.runs import QueueDir, QueueEntry
from alto.spec import Task

QUEUE_SETTINGS = {"method": "lpt", "strategy": "single", "cluster": "local", "total_gpus": None, "quotas": {}}


def write_journal(path: Path, events: Iterable[dict[str, Any]], *, start: float) -> None:
    """Write ``events`` as a journal that begins at ``start`` (unix seconds), numbered from 0, with their own
    distances."""
    events = list(events)
    shift = start - events[0]["time"]
    lines = ({**event, "seq": seq, "time": event["time"] + shift} for seq, event in enumerate(events))
    text = "".join(json.dumps({"seq": line.pop("seq"), "time": line.pop("time"), **line}) + "\n" for line in lines)
    path.write_text(text, encoding="utf-8")


def write_run(folder: Path, name: str, events: Iterable[dict[str, Any]], *, start: float) -> Path:
    """Write a run in ``folder`` with such a journal."""
    root = folder / name
    root.mkdir(parents=True)
    (root / "task.yaml").write_text("model: alto-tiny\n", encoding="utf-8")
    write_journal(root / "journal.jsonl", events, start=start)
    return root


def write_queue(folder: Path, tasks: dict[str, Task], *, start: float) -> QueueDir:
    """Write a queue in ``folder`` that has begun; the runs of its tasks have not."""
    entries = [QueueEntry(task=name, num_gpus=1, duration_s=5.0) for name in tasks]
    queue = QueueDir.create(folder, entries, list(tasks.values()), QUEUE_SETTINGS)
    described = [{"task": name, "num_gpus": 1, "duration_s": 5.0} for name in tasks]
    nodes = [{"name": "n", "gpus": [0]}]
    began = {"time": 0.0, "event": "queue_started", "method": "lpt", "devices": "gpus", "nodes": nodes}
    write_journal(queue.run.journal_file, [{**began, "tasks": described}], start=start)
    return queue
