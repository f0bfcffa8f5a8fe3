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
        executor: The executor that trains it, which runs already where an earlier action has the same; empty: one that
            no other task joins. Unique in the queue's life.
    """

    task: str
    gpus: tuple[Gpu, ...]
    attempt: int
    executor: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopTask:
    """End an attempt of a task, not of others in its executor; until an event reports its end, it keeps its GPUs."""

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
