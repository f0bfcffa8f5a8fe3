"""The table of a queue in narrow terminals, after a resume, when every task has something to say."""

from __future__ import annotations

import io

import pytest
from journals import entry
from rich.console import Console

from alto.runs import QueueProgress
from alto.views import queue_summary

NAMES = ("qwen-maths-sweep", "llama-short")


def started(name: str, attempt: int, time: float) -> dict[str, object]:
    return {"event": "executor_started", "time": time, "task": name, "attempt": attempt, "gpus": [["n", 0]]}


def resumed() -> QueueProgress:
    progress = QueueProgress()
    told = [
        {
            "event": "queue_started",
            "time": 0.0,
            "devices": "gpus",
            "nodes": [{"name": "n", "gpus": [0, 1]}],
            "tasks": [{"task": name, "num_gpus": 1, "duration_s": 500.0} for name in NAMES],
        },
        *(started(name, 1, 1.0) for name in NAMES),
        {"event": "queue_resumed", "time": 100.0},
        *(
            {"event": "executor_started", "time": 101.0, "task": name, "attempt": 2, "gpus": [["n", 0]]}
            for name in NAMES
        ),
        {
            "event": "executor_ended",
            "time": 300.0,
            "task": NAMES[1],
            "attempt": 2,
            "outcome": "failed",
            "reason": "killed " * 20,
        },
        {"event": "task_given_up", "time": 301.0, "task": NAMES[1], "reason": "killed " * 20},
    ]
    for event in told:
        progress.apply(entry(event))
    return progress


@pytest.mark.parametrize("width", [120, 100, 99, 80, 75, 74, 60])
def test_names_and_states_are_whole(width: int) -> None:
    console = Console(width=width, file=io.StringIO())
    console.print(queue_summary(resumed()))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    rows = [line for line in text.splitlines() if any(line.strip().startswith(name + " ") for name in NAMES)]
    assert [row.split()[:2] for row in rows] == [[NAMES[0], "running"], [NAMES[1], "failed"]]
    assert all(" 0 % " in row and "3 min" in row for row in rows)
    assert "qwen-maths-sweep: attempt 2; before: the controller" in text
    assert "llama-short: killed" in text
    assert max(map(len, text.splitlines())) <= width
