"""The events that drive a queue. ``time_s`` is on the driver's clock: real or virtual, and never decreasing.

``attempt`` is the number of an attempt at a task: an attempt that was reported as lost may still send events.
"""

from __future__ import annotations

from dataclasses import dataclass

from alto.records import Gpu, Schedule
from alto.scheduler.inter_task import TaskDemand


@dataclass(frozen=True, slots=True, kw_only=True)
class _Event:
    """An event at a time."""

    time_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _TaskEvent(_Event):
    """An event of the task with the name ``task``."""

    task: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _AttemptEvent(_TaskEvent):
    """An event of one attempt at a task."""

    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted(_Event):
    """A task was submitted; ``demand.release_s`` is on the queue's clock."""

    demand: TaskDemand


@dataclass(frozen=True, slots=True, kw_only=True)
class Prioritised(_TaskEvent):
    """A new priority of a waiting task."""

    priority: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Started(_AttemptEvent):
    """An attempt at a task has begun to work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progressed(_AttemptEvent):
    """A new estimate of a running task's remaining duration."""

    remaining_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Offered(_AttemptEvent):
    """An offer of a running task to continue on fewer GPUs; meanwhile it continues on all its GPUs.

    Attributes:
        num_gpus: The smaller number of GPUs.
        duration_s: Remaining seconds on ``num_gpus`` GPUs, including the restart.
        kept_duration_s: Remaining seconds on its present GPUs.
    """

    num_gpus: int
    duration_s: float
    kept_duration_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished(_AttemptEvent):
    """A task has its result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed(_AttemptEvent):
    """An attempt at a task ended without a result.

    Attributes:
        is_retryable: Whether another attempt may end differently.
        remaining_s: Estimated seconds of the next attempt; None keeps the estimate.
        has_progressed: Whether the attempt saved progress; the count of consecutive failures then restarts at 0.
    """

    reason: str
    is_retryable: bool
    remaining_s: float | None = None
    has_progressed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancelled(_TaskEvent):
    """The user cancelled a task, which may wait or run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuLost(_Event):
    """A GPU is gone. A task that ran on it gets its own `Failed` event, before, with or after this event."""

    gpu: Gpu


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuAdded(_Event):
    """A GPU joined or came back."""

    gpu: Gpu


@dataclass(frozen=True, slots=True, kw_only=True)
class Woken(_Event):
    """The wake-up time requested by the queue has come."""


QueueInput = (
    Submitted
    | Prioritised
    | Started
    | Progressed
    | Offered
    | Finished
    | Failed
    | Cancelled
    | GpuLost
    | GpuAdded
    | Woken
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StartTask:
    """Start an attempt at a task; it resumes from the checkpoint of an earlier one if there is any.

    Attributes:
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
