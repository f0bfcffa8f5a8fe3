"""A queue in the terminal."""

from __future__ import annotations

import io
from typing import Any

from journals import entries
from rich.console import Console

from alto.export.queue_view import LiveQueueView, PlainQueueView

TASKS = [{"task": "a", "num_gpus": 1, "duration_s": 20.0}]
NODES = [{"name": "local", "gpus": [0]}]


def started(time: float) -> dict[str, Any]:
    return {"event": "executor_started", "time": time, "task": "a", "attempt": 1, "gpus": [["local", 0]]}


RESUMED = [
    {"event": "queue_started", "time": 0.0, "nodes": NODES, "tasks": TASKS},
    started(0.0),
    {"event": "queue_interrupted", "time": 10.0, "open": ["a"]},
    {"event": "queue_resumed", "time": 310.0, "done": []},
]


def test_time_so_far_is_without_interruptions():
    console = Console(width=120)
    view = LiveQueueView(console, clock=lambda: 315.0)
    for entry in entries(RESUMED):
        view.observe(entry)
    with console.capture() as screen:
        console.print(view._render())
    assert "\n15 s so far" in screen.get()


def test_attempts_are_numbered_by_order_though_the_journal_counts_anew():
    view = PlainQueueView(io.StringIO())
    for entry in entries([*RESUMED, started(311.0)]):
        view.observe(entry)
    lines = [line.split("  ")[-1] for line in view._stream.getvalue().splitlines()]
    assert [line for line in lines if line.startswith("a started")] == [
        "a started on local:0",
        "a started on local:0, attempt 2",
    ]
