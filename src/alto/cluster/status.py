"""The status of a controller and its tasks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from alto.cluster.base import ExecutorEnded
from alto.records import Gpu, Node
from alto.scheduler.queue import TaskState

__all__ = ["ControllerStatus", "TaskStatus"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskStatus:
    """The current status of one task.

    Attributes:
        task: Name of the task.
        state: State in the queue.
        tenant: Tenant whose quota it counts against.
        priority: Higher goes first.
        num_gpus: Number of GPUs that it needs.
        gpus: Its GPUs while it runs; otherwise empty.
        attempt: Number of executors that were started for it.
        expected_s: Estimated seconds of the task, or of its next attempt, from start to end.
        share_done: Share of its expected training samples that it has trained, in [0, 1], as last reported.
        num_failures: Number of executors in a row that ended with a failure that counts.
        reason: Reason of its latest failure.
        ended: End of its latest executor; None if none has ended.
    """

    task: str
    state: TaskState
    tenant: str
    priority: int
    num_gpus: int
    gpus: tuple[Gpu, ...]
    attempt: int
    expected_s: float
    share_done: float
    num_failures: int
    reason: str
    ended: ExecutorEnded | None

    @property
    def has_ended(self) -> bool:
        """Whether the task is finished, failed or stopped for good."""
        return self.state in (TaskState.FINISHED, TaskState.FAILED, TaskState.STOPPED)


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerStatus:
    """The current status of a controller.

    Attributes:
        nodes: The machines and their GPUs.
        tasks: All submitted tasks by name, in order of submission.
        is_draining: Whether running executors were asked to save and end, and no others are started.
    """

    nodes: tuple[Node, ...]
    tasks: Mapping[str, TaskStatus]
    is_draining: bool = False

    @property
    def open_tasks(self) -> tuple[str, ...]:
        """Names of the tasks that have not ended."""
        return tuple(name for name, task in self.tasks.items() if not task.has_ended)
