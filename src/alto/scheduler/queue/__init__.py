"""Decides which task starts when: a pure state machine driven by events."""

from alto.scheduler.queue.actions import Action, GaveUp, Planned, StartTask, StopTask
from alto.scheduler.queue.events import (
    Failed,
    Finished,
    GpuAdded,
    GpuLost,
    Offered,
    Prioritised,
    Profiled,
    Progressed,
    QueueEvent,
    Started,
    Stopped,
    Submitted,
    Woken,
)
from alto.scheduler.queue.queue import Queue, Solve
from alto.scheduler.queue.settings import QueueSettings
from alto.scheduler.queue.task import QueuedTask, TaskState

__all__ = [
    "Action",
    "Failed",
    "Finished",
    "GaveUp",
    "GpuAdded",
    "GpuLost",
    "Offered",
    "Planned",
    "Prioritised",
    "Profiled",
    "Progressed",
    "Queue",
    "QueueEvent",
    "QueueSettings",
    "QueuedTask",
    "Solve",
    "StartTask",
    "Started",
    "StopTask",
    "Stopped",
    "Submitted",
    "TaskState",
    "Woken",
]
