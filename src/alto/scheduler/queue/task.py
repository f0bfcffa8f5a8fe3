"""The state of one task in a queue."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from alto.records import Gpu
from alto.scheduler.inter_task import TaskDemand
from alto.scheduler.queue.events import Offered

__all__ = ["LEAST_S", "QueuedTask", "TaskState"]

LEAST_S = 1e-3
"""Smallest estimate of an attempt, in seconds."""


class TaskState(StrEnum):
    """State of a task; the last three are final."""

    WAITING = "waiting"
    STARTING = "starting"
    RUNNING = "running"
    SHRINKING = "shrinking"
    """Is being ended, to continue with fewer GPUs; until its end it keeps its GPUs."""
    STOPPING = "stopping"
    """Is being ended; until its end is reported it keeps its GPUs."""
    FINISHED = "finished"
    FAILED = "failed"
    STOPPED = "stopped"


@dataclass(slots=True, kw_only=True)
class QueuedTask:
    """One task of a queue. Only the queue changes it; times are on the queue's clock.

    Attributes:
        number: In the order of submission.
        demand: Its demand, with the latest estimate of the next or running attempt; its release is ``ready_s``.
        submitted_s: When it was submitted.
        ready_s: It starts no earlier: its release, or the end of its pause after a failure.
        planned_s: The estimate that last led to a plan, in seconds from the start of the attempt to its end.
        state: Its state.
        attempt: The latest one; 0 before the first.
        num_failures: Attempts that count against the cap.
        gpus: Of the latest attempt.
        executor: Of the latest attempt: tasks with the same one share it; empty: nobody may join it.
        isolated_by: Attempt that was lost while it shared its executor: since then the task shares with nobody, so that
            a neighbour that ends the executor does not end this task again; 0: none was.
        started_s, expected_end_s: Of the latest attempt.
        ended_s: When it finished, failed for good or was stopped.
        offer: Remaining seconds of the latest attempt on fewer GPUs; None where it was not reported.
        has_lost_gpu: Whether a GPU of the latest attempt was lost while it ran, or in the pause after it.
        reason: Why it failed last, or was given up.
        waits_for: What is missing before it can be planned; empty where nothing is.
    """

    number: int
    demand: TaskDemand
    submitted_s: float
    ready_s: float
    planned_s: float
    state: TaskState = TaskState.WAITING
    attempt: int = 0
    num_failures: int = 0
    gpus: tuple[Gpu, ...] = ()
    executor: str = ""
    isolated_by: int = 0
    started_s: float = 0.0
    expected_end_s: float = 0.0
    ended_s: float | None = None
    offer: Offered | None = None
    has_lost_gpu: bool = False
    reason: str = ""
    waits_for: str = ""

    @property
    def name(self) -> str:
        return self.demand.task

    @property
    def wanted(self) -> TaskDemand:
        """Its demand as it is planned now."""
        return replace(self.demand, sharing=None) if self.isolated_by else self.demand

    @property
    def has_gpus(self) -> bool:
        """Whether it holds its GPUs."""
        return self.state in (TaskState.STARTING, TaskState.RUNNING, TaskState.SHRINKING, TaskState.STOPPING)

    @property
    def has_ended(self) -> bool:
        return self.ended_s is not None

    def begin_attempt(self, gpus: tuple[Gpu, ...], now_s: float, executor: str = "") -> None:
        """Note that an executor is started on ``gpus``, or joined there."""
        self.state = TaskState.STARTING
        self.attempt += 1
        self.gpus = gpus
        self.executor = executor
        self.started_s = now_s
        self.planned_s = self.demand.duration_s
        self.expected_end_s = now_s + self.demand.duration_s
        self.has_lost_gpu = False
        self.offer = None
