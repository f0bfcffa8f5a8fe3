"""``report.html`` of a queue: its tasks with their winners and the savings of early exit, the planned and the actual
schedule, and the reasons of every replanning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from alto.errors import RunError
from alto.report.gantt import gantt_figure
from alto.report.pages import render_page, timestamp, write_page
from alto.report.report import REPORT_NAME
from alto.runs import Attempt, QueueHistory, RunHistory, TaskHistory, TaskStage, read_history, read_queue_history
from alto.runs.progress import DeviceHours, device_hours, price_of_hour
from alto.views.wording import clean, describe_config, tidy_config, varying_keys

ADVICE = "; continue with: "
"""Start of the part of a reason that says how to continue an attempt."""


def write_queue_report(queue_dir: str | Path, *, price: float | None = None) -> Path:
    """Write ``report.html`` into ``queue_dir`` from its journals and return its path; the queue may be unfinished.

    Args:
        price: Price of an hour of one GPU; None takes the price in the environment, else that in each task's budget.

    Raises:
        RunNotFoundError: ``queue_dir`` holds no queue.
        RunError: A journal is damaged before its last line.
        SpecError: The price in the environment is not a valid price.
        RunWriteError: The disk is full or cannot be written.
    """
    queue_dir = Path(queue_dir)
    page = render_page("queue.html.jinja", **_context(read_queue_history(queue_dir), queue_dir, price))
    return write_page(queue_dir / REPORT_NAME, page)


def _context(queue: QueueHistory, queue_dir: Path, price: float | None = None) -> dict[str, Any]:
    tasks = list(queue.tasks.values())
    planned = [task.first_plan for task in tasks if task.first_plan is not None]
    # A queue whose journal was lost records an empty interruption at its start.
    gaps = [(queue.worked_s(start), end - start) for start, end in queue.interruptions if end - start >= 1.0]
    runs = {task.task: run for task in tasks if (run := _run(queue_dir / "tasks" / task.task)) is not None}
    prices = {name: run.started.gpu_hour_price for name, run in runs.items() if run.started is not None}
    hours = {name: device_hours(run, price_of_hour(price, prices.get(name))) for name, run in runs.items()}
    return {
        "name": queue_dir.name,
        "queue": queue,
        "num_gpus": queue.num_gpus,
        "methods": list(dict.fromkeys(plan.method for plan in queue.plans)),
        "is_finished": queue.is_completed,
        "devices": "GPUs" if queue.has_gpus else "CPU slots",
        "device": "GPU" if queue.has_gpus else "CPU slot",
        "num_finished": len(queue.in_state(TaskStage.FINISHED)),
        "num_failed": len(queue.in_state(TaskStage.FAILED)),
        "num_attempts": sum(len(task.attempts) for task in tasks),
        "first_plan": queue.plans[0] if queue.plans else None,
        "utilisation": queue.utilisation(),
        "rows": [_row(task, queue, queue_dir, runs.get(task.task), hours.get(task.task)) for task in tasks],
        "savings": _savings(runs, hours),
        "interrupted_s": [idle_s for _, idle_s in gaps],
        "gantt": gantt_figure(planned, queue.actual_placements(), queue.nodes, gaps=gaps) if planned else None,
        "written_at": timestamp(queue.last_seen_at),
    }


def _row(
    task: TaskHistory, queue: QueueHistory, queue_dir: Path, run: RunHistory | None, hours: DeviceHours | None
) -> dict[str, Any]:
    """Return the row of a task in the table; seconds count from the start of the queue, without interruptions."""
    report = queue_dir / "tasks" / task.task / REPORT_NAME
    best = None if run is None else run.best
    configs = [] if run is None else [tidy_config(job.config) for job in run.jobs.values()]
    attempts = [
        _attempt(attempt, is_open=attempt is task.attempts[-1] and task.state is not TaskStage.FINISHED)
        for attempt in task.attempts
    ]
    return {
        "task": task,
        "planned_start_s": task.first_plan.start_s if task.first_plan is not None else None,
        "start_s": queue.worked_s(task.attempts[0].start) if task.attempts else None,
        "spent_s": task.spent_s(queue.last_seen_at or 0.0),
        "best_loss": None if best is None else best.best_validation_loss,
        "winner": "" if best is None else clean(best.job),
        "winner_label": "" if best is None else describe_config(tidy_config(best.config), varying_keys(configs)),
        "saved_share": None if run is None else run.saved_share,
        "hours": hours,
        "report": report.relative_to(queue_dir).as_posix() if report.is_file() else None,
        "attempts": [*attempts, clean(task.failure)] if task.failure else attempts,
    }


def _run(run_dir: Path) -> RunHistory | None:
    try:
        return read_history(run_dir)
    except RunError:  # the damaged journal of one task must not prevent the page of the queue
        return None


def _savings(runs: dict[str, RunHistory], hours: dict[str, DeviceHours]) -> dict[str, Any] | None:
    """Sum up the savings of all runs that can be read; None if there are no samples to train.

    ``saved_h`` is None if no task has saved any device hours, ``cost`` if the price of one run is unknown.
    """
    budgeted = sum(run.samples_budgeted for run in runs.values())
    if not budgeted:
        return None
    saving = [found for found in hours.values() if found.saved_h is not None]
    costs = [found.cost(found.saved_h) for found in saving]
    return {
        "share": sum(run.samples_saved for run in runs.values()) / budgeted,
        "samples_trained": sum(run.samples_trained for run in runs.values()),
        "samples_budgeted": budgeted,
        "saved_h": sum(found.saved_h or 0.0 for found in saving) if saving else None,
        "cost": sum(cost or 0.0 for cost in costs) if costs and None not in costs else None,
    }


def _attempt(attempt: Attempt, *, is_open: bool) -> str:
    """Describe the attempt in words; say how to continue it only if it ``is_open``: no later attempt has done so."""
    gpus = ", ".join(f"{clean(gpu.node)}:{gpu.index}" for gpu in attempt.gpus)
    ended = "runs" if attempt.outcome is None else attempt.outcome
    reason = clean(attempt.reason if is_open else attempt.reason.partition(ADVICE)[0])
    return f"{attempt.number} on {gpus}: {ended}" + (f" ({reason})" if reason else "")
