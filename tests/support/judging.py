"""Runs whose winner is chosen by answers to validation rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny import make_task

import alto
from alto.engine import runner
from alto.errors import TaskInterruptedError
from alto.runs import JournalEntry
from alto.runs.events import JobCompleted

SPACE = {"lr": [1e-4, 3e-3, 1e-2, 3e-2]}


def sums_task(
    folder: Path, model: Path, num_rows: int, *, answer: Callable[[int], int] = lambda n: n % 3, **settings: Any
) -> alto.Task:
    """Return a task of four jobs that trains and validates on ``num_rows`` questions with answers like GSM8K's."""
    sums = folder / "sums.jsonl"
    rows = [{"question": f"{n} plus 1?", "answer": f"#### {answer(n)}"} for n in range(num_rows)]
    sums.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    files = {"dataset": str(sums), "validation_dataset": str(sums)}
    given = {"model": str(model), "max_steps": 2, "search_space": SPACE, "early_exit": False}
    return make_task(folder, **(given | files | settings))


def tune(task: alto.Task, **settings: Any) -> alto.TaskResult:
    """Run ``task`` in the folder ``runs`` beside its rows."""
    return alto.Engine(output_dir=Path(task.dataset).parent / "runs", **settings).tune(task)


def by_loss(result: alto.TaskResult) -> list[str]:
    return [job.job for job in sorted(result.job_results, key=lambda job: job.best_validation_loss)]


def stopped_once_all_are_trained(task: alto.Task, num_jobs: int) -> Path:
    """Stop a run of ``task`` between its last step and its result; return its folder."""
    ended: list[str] = []

    def observe(entry: JournalEntry) -> None:
        if isinstance(entry.event, JobCompleted):
            ended.append(entry.event.job)

    folder = Path(task.dataset).parent / "runs"
    runs = runner.TaskRunner(observers=[observe], is_interrupted=lambda: len(ended) == num_jobs)
    with pytest.raises(TaskInterruptedError, match=f"with 0 of {num_jobs} jobs still to train"):
        runs.begin(task, folder)
    (run,) = folder.iterdir()
    return run
