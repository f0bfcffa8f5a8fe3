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
    """The state of a task; the last three are final."""

    WAITING = "waiting"
    STARTING = "starting"
    RUNNING = "running"
    SHRINKING = "shrinking"
    """Being stopped, to continue on fewer GPUs; keeps its GPUs until its end is reported."""
    STOPPING = "stopping"
    """Being stopped for good; keeps its GPUs until its end is reported."""
    FINISHED = "finished"
    FAILED = "failed"
    STOPPED = "stopped"


@dataclass(slots=True, kw_only=True)
class QueuedTask:
    """One task of a queue. Only the queue changes it; times are on the queue's clock.

    Attributes:
        number: Position in the order of submission.
        demand: Its demand, with the latest estimate for the next or running attempt; ``ready_s`` replaces its release.
        submitted_s: When it was submitted.
        ready_s: Earliest start: its release, or the end of its pause after a failure.
        planned_s: The estimate that last led to a plan, in seconds from the start of the attempt to its end.
        attempt: Number of the latest attempt; 0 before the first.
        num_failures: Failures that count towards ``max_attempts``.
        gpus: GPUs of the latest attempt.
        executor: Executor of the latest attempt. Tasks with the same name share it; empty: no other task may join it.
        isolated_by: Attempt that was lost while it shared its executor; 0 if none was. Since then the task does not
            share, so that another task that crashes the executor cannot end this task again.
        started_s, expected_end_s: Start and expected end of the latest attempt.
        ended_s: When it finished, failed for good or was stopped.
        offer: Offer of the latest attempt to continue on fewer GPUs; None if it made none.
        has_lost_gpu: Whether a GPU of the latest attempt was lost while it ran, or in the pause after it.
        reason: Why it last failed, or was given up.
        waits_for: The GPUs missing before it can be planned; empty if none are missing.
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
        """Its demand for the next plan, without sharing if the task is isolated."""
        return replace(self.demand, sharing=None) if self.isolated_by else self.demand

    @property
    def has_gpus(self) -> bool:
        """Whether it holds its GPUs."""
        return self.state in (TaskState.STARTING, TaskState.RUNNING, TaskState.SHRINKING, TaskState.STOPPING)

    @property
    def has_ended(self) -> bool:
        return self.ended_s is not None

    def begin_attempt(self, gpus: tuple[Gpu, ...], now_s: float, executor: str = "") -> None:
        """Record that an executor was started on ``gpus``, or joined there."""
        self.state = TaskState.STARTING
        self.attempt += 1
        self.gpus = gpus
        self.executor = executor
        self.started_s = now_s
        self.planned_s = self.demand.duration_s
        self.expected_end_s = now_s + self.demand.duration_s
        self.has_lost_gpu = False
        self.offer = None
