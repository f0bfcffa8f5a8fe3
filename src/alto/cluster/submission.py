"""The runs that are submitted to a controller, and the status that it reports."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from alto.cluster.base import ExecutorEnded
from alto.records import Gpu, Node, TaskEstimate
from alto.scheduler import TaskDemand
from alto.scheduler.queue import TaskState

__all__ = ["ControllerStatus", "Submission", "TaskRun", "TaskStatus"]


ONE_SECOND = TaskEstimate(duration_s=1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRun:
    """A run on disk, and how it is executed.

    Attributes:
        task: Name of the task, unique in the controller.
        run_dir: Folder of the run; it exists, and on a cluster every node sees it at this path.
        entry: Function or class that the executor runs; see :class:`alto.cluster.Launch`.
        num_gpus: Number of GPUs that it runs on.
        estimate: Expected duration, and data for sharing an executor.
        is_parallel: Whether an executor has one process (rank) for each of its GPUs, or else one process for all.
        trust_remote_code: See :class:`alto.cluster.Launch`.
        base: Key of its base model; see :class:`alto.cluster.Launch`.
        retry_interrupted: Whether an executor that ended as ``interrupted`` without a request of this controller is
            started again.
        how_far: Returns the run's progress on disk as numbers that only grow. A lost executor that has increased one of
            them resets the count of failures in a row. With None, no executor resets it.
    """

    task: str
    run_dir: str
    entry: str
    num_gpus: int = 1
    estimate: TaskEstimate = ONE_SECOND
    is_parallel: bool = False
    trust_remote_code: bool = False
    base: str = ""
    retry_interrupted: bool = True
    how_far: Callable[[], tuple[float, ...]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A run to be executed, with its tenant and priority.

    Attributes:
        tenant: Tenant whose quota it counts against.
        priority: Higher goes first.
    """

    run: TaskRun
    tenant: str = ""
    priority: int = 0

    def demand(self, release_s: float) -> TaskDemand:
        """Return the scheduler's request for the run; ``release_s`` is on the queue's clock."""
        return TaskDemand(
            task=self.run.task,
            num_gpus=self.run.num_gpus,
            duration_s=self.run.estimate.duration_s,
            sharing=self.run.estimate.sharing,
            release_s=release_s,
            priority=self.priority,
            tenant=self.tenant,
        )


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
