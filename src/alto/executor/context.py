"""A task that is ready to be profiled or trained: its constant context, and the state of each of its jobs."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Self

from alto.backbone import Backbone, check_classifier, check_router_loss
from alto.data import DataOrder, TaskData
from alto.early_exit import Policy, evaluation_order, policy_from
from alto.errors import UnsupportedModelError
from alto.evaluation import Rewards
from alto.executor.init_adapter import InitAdapter
from alto.executor.planned_job import (
    PlannedJob,
    has_comparable_rows,
    may_fit_rungs,
    plan_job,
    plan_jobs,
    resolve_early_exit,
    trains_router_loss,
)
from alto.executor.ranks import Ranks
from alto.lora import AdapterShape, AdapterWeights, adapter_shape
from alto.objectives import Objective, find_objective
from alto.runs.events import ReferenceFact
from alto.spec import LOSS, BaseModelSpec, EarlyExit, GrpoSettings, Job, JobConfig, Task


@dataclass(frozen=True, kw_only=True, eq=False)
class TaskContext:
    """A task with its loaded base model and rows, and with jobs planned for them.

    Every job refers to the context of its task for objective, rows, metric and early-exit settings.

    Attributes:
        base: Specification of the base model in ``backbone`` and of how it was loaded.
        data: Tokenised rows; after :func:`alto.executor.stages.with_references` they include reference log-probs if the
            objective needs them.
        jobs: The jobs of the search space, without jobs that are added while the task runs.
        references: Source of the reference log-probs in ``data``; None if there are none.
        start: The adapter that jobs begin with; None if they begin with new adapters.
        ranks: This process among the ranks that train the task; all ranks hold equal contexts.
        requested_early_exit: Early-exit settings as the user gave them, before they were fitted to rows and machine;
            None if they are not to be fitted, as in a resumed run.
        rewards: Scorers of the completions that jobs generate, set before training; None if the method does not
            generate, and in a measurement.
    """

    task: Task
    base: BaseModelSpec
    backbone: Backbone
    data: TaskData
    jobs: tuple[PlannedJob, ...]
    objective: Objective
    policy: Policy
    references: ReferenceFact | None = None
    start: InitAdapter | None = None
    ranks: Ranks = field(default_factory=Ranks)
    requested_early_exit: EarlyExit | None = None
    rewards: Rewards | None = None

    @classmethod
    def of(
        cls,
        task: Task,
        backbone: Backbone,
        data: TaskData,
        ranks: Ranks | None = None,
        *,
        start: InitAdapter | None = None,
        requested_early_exit: EarlyExit | None = None,
    ) -> Self:
        """Plan every job of ``task``.

        Args:
            ranks: This process among the ranks that train the task; None if it is alone.
            start: The adapter that jobs begin with; None if they begin with new adapters.
            requested_early_exit: Early-exit settings as the user gave them; None if they are not to be fitted.

        Raises:
            TargetModuleError: A job's targets or rank do not fit the base model, or differ from those of ``start``.
            UnsupportedError: A job's optimizer is not installed or does not support the model's device; or no installed
                package provides the task's method.
            UnsupportedModelError: A row is too long to be batched with others on this base model; transformers has no
                sequence classification for it, or computes other logits than ALTO; or a job trains with the
                load-balancing loss of its routers, and the model computes a different loss.
        """
        backbone.check_length(max(split.longest_sequence for split in data.splits))
        if task.label_set is not None:
            check_classifier(backbone, task.label_set)
        _check_temperatures(task, backbone)
        if trains_router_loss(task, backbone.model):
            check_router_loss(backbone)
        jobs = plan_jobs(task, backbone.model, len(data.train), data.train.sources)
        if start is not None:
            _check_start(start, task, backbone, jobs)
        return cls(
            task=task,
            base=task.base_model,
            backbone=backbone,
            data=data,
            jobs=jobs,
            objective=find_objective(task.method),
            policy=policy_from(task.early_exit),
            start=start,
            ranks=ranks or Ranks(),
            requested_early_exit=requested_early_exit,
        )

    def at_forward_share(self, forward_share: float) -> TaskContext:
        """Return the context with the evaluations that ``early_exit.evaluation_share`` pays for, if evaluating a token
        takes ``forward_share`` times as long as training it."""
        if self.requested_early_exit is None:
            return self
        requested = self.task.replace(early_exit=self.requested_early_exit)
        task = resolve_early_exit(requested, self.data, begins=True, forward_share=forward_share)
        if task.early_exit == self.task.early_exit:
            return self
        train = self.data.train
        jobs = plan_jobs(task, self.backbone.model, len(train), train.sources)
        return replace(self, task=task, jobs=jobs, policy=policy_from(task.early_exit))

    @property
    def fits_rungs(self) -> bool:
        """Whether rungs may keep fewer jobs to fit a time budget."""
        return self.requested_early_exit is not None and may_fit_rungs(
            self.task.replace(early_exit=self.requested_early_exit)
        )

    @property
    def evaluation_notes(self) -> tuple[str, ...]:
        """A note if the winner is not measured on all validation rows."""
        final, num_rows = self.task.early_exit.final_evaluations, len(self.data.validation)
        if final is None or final[1] >= num_rows:
            return ()
        return (
            f"The validation loss of the winner will be measured on {final[1]:,} of the {num_rows:,} rows, as many as "
            "early_exit.evaluation_share allows; raise it to measure more.",
        )

    @cached_property
    def row_tokens(self) -> float:
        """Mean number of tokens of a training row."""
        return self.data.train.num_tokens / len(self.data.train)

    def tokens_of_rows(self, num_rows: int, config: JobConfig) -> int:
        """Return the expected number of tokens of ``num_rows`` training rows in a step of a job, rounded up.

        Completions that a job generates count with their maximum length.
        """
        if not self.objective.method.entry.generates:
            return math.ceil(num_rows * self.row_tokens)
        settings = config.objective
        assert isinstance(settings, GrpoSettings)
        prompt = self.row_tokens - self.data.train.num_trained_tokens / len(self.data.train)
        return math.ceil(num_rows * (prompt + settings.num_generations * settings.max_completion_length))

    @property
    def longest_row(self) -> int:
        """Largest number of tokens of a row of any split; with a method that generates, of a prompt and a
        completion."""
        longest = max(split.longest_row for split in self.data.splits)
        return longest + self.longest_completion

    @property
    def longest_completion(self) -> int:
        """Largest number of tokens that a job generates for a prompt; 0 if the method does not generate."""
        settings = [job.config.objective for job in self.jobs]
        return max((one.max_completion_length for one in settings if isinstance(one, GrpoSettings)), default=0)

    @cached_property
    def evaluation_order(self) -> tuple[int, ...]:
        """The order in which validation rows are evaluated; empty if every evaluation is on all rows."""
        if self.task.early_exit.evaluations is None or not has_comparable_rows(self.task):
            return ()
        return evaluation_order(len(self.data.validation), self.task.data_seed)

    @property
    def evaluation_tokens(self) -> int:
        """Tokens of one evaluation on all rows. It includes the test rows, because most evaluations are the best of
        their job so far and read them too, unless adapters are tested at the end."""
        held_out = self.data.splits[1:2] if self.evaluation_order else self.data.splits[1:]
        if not self.longest_completion:
            return sum(split.num_tokens for split in held_out)
        return sum(
            split.num_tokens - split.num_trained_tokens + len(split) * self.longest_completion for split in held_out
        )

    @property
    def has_final_evaluations(self) -> bool:
        """Whether evaluations are on few rows, so that the best adapters are measured again at the end."""
        return bool(self.evaluation_order)

    @property
    def row_weights(self) -> tuple[float, ...]:
        """Weights of the validation rows in ``evaluation_order``."""
        weights = self.validation_weights
        return tuple(weights[row] for row in self.evaluation_order)

    @property
    def validation_weights(self) -> tuple[int, ...]:
        """Weights of the validation rows in a mean loss: 1 each if jobs generate, because a reward is one number."""
        validation = self.data.validation
        return (1,) * len(validation) if self.objective.method.entry.generates else tuple(validation.weights)

    @property
    def row_values(self) -> tuple[str, ...]:
        """Names of the values that evaluations keep for every row: the loss, and the metric that selects jobs."""
        return tuple(dict.fromkeys((LOSS, self.task.metric)))

    @property
    def row_metric(self) -> str | None:
        """The metric that selects jobs; None if that is the loss."""
        return None if self.task.metric == LOSS else self.task.metric

    def plan(self, job: Job) -> PlannedJob:
        """Plan a job that is added while the task runs.

        Raises:
            SpecError, DataError: The objective cannot learn from the task's rows with the job's settings.
            TargetModuleError, UnsupportedError, UnsupportedModelError: See :meth:`of`.
        """
        self.objective.check(self.data.train, [job.config])
        train = self.data.train
        planned = plan_job(job, self.task, self.backbone.model, len(train), train.sources)
        if self.start is not None:
            self.start.check_job(job.id, job.config, planned.shape)
        if planned.router_aux_loss_coef:
            check_router_loss(self.backbone)
        return planned


def _check_temperatures(task: Task, backbone: Backbone) -> None:
    """Check that the base model's logits can be divided by the temperatures of all jobs."""
    configs = (*(job.config for job in task.jobs), *task.extreme_configs())
    if not backbone.scales_logits and any(config.objective.logit_scale != 1.0 for config in configs):
        raise UnsupportedModelError(
            f"temperature: expected 1 with {task.model}, whose output head caps its logits or has a bias, found "
            "another value; remove the key"
        )


