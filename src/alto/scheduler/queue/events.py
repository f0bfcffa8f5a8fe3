"""The events that drive a queue. ``time_s`` is on the driver's clock: real or virtual, and never decreasing.

``attempt`` identifies one executor run of a task: an executor that was reported as lost may still send events.
"""

from __future__ import annotations

from dataclasses import dataclass

from alto.records import Gpu, Schedule
from alto.scheduler.inter_task import TaskDemand


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted:
    """A task was submitted; ``demand.release_s`` is on the queue's clock."""

    time_s: float
    demand: TaskDemand


@dataclass(frozen=True, slots=True, kw_only=True)
class Profiled:
    """A new estimate of a waiting task's duration."""

    time_s: float
    task: str
    duration_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Prioritised:
    """A new priority of a waiting task."""

    time_s: float
    task: str
    priority: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The executor of a task has begun to work."""

    time_s: float
    task: str
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Progressed:
    """A new estimate of a running task's remaining duration."""

    time_s: float
    task: str
    attempt: int
    remaining_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Offered:
    """An offer of a running task to continue on fewer GPUs; meanwhile it continues on all its GPUs.

    Attributes:
        time_s: Time on the queue's clock.
        task: Name of the task.
        num_gpus: The smaller number of GPUs.
        duration_s: Remaining seconds on ``num_gpus`` GPUs, including the restart.
        kept_duration_s: Remaining seconds on its present GPUs.
    """

    time_s: float
    task: str
    attempt: int
    num_gpus: int
    duration_s: float
    kept_duration_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A task has its result."""

    time_s: float
    task: str
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The executor of a task ended without a result.

    Attributes:
        time_s: Time on the queue's clock.
        task: Name of the task.
        reason: Why it ended.
        is_retryable: Whether another attempt may end differently.
        remaining_s: Estimated seconds of the next attempt; None keeps the estimate.
        came_further: Whether the attempt saved progress; the count of consecutive failures then restarts at 0.
    """

    time_s: float
    task: str
    attempt: int
    reason: str
    is_retryable: bool
    remaining_s: float | None = None
    came_further: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped:
    """The user cancelled a task, which may wait or run."""

    time_s: float
    task: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuLost:
    """A GPU is gone. A task that ran on it gets its own `Failed` event, before, with or after this event."""

    time_s: float
    gpu: Gpu


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuAdded:
    """A GPU joined or came back."""

    time_s: float
    gpu: Gpu


@dataclass(frozen=True, slots=True, kw_only=True)
class Woken:
    """The wake-up time requested by the queue has come."""

    time_s: float


QueueEvent = (
    Submitted
    | Profiled
    | Prioritised
    | Started
    | Progressed
    | Offered
    | Finished
    | Failed
    | Stopped
    | GpuLost
    | GpuAdded
    | Woken
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StartTask:
    """Launch the executor of a task, or resume the task if an earlier attempt left a checkpoint.

    Attributes:
        task: Name of the task.
        gpus: Its GPUs.
        attempt: Number of the attempt; 1 for the first.
        executor: Name of the executor that trains the task, unique in the queue's life. If an earlier action named it,
            it runs already and the task joins it. If empty, no other task joins.
    """

    task: str
    gpus: tuple[Gpu, ...]
    attempt: int
    executor: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopTask:
    """End an attempt of a task, but not of other tasks in its executor. The task keeps its GPUs until an event reports
    its end."""

    task: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A new schedule of the waiting tasks and the reason for it, to be written to the journal."""

    reason: str
    schedule: Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class GaveUp:
    """A task that will not be tried again."""

    task: str
    reason: str


Action = StartTask | StopTask | Planned | GaveUp
