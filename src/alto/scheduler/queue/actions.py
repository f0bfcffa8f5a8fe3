"""The actions of a queue, to be carried out in order."""

from __future__ import annotations

from dataclasses import dataclass

from alto.records import Gpu, Schedule

__all__ = ["Action", "GaveUp", "Planned", "StartTask", "StopTask"]


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
