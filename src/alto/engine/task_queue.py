"""An open queue, for users of the Python interface."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from alto.cluster import Controller, ControllerStatus, LiveQueue
from alto.data import read_task_rows
from alto.engine.objects import IN_A_QUEUE, check_has_id
from alto.engine.queue_results import queue_results
from alto.engine.runner import portable
from alto.results import TaskResult
from alto.runs import Action, Answer, JournalEntry, QueueDir
from alto.spec import Task

__all__ = ["TaskQueue"]


class TaskQueue:
    """A queue of tasks that share the GPUs of a cluster, while it runs; made by :meth:`alto.Engine.queue`.

    Every method may be called from any thread. What was submitted is on disk: a queue whose process dies is resumed
    with ``alto resume``, and other processes submit and cancel with ``alto submit`` and ``alto cancel``.

    Attributes:
        root: Its folder, ``runs/queue-<id>``.
    """

    def __init__(self, queue_dir: QueueDir, live: LiveQueue, controller: Controller) -> None:
        self.root: Path = queue_dir.root
        self._queue_dir = queue_dir
        self._live = live
        self._controller = controller

    def submit(self, task: Task, *, tenant: str | None = None, priority: int | None = None) -> str:
        """Have a task run as soon as it is its turn.

        Args:
            task: Read and checked before this returns.
            tenant: Whose quota it counts against; None takes the task's key.
            priority: Higher goes first; None takes the task's key.

        Returns:
            Its name in the queue: its own, with a number where that is taken.

        Raises:
            AltoError: What is wrong with the task or its data; the queue does not have it then.
            QueueCommandError: The queue accepts no more tasks.
        """
        check_has_id([task], IN_A_QUEUE)
        task = portable(task)
        read_task_rows(task)
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
        action: Action | str,
        job: str,
        *,
        changes: Mapping[str, Any] | None = None,
        warm: bool = False,
        timeout_s: float = 60.0,
    ) -> Answer | None:
        """Stop, resume or clone a job of a task, as ``alto job`` does.

        Args:
            task: Name of the task in the queue.
            action: ``stop``, ``resume`` or ``clone``.
            job: Id of the job.
            changes: A clone's settings that differ from the job's, canonical keys.
            warm: A clone starts from the job's best adapter.
            timeout_s: Longest wait for the answer.

        Returns:
            The answer; None if there was none in time. The command stays until an executor of the task answers it.

        Raises:
            QueueCommandError: There is no such task, or it has ended.
            ValueError: There is no such action.
        """
        return self._controller.job_command(task, Action(action), job, changes=changes, warm=warm, timeout_s=timeout_s)

    def status(self) -> ControllerStatus:
        """Every task that this process was to work on, as it is now."""
        return self._controller.status()

    def events(self, since: int = 0, *, follow: bool = True) -> Iterator[JournalEntry]:
        """The entries of the queue's journal, in order and each once.

        Args:
            since: Sequence number of the first entry; a reader that stopped after entry n continues with n + 1.
            follow: Wait for new entries until the queue has ended; else stop after the last entry.
        """
        return self._controller.events(since, follow=follow)

    def results(self) -> list[TaskResult]:
        """Wait until every task has ended; the results of those that were not cancelled, in the order of submission.

        Raises:
            TasksFailedError: Tasks were given up; it has the results of the others.
            TaskInterruptedError: The queue was drained.
        """
        self._controller.wait()
        return queue_results(self._queue_dir)

    def finish(self) -> None:
        """Wait for no further tasks: the queue ends when all have ended."""
        self._live.finish()

    def serve(self) -> None:
        """Wait until the queue has ended: after :meth:`finish`, or ``alto drain --when-done``, once all tasks have.

        Raises:
            TaskInterruptedError: The queue was drained.
        """
        self._live.wait()

    def drain(self) -> None:
        """Let running tasks save and end, and wait for that; ``alto resume`` continues the queue."""
        self._controller.drain()
