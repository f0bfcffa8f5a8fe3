"""The results of a queue's tasks, and the queue's report."""

from __future__ import annotations

import contextlib
from dataclasses import replace

from alto.errors import AltoError, RunBusyError, RunError, TasksFailedError
from alto.export import write_queue_report
from alto.results import TaskResult
from alto.runs import (
    JournalEntry,
    QueueDir,
    QueueMailbox,
    RunDir,
    TaskHistory,
    TaskStage,
    has_result,
    read_entries,
    read_history,
    read_queue_history,
    resume_command,
    task_outcome,
)
from alto.runs.events import QueueCompleted

__all__ = ["past_of_finished", "queue_results", "write_report_of"]


def queue_results(queue_dir: QueueDir) -> list[TaskResult]:
    """Return the results of the tasks that have one, in the order of submission.

    Raises:
        TasksFailedError: Some tasks failed for good; the error carries the results of the others.
    """
    history = read_queue_history(queue_dir.root)
    entries, _ = queue_dir.read()
    failed = history.in_state(TaskStage.FAILED)
    results = [
        TaskResult(
            replace(task_outcome(read_history(run.root), run), notices=_notices_of(history.tasks[entry.task], run))
        )
        for entry in entries
        if has_result(run := queue_dir.run_of(entry.task))
    ]
    if failed:
        reasons = "; ".join(f"{task.task}: {task.failure}" for task in failed)
        raise TasksFailedError(
            f"expected all {len(entries)} tasks of {queue_dir.root} to end with an adapter, found {len(failed)} "
            f"that were given up ({reasons}); the others have adapters. Fix the cause, then try again with: "
            f"{resume_command(queue_dir.root)}",
            results=results,
        )
    return results


def past_of_finished(queue_dir: QueueDir) -> list[JournalEntry]:
    """Return the journal of a queue with no tasks left and no waiting commands; empty for any other queue."""
    if QueueMailbox(queue_dir.run).num_pending:
        return []
    entries, _ = queue_dir.read()
    if not all(entry.is_cancelled or has_result(queue_dir.run_of(entry.task)) for entry in entries):
        return []
    try:
        past = read_entries(queue_dir.run.journal_file)
    except RunError:  # resuming the queue repairs its journal
        return []
    return past if past and isinstance(past[-1].event, QueueCompleted) else []


def write_report_of(queue_dir: QueueDir) -> None:
    """Write the queue's report. If that fails, delete the old report, which would show an earlier state. Without the
    queue's lock, change nothing."""
    report = queue_dir.run.report_file
    try:
        queue_dir.run.check_lock()
    except RunBusyError:
        return  # another process may work on the queue and write its report
    try:
        write_queue_report(queue_dir.root)
    except (AltoError, OSError):
        with contextlib.suppress(OSError):
            report.unlink()


def _notices_of(task: TaskHistory, run: RunDir) -> tuple[str, ...]:
    """Return the notices of a finished task's last executor; none once a report is written."""
    reasons = [attempt.reason for attempt in task.attempts[-1:] if attempt.reason]
    return () if run.report_file.exists() else tuple(reasons)
