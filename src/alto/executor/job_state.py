"""The state of one job while its task runs."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from alto.data import DataOrder, MixtureOrder
from alto.executor.context import TaskContext
from alto.executor.planned_job import PlannedJob
from alto.lora import AdapterShape, AdapterWeights
from alto.spec import JobConfig

__all__ = ["JobState", "initial_states"]


@dataclass(slots=True, kw_only=True, eq=False)
class JobState:
    """One job of a task that runs.

    Attributes:
        planned: Its constant part: configuration, shape, steps.
        context: Its task, which holds its rows, objective, metric and early-exit settings.
        starts_warm: A clone that begins with the adapter in its ``start`` folder.
        forked_at: Steps after which it continues where another job was; 0 of all others.
        fits: Whether a bank with a slot for its adapter fits into memory, as far as is known.
        step: Steps done.
        slot: Where it is resident, counted over all ranks; None while it is pending, parked or over.
        is_data_parallel: Every rank holds a copy of its adapter in the same local slot and trains a part of its rows;
            ``slot`` is that of the first.
        saved_step: Step of its ``last`` state on disk, or after which it ended for good; 0 while there is none.
        is_resumable: Its ``last`` state is saved; not of a job that has ended for good.
        saved_best_step: Step of its ``best`` state on disk; 0 while there is none.
        unsaved_losses: Training losses since the last ``train`` event.
        unsaved_router_losses: Load-balancing losses of the same steps; empty where it trains without.
        unsaved_best: Step and weights of its best adapter, where it is not on disk yet; only the rank that will write
            them has the weights.
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
        """Whether it has to be evaluated after the steps it has done."""
        return self.step in self.planned.evaluation_steps

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next step."""
        return self.config.learning_rate_at(self.step, self.planned.schedule_steps)

    @property
    def step_tokens(self) -> int:
        """Tokens of one of its steps in expectation, rounded up."""
        num_rows = min(self.config.rows_per_step, len(self.context.data.train))
        return math.ceil(num_rows * self.context.row_tokens)

    @property
    def next_step_tokens(self) -> int:
        """Tokens of its next step."""
        rows = self.order.rows_of_step(self.step)
        return sum(self.context.data.train.num_row_tokens[row] for row in rows)

    @property
    def needs_own_slot(self) -> bool:
        """Whether the bank has a slot more for it: not for one that takes the place of another, as the search adds
        them."""
        is_initial = any(job is self.planned for job in self.context.jobs)
        return is_initial or not (self.forked_at or self.planned.job.values)

    def samples_until(self, num_steps: int) -> int:
        """Training rows that it has read itself after ``num_steps`` steps; a row counts each time it is read."""
        num_rows = len(self.context.data.train)
        return self.config.samples_after(num_steps, num_rows) - self.config.samples_after(self.forked_at, num_rows)


def initial_states(context: TaskContext) -> list[JobState]:
    """Every job of a task before its first step, none of them resident."""
    return [JobState(planned=job, context=context) for job in context.jobs]
