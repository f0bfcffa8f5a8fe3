"""The actions of a queue, to be carried out in order."""

from __future__ import annotations

from dataclasses import dataclass

from alto.records import Gpu, Schedule

__all__ = ["Action", "GaveUp", "Planned", "StartTask", "StopTask"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StartTask:
    """Launch the executor of a task, or resume it where an earlier attempt left a checkpoint.

    Attributes:
        task: Name of the task.
        gpus: Its GPUs.
        attempt: 1 for the first.
    """

    task: str
    gpus: tuple[Gpu, ...]
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StopTask:
    """End the executor of a task; the queue counts its GPUs as taken until an event reports its end."""

    task: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A new schedule of the tasks that wait, and why there is one; to be journaled."""

    reason: str
    schedule: Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class GaveUp:
    """A task will not be tried again."""

    task: str
    reason: str


Action = StartTask | StopTask | Planned | GaveUp
