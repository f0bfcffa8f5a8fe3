"""An open queue for users of the Python interface."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from alto.base import resume_command
from alto.cluster import Controller, ControllerStatus, LiveQueue
from alto.engine.objects import IN_A_QUEUE, check_has_id
from alto.engine.runner import checked_task
from alto.errors import AltoError, RunBusyError, RunError, TasksFailedError
from alto.report import write_queue_report
from alto.results import TaskResult
from alto.runs import (
    CommandAnswer,
    JobAction,
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
    task_outcome,
)
from alto.runs.events import QueueCompleted
from alto.spec import Task


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
    """Return the notices of a finished task; none once a report is written. The journal has them as the reason of the
    last attempt's end."""
    reasons = [attempt.reason for attempt in task.attempts[-1:] if attempt.reason]
    return () if run.report_file.exists() else tuple(reasons)


class TaskQueue:
    """A running queue of tasks that share the GPUs of a cluster; made by :meth:`alto.Engine.queue`.

    Every method may be called from any thread. Submitted tasks are on disk: a queue whose process dies is resumed with
    ``alto resume``, and other processes submit and cancel with ``alto submit`` and ``alto cancel``.

    Attributes:
        root: The queue's folder, ``runs/queue-<id>``.
    """

    def __init__(self, queue_dir: QueueDir, live: LiveQueue, controller: Controller) -> None:
        self.root: Path = queue_dir.root
        self._queue_dir = queue_dir
        self._live = live
        self._controller = controller

    def submit(self, task: Task, *, tenant: str | None = None, priority: int | None = None) -> str:
        """Add a task to the queue.

        Args:
            task: The task; its rows are read and checked before this returns.
            tenant: Tenant whose quota it counts against; None takes the task's key.
            priority: Higher goes first; None takes the task's key.

        Returns:
            Its name in the queue: its own, with a number added if that is taken.

        Raises:
            AltoError: The task or its data has an error; it is not added then.
            QueueCommandError: The queue accepts no more tasks.
        """
        check_has_id([task], IN_A_QUEUE)
        task = checked_task(task)
        return self._live.submit(
            task,
            tenant=task.tenant if tenant is None else tenant,
            priority=task.priority if priority is None else priority,
        )

    def cancel(self, task: str) -> None:
        """Cancel a task; if it runs, it saves and ends. Returns at once.

        Raises:
            QueueCommandError: There is no such task, or it has ended.
        """
        self._live.cancel(task)

    def job_command(
        self,
        task: str,
        action: JobAction | str,
        job: str,
        *,
        changes: Mapping[str, Any] | None = None,
        warm: bool = False,
        timeout_s: float = 60.0,
    ) -> CommandAnswer | None:
        """Stop, resume or clone a job of a task, as ``alto job`` does.

        Args:
            task: Name of the task in the queue.
            action: ``stop``, ``resume`` or ``clone``.
            job: Id of the job.
            changes: Settings of a clone that differ from the job's, under canonical keys.
            warm: Whether a clone starts from the job's best adapter.
            timeout_s: Longest wait for the answer.

        Returns:
            The answer; None if it did not come in time. The command stays until an executor of the task answers it.

        Raises:
            QueueCommandError: There is no such task, or it has ended.
            ValueError: There is no such action.
        """
        return self._controller.job_command(
            task, JobAction(action), job, changes=changes, warm=warm, timeout_s=timeout_s
        )

    def status(self) -> ControllerStatus:
        """Return the current state of every task that this process was given."""
        return self._controller.status()

    def events(self, since: int = 0, *, follow: bool = True) -> Iterator[JournalEntry]:
        """Yield the entries of the queue's journal in order, each once.

        Args:
            since: Sequence number of the first entry; a reader that stopped after entry n continues with n + 1.
            follow: Wait for new entries until the queue has ended; otherwise stop after the last entry.
        """
        return self._controller.events(since, follow=follow)

    def results(self) -> list[TaskResult]:
        """Wait until every task has ended; return the results, without cancelled tasks, in the order of submission.

        Raises:
            TasksFailedError: Some tasks failed for good; the error carries the results of the others.
            TaskInterruptedError: The queue was drained.
        """
        self._controller.wait()
        return queue_results(self._queue_dir)

    def finish(self) -> None:
        """Accept no further tasks: the queue ends when all tasks have ended."""
        self._live.finish()

    def serve(self) -> None:
        """Wait until the queue has ended, which requires :meth:`finish` or ``alto drain --when-done``.

        Raises:
            TaskInterruptedError: The queue was drained.
        """
        self._live.wait()

    def drain(self) -> None:
        """Let running tasks save and end, and wait for them; ``alto resume`` continues the queue."""
        self._controller.drain()