def _check_start(start: InitAdapter, task: Task, backbone: Backbone, jobs: tuple[PlannedJob, ...]) -> None:
    """Check that every job, and every job that the search may add, trains the same kind of adapter as ``start``."""
    for job in jobs:
        start.check_job(job.id, job.config, job.shape)
    for config in task.extreme_configs():
        shape = adapter_shape(backbone.model, config, task.label_set)
        start.check_job("a job that the search may add", config, shape)


ROUTER_LOSS = "router_loss"
"""Name of the routers' load-balancing loss among the measurements of a step."""


@dataclass(slots=True, kw_only=True, eq=False)
class JobState:
    """One job of a running task.

    Attributes:
        starts_warm: Whether the job is a clone that begins with the adapter in its ``start`` folder.
        forked_at: Step from which it continues the state of another job; 0 for all other jobs.
        fits: Whether a bank with a slot for its adapter fits into memory, as far as is known.
        slot: Its slot, counted over all ranks; None while it is pending, parked or has ended.
        is_data_parallel: Whether every rank holds a copy of its adapter in the same local slot and trains a part of its
            rows; ``slot`` is then the slot of the first copy.
        saved_step: Step of its ``last`` state on disk, or the step after which it ended for good; 0 before the first
            save.
        is_resumable: Whether its ``last`` state is kept, so that it can be resumed; false for a job that has ended for
            good.
        saved_best_step: Step of its ``best`` state on disk; 0 before the first save.
        unsaved_losses: Training losses since the last ``train`` event.
        unsaved_metrics: Other measurements of the same steps, by name; see ``Trainer.step_metrics``.
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
    unsaved_metrics: dict[str, list[float]] = field(default_factory=dict)
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
    def order(self) -> DataOrder:
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
        return self.context.tokens_of_rows(num_rows, self.config)

    @property
    def next_step_tokens(self) -> int:
        """Number of tokens of its next step; expected, if it generates them."""
        if self.context.objective.method.entry.generates:
            return self.step_tokens
        rows = self.order.rows_of_step(self.step)
        return sum(self.context.data.train.num_row_tokens[row] for row in rows)

    @property
    def needs_own_slot(self) -> bool:
        """Whether the bank needs one more slot for this job. A job that the search adds uses the slot of another
        job."""
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
