"""What is submitted to a controller, and the status that it reports."""

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
    """A run on disk, and what is executed for it.

    Attributes:
        task: Its name, unique in the controller.
        run_dir: Folder of the run, made already; on a cluster, every node sees it at this path.
        entry: What an executor does, as of :class:`alto.cluster.Launch`.
        num_gpus: GPUs that it runs on.
        estimate: What it is expected to take.
        is_parallel: Whether an executor is a process (rank) for each of its GPUs; else it is one process on all.
        trust_remote_code: As of :class:`alto.cluster.Launch`.
        base: Its base model, as of :class:`alto.cluster.Launch`.
        retry_interrupted: Whether an executor that ended as ``interrupted`` without a request of this controller is
            started again.
        how_far: Returns the run's progress on disk: numbers that only grow. A lost executor that has made one of them
            grow does not count as a failure in a row. None: every lost executor counts.
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
    """A run to be executed, and for whom.

    Attributes:
        run: The run on disk.
        tenant: Whose quota it counts against; set by the caller.
        priority: Higher goes first.
    """

    run: TaskRun
    tenant: str = ""
    priority: int = 0

    def demand(self, release_s: float) -> TaskDemand:
        """The scheduler's request for it; ``release_s`` is on the queue's clock."""
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
    """One task as it is now.

    Attributes:
        task: Its name.
        state: Its state in the queue.
        tenant: Whose quota it counts against.
        priority: Higher goes first.
        num_gpus: GPUs that it needs.
        gpus: Its own while it runs; else none.
        attempt: Number of executors that were started for it.
        expected_s: Estimated seconds of it, or its next attempt, from start to end.
        share_done: Of the samples that it is expected to train, the share that it has trained, in [0, 1], as last
            reported.
        num_failures: Executors in a row that ended as failures that count.
        reason: Why it failed last, or was given up.
        ended: How its latest executor ended; None where none has.
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
        """Whether nothing more will be done for it."""
        return self.state in (TaskState.FINISHED, TaskState.FAILED, TaskState.STOPPED)


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerStatus:
    """A controller as it is now.

    Attributes:
        nodes: The machines and their GPUs.
        tasks: All that were submitted, by name, in that order.
        is_draining: Whether running executors were requested to save and end, and no others are started.
    """

    nodes: tuple[Node, ...]
    tasks: Mapping[str, TaskStatus]
    is_draining: bool = False

    @property
    def open_tasks(self) -> tuple[str, ...]:
        """Tasks for which something is still to be done."""
        return tuple(name for name, task in self.tasks.items() if not task.has_ended)
