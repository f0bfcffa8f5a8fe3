"""The state of one task in a queue."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from alto.errors import SpecError
from alto.records import Gpu, Node
from alto.scheduler.inter_task import LIST_METHODS, TaskDemand
from alto.scheduler.queue.events import Offered

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
class ScheduledTask:
    """One task of a queue. Only the queue changes it; times are on the queue's clock.

    Attributes:
        number: Position in the order of submission.
        demand: Its demand, with the latest estimate for the next or running attempt; ``ready_s`` replaces its release.
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


MAX_ATTEMPTS_IN_ALL = 10
"""Limit of all attempts of a task, including attempts that lost a GPU, as a multiple of ``max_attempts``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSettings:
    """The settings of a queue for planning and retries.

    Attributes:
        quotas: Maximum number of GPUs that a tenant holds at a time; other tenants have no limit.
        estimate_change: Relative change of a task's estimated duration above which a new plan is made.
        max_attempts: Number of failures after which a task is given up, at the end of the pause after its last failure.
            An attempt that lost one of its GPUs does not count, even if the loss is reported during that pause. All
            attempts together are limited to `MAX_ATTEMPTS_IN_ALL` times this number.
        backoff_s: Pause after the first failure of a task; doubled after each further failure.
        max_planned: Number of waiting and running tasks above which a plan contains only the tasks that start now,
            chosen by ``list_method``. This does not apply if waiting tasks differ in priority, because then later
            starts of higher ones must be protected. None: no limit.
        declared: Machines that the cluster had before. A task that fits on them or on the present ones is accepted, and
            waits until it can be placed.
        list_method: One of :data:`LIST_METHODS`.

    Raises:
        SpecError: A value is out of its bounds.
    """

    quotas: Mapping[str, int] = field(default_factory=dict)
    estimate_change: float = 0.25
    max_attempts: int = 3
    backoff_s: float = 10.0
    max_backoff_s: float = 600.0
    max_planned: int | None = None
    declared: tuple[Node, ...] = ()
    list_method: str = "lpt"

    def __post_init__(self) -> None:
        _check("max_attempts", self.max_attempts, least=1)
        if self.max_planned is not None:
            _check("max_planned", self.max_planned, least=0)
        if self.list_method not in LIST_METHODS:
            raise SpecError(
                f"list_method: expected one of {', '.join(LIST_METHODS)}, found {self.list_method!r}; correct it"
            )
        for name in ("estimate_change", "backoff_s", "max_backoff_s"):
            _check(name, getattr(self, name), least=0)
        for tenant, quota in self.quotas.items():
            _check(f"quota of tenant {tenant!r}", quota, least=1)

    def pause_s(self, num_failures: int) -> float:
        """Return the pause of a task after ``num_failures`` failures, in seconds."""
        return min(self.max_backoff_s, self.backoff_s * 2.0 ** min(num_failures - 1, 60))


def _check(name: str, value: float, *, least: int) -> None:
    if not (math.isfinite(value) and value >= least):
        raise SpecError(f"{name}: expected a number of at least {least}, found {value}; correct it")
