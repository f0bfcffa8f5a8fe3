"""The events that drive a queue. ``time_s`` is on the clock of its driver: real or virtual, never running backwards.

``attempt`` says which executor of a task an event is about; one that counted as lost may still send events.
"""

from __future__ import annotations

from dataclasses import dataclass

from alto.records import Gpu
from alto.scheduler.inter_task import TaskDemand

__all__ = [
    "Failed",
    "Finished",
    "GpuAdded",
    "GpuLost",
    "Offered",
    "Profiled",
    "Progressed",
    "QueueEvent",
    "Started",
    "Stopped",
    "Submitted",
    "Woken",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted:
    """A task came; ``demand.release_s`` is on the queue's clock."""

    time_s: float
    demand: TaskDemand


@dataclass(frozen=True, slots=True, kw_only=True)
class Profiled:
    """What a waiting task is now thought to take."""

    time_s: float
    task: str
    duration_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The executor of a task has begun to work."""

    time_s: float
    task: str
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Progressed:
    """What a running task is now thought to take still."""

    time_s: float
    task: str
    attempt: int
    remaining_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Offered:
    """A running task has come to where fewer GPUs may do; on those it has it goes on as fast as it can.

    Attributes:
        num_gpus: As many as would do.
        duration_s: What it would still take on so many, starting again on them included.
        kept_duration_s: What it still takes on those it has.
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
        is_retryable: Whether another attempt may end otherwise.
        remaining_s: What the next attempt is thought to take; None leaves the estimate.
        came_further: Whether the attempt has saved more than the one before it had: then the count of failures begins
            anew with the next one.
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
    """The user wants a task no more, whether it waits or runs."""

    time_s: float
    task: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuLost:
    """A GPU is gone; a task that ran on it is the subject of a `Failed` before, with or after it."""

    time_s: float
    gpu: Gpu


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuAdded:
    """A GPU came, or came back."""

    time_s: float
    gpu: Gpu


@dataclass(frozen=True, slots=True, kw_only=True)
class Woken:
    """The time has come that the queue asked to be woken at."""

    time_s: float


QueueEvent = (
    Submitted | Profiled | Started | Progressed | Offered | Finished | Failed | Stopped | GpuLost | GpuAdded | Woken
)
