"""The state of one job in a running task."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from alto.data import DataOrder, MixtureOrder
from alto.executor.context import TaskContext
from alto.executor.planned_job import PlannedJob
from alto.lora import AdapterShape, AdapterWeights
from alto.spec import JobConfig


@dataclass(slots=True, kw_only=True, eq=False)
class JobState:
    """One job of a running task.

    Attributes:
        planned: The constant part of the job: configuration, shape, steps.
        context: The task's context, with rows, objective, metric and early-exit settings.
        starts_warm: Whether the job is a clone that begins with the adapter in its ``start`` folder.
        forked_at: Step from which it continues the state of another job; 0 for all other jobs.
        fits: Whether a bank with a slot for its adapter fits into memory, as far as is known.
        step: Steps done.
        slot: Its slot, counted over all ranks; None while it is pending, parked or has ended.
        is_data_parallel: Whether every rank holds a copy of its adapter in the same local slot and trains a part of its
            rows; ``slot`` is then the slot of the first copy.
        saved_step: Step of its ``last`` state on disk, or the step after which it ended for good; 0 before the first
            save.
        is_resumable: Whether its ``last`` state is kept, so that it can be resumed; false for a job that has ended for
            good.
        saved_best_step: Step of its ``best`` state on disk; 0 before the first save.
        unsaved_losses: Training losses since the last ``train`` event.
        unsaved_router_losses: Load-balancing losses of the same steps; empty if it trains without them.
        unsaved_best: Step and weights of its best adapter if it is not on disk yet; only the rank that will write the
            weights holds them.
    """

    planned: PlannedJob
    context: TaskContext = field(repr=False)
    starts_warm: bool = False
    forked_at: int = 0
    fits: bool = True
    step: int = 0
    slot: int | None = None
    is_data_parallel: bool = False
    saved_step: int = 0
    is_resumable: bool = True
    saved_best_step: int = 0
    unsaved_losses: list[float] = field(default_factory=list)
    unsaved_router_losses: list[float] = field(default_factory=list)
    unsaved_best: tuple[int, AdapterWeights | None] | None = None

    @property
    def id(self) -> str:
        return self.planned.id

    @property
    def config(self) -> JobConfig:
        return self.planned.config

    @property
    def shape(self) -> AdapterShape:
        return self.planned.shape

    @property
    def order(self) -> DataOrder | MixtureOrder:
        return self.planned.order

    @property
    def total_steps(self) -> int:
        return self.planned.total_steps

    @property
    def is_due(self) -> bool:
        """Whether it must be evaluated after the steps it has done."""
        return self.step in self.planned.evaluation_steps

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next step."""
        return self.config.learning_rate_at(self.step, self.planned.schedule_steps)

    @property
    def step_tokens(self) -> int:
        """Expected number of tokens of one of its steps, rounded up."""
        num_rows = min(self.config.rows_per_step, len(self.context.data.train))
        return math.ceil(num_rows * self.context.row_tokens)

    @property
    def next_step_tokens(self) -> int:
        """Number of tokens of its next step."""
        rows = self.order.rows_of_step(self.step)
        return sum(self.context.data.train.num_row_tokens[row] for row in rows)

    @property
    def needs_own_slot(self) -> bool:
        """Whether the bank needs one more slot for it; false for a job that the search adds, which takes the place of
        another."""
        is_initial = any(job is self.planned for job in self.context.jobs)
        return is_initial or not (self.forked_at or self.planned.job.values)

    def samples_until(self, num_steps: int) -> int:
        """Return the training rows that the job itself has read after ``num_steps`` steps; a row counts each time it is
        read."""
        num_rows = len(self.context.data.train)
        return self.config.samples_after(num_steps, num_rows) - self.config.samples_after(self.forked_at, num_rows)


def initial_states(context: TaskContext) -> list[JobState]:
    """Return the state of every job of a task before its first step; none is resident."""
    return [JobState(planned=job, context=context) for job in context.jobs]
