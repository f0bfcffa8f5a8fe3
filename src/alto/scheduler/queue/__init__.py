"""Decides which task starts when: a pure state machine driven by events."""

from alto.scheduler.queue.events import (
    Action,
    Cancelled,
    Failed,
    Finished,
    GaveUp,
    GpuAdded,
    GpuLost,
    Offered,
    Planned,
    Prioritised,
    Progressed,
    QueueInput,
    Started,
    StartTask,
    StopTask,
    Submitted,
    Woken,
)
from alto.scheduler.queue.queue import Queue, Solve
from alto.scheduler.queue.task import QueueSettings, ScheduledTask, TaskState

__all__ = [
    "Action",
    "Cancelled",
    "Failed",
    "Finished",
    "GaveUp",
    "GpuAdded",
    "GpuLost",
    "Offered",
    "Planned",
    "Prioritised",
    "Progressed",
    "Queue",
    "QueueInput",
    "QueueSettings",
    "ScheduledTask",
    "Solve",
    "StartTask",
    "Started",
    "StopTask",
    "Submitted",
    "TaskState",
    "Woken",
]
