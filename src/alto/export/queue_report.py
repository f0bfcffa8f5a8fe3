"""``report.html`` of a queue: its tasks, planned against actual, and the reasons of every replanning."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alto.errors import RunError
from alto.export.gantt import gantt_figure
from alto.export.pages import render_page, timestamp, write_page
from alto.export.wording import clean
from alto.runs import Attempt, QueueHistory, TaskHistory, TaskStage, read_history, read_queue_history

__all__ = ["write_queue_report"]

REPORT_NAME = "report.html"
ADVICE = "; continue with: "
"""Begins the part of a reason that says how to continue an attempt."""


def write_queue_report(queue_dir: str | Path) -> Path:
    """Write ``report.html`` into ``queue_dir`` from its journals and return its path; it may be unfinished.

    Raises:
        RunNotFoundError: ``queue_dir`` holds no queue.
        RunError: A journal is damaged before its last line.
        RunWriteError: The disk is full or cannot be written.
    """
    queue_dir = Path(queue_dir)
    page = render_page("queue.html.jinja", **_context(read_queue_history(queue_dir), queue_dir))
    return write_page(queue_dir / REPORT_NAME, page)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """A task in the table; seconds count from the start of the queue, without interruptions."""

    task: TaskHistory
    planned_start_s: float | None
    start_s: float | None
    spent_s: float
    best_loss: float | None
    report: str | None
    attempts: list[str]


def _context(queue: QueueHistory, queue_dir: Path) -> dict[str, Any]:
    tasks = list(queue.tasks.values())
    planned = [task.first_plan for task in tasks if task.first_plan is not None]
    # A queue whose journal was lost notes an empty interruption at its start.
    gaps = [(queue.worked_s(start), end - start) for start, end in queue.interruptions if end - start >= 1.0]
    return {
        "name": queue_dir.name,
        "queue": queue,
        "num_gpus": queue.num_gpus,
        "methods": list(dict.fromkeys(plan.method for plan in queue.plans)),
        "is_finished": queue.is_completed,
        "devices": "GPUs" if queue.has_gpus else "CPU slots",
        "num_finished": len(queue.in_state(TaskStage.FINISHED)),
        "num_failed": len(queue.in_state(TaskStage.FAILED)),
        "num_attempts": sum(len(task.attempts) for task in tasks),
        "first_plan": queue.plans[0] if queue.plans else None,
        "utilisation": queue.utilisation(),
        "rows": [_row(task, queue, queue_dir) for task in tasks],
        "interrupted_s": [idle_s for _, idle_s in gaps],
        "gantt": gantt_figure(planned, queue.actual_placements(), queue.nodes, gaps=gaps) if planned else None,
        "written_at": timestamp(queue.last_seen_at),
    }


def _row(task: TaskHistory, queue: QueueHistory, queue_dir: Path) -> _Row:
    run_dir = queue_dir / "tasks" / task.task
    report = run_dir / REPORT_NAME
    return _Row(
        task=task,
        planned_start_s=task.first_plan.start_s if task.first_plan is not None else None,
        start_s=queue.worked_s(task.attempts[0].start) if task.attempts else None,
        spent_s=task.spent_s(queue.last_seen_at or 0.0),
        best_loss=_best_loss(run_dir),
        report=report.relative_to(queue_dir).as_posix() if report.is_file() else None,
        attempts=[
            _attempt(attempt, is_open=attempt is task.attempts[-1] and task.state is not TaskStage.FINISHED)
            for attempt in task.attempts
        ]
        + ([clean(task.failure)] if task.failure else []),
    )


def _best_loss(run_dir: Path) -> float | None:
    try:
        best = read_history(run_dir).best
    except RunError:  # a damaged journal of one task does not prevent the page of the queue
        return None
    return None if best is None else best.best_validation_loss


def _attempt(attempt: Attempt, *, is_open: bool) -> str:
    """The attempt in words; how to continue it only where it ``is_open``: no later attempt has done so."""
    gpus = ", ".join(f"{clean(gpu.node)}:{gpu.index}" for gpu in attempt.gpus)
    ended = "runs" if attempt.outcome is None else attempt.outcome
    reason = clean(attempt.reason if is_open else attempt.reason.partition(ADVICE)[0])
    return f"{attempt.number} on {gpus}: {ended}" + (f" ({reason})" if reason else "")
