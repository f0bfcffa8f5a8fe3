"""What is handed to a controller, and what it says of that."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from alto.cluster.base import ExecutorEnded
from alto.records import Gpu, Node
from alto.scheduler import TaskDemand
from alto.scheduler.queue import TaskState

__all__ = ["ControllerStatus", "Submission", "TaskRun", "TaskStatus"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRun:
    """A run on disk, and what is executed for it.

    Attributes:
        task: Its name, unique in the controller.
        run_dir: Folder of the run, made already; on a cluster, every node sees it at this path.
        entry: What an executor does, as of :class:`alto.cluster.Launch`.
        num_gpus: GPUs that it runs on.
        duration_s: What it is estimated to take.
        is_parallel: Whether an executor is a process (rank) for each of its GPUs; else it is one process on all.
        trust_remote_code: As of :class:`alto.cluster.Launch`.
        retry_interrupted: Whether an executor that ended as if asked to stop, though nobody here had asked, is started
            again.
        how_far: How far the run has come on disk: numbers of which each only grows. An executor that is lost and has
            made one of them grow is no failure in a row. None: every lost executor is.
    """

    task: str
    run_dir: str
    entry: str
    num_gpus: int = 1
    duration_s: float = 1.0
    is_parallel: bool = False
    trust_remote_code: bool = False
    retry_interrupted: bool = True
    how_far: Callable[[], tuple[float, ...]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A run to be executed, and for whom.

    Attributes:
        tenant: Whose quota it counts against; whoever submits says it.
        priority: Higher goes first.
    """

    run: TaskRun
    tenant: str = ""
    priority: int = 0

    def demand(self, release_s: float) -> TaskDemand:
        """What the scheduler is asked for; ``release_s`` is on the queue's clock."""
        return TaskDemand(
            task=self.run.task,
            num_gpus=self.run.num_gpus,
            duration_s=self.run.duration_s,
            release_s=release_s,
            priority=self.priority,
            tenant=self.tenant,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskStatus:
    """One task as it is now.

    Attributes:
        num_gpus: GPUs that it asks for.
        gpus: Its own while it runs; else none.
        attempt: Executors that were started for it.
        expected_s: What it, or its next attempt, is estimated to take from its start to its end.
        share_done: Of its samples that are trained or spared, in [0, 1], as far as the running executor has said.
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
        is_draining: Whether what runs was asked to save and end, and nothing is started any more.
    """

    nodes: tuple[Node, ...]
    tasks: Mapping[str, TaskStatus]
    is_draining: bool = False

    @property
    def open_tasks(self) -> tuple[str, ...]:
        """Tasks for which something is still to be done."""
        return tuple(name for name, task in self.tasks.items() if not task.has_ended)
