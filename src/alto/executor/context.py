"""The context of one task that is ready to be profiled or trained: everything that stays the same while it runs."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Self

from alto.backbone import Backbone, check_classifier, check_router_loss
from alto.data import TaskData
from alto.early_exit import Policy, evaluation_order, policy_from
from alto.executor.planned_job import (
    PlannedJob,
    may_fit_rungs,
    plan_job,
    plan_jobs,
    resolve_early_exit,
    trains_router_loss,
)
from alto.executor.ranks import Ranks
from alto.executor.start_adapter import StartAdapter
from alto.lora import adapter_shape
from alto.objectives import Objective, find_objective
from alto.runs.events import ReferenceFact
from alto.spec import LOSS, BaseModelSpec, EarlyExit, Job, Task


@dataclass(frozen=True, kw_only=True, eq=False)
class TaskContext:
    """A task whose base model and rows are loaded and whose jobs are planned for them.

    Every job refers to the context of its task for objective, rows, metric and early-exit settings.

    Attributes:
        base: Specification of the base model in ``backbone`` and of how it was loaded.
        data: Tokenised rows; after :func:`alto.executor.stages.with_references` they include reference log-probs if the
            objective needs them.
        jobs: The jobs of the search space, without jobs that are added while the task runs.
        objective: Loss and metrics of the jobs.
        policy: Decides which jobs end early.
        references: Source of the reference log-probs in ``data``; None if there are none.
        start: The adapter that jobs begin with; None if they begin with new adapters.
        ranks: This process among the ranks that train the task; all ranks hold equal contexts.
        asked: Early-exit settings as the user gave them, before they were fitted to rows and machine; None if they are
            not to be fitted, as in a resumed run.
    """

    task: Task
    base: BaseModelSpec
    backbone: Backbone
    data: TaskData
    jobs: tuple[PlannedJob, ...]
    objective: Objective
    policy: Policy
    references: ReferenceFact | None = None
    start: StartAdapter | None = None
    ranks: Ranks = field(default_factory=Ranks)
    asked: EarlyExit | None = None

    @classmethod
    def of(
        cls,
        task: Task,
        backbone: Backbone,
        data: TaskData,
        ranks: Ranks | None = None,
        *,
        start: StartAdapter | None = None,
        asked: EarlyExit | None = None,
    ) -> Self:
        """Plan every job of ``task``.

        Args:
            backbone: The base model that the task names, loaded as ``task.base_model`` says.
            data: The task's rows, encoded with its tokenizer.
            ranks: This process among the ranks that train the task; None if it is alone.
            start: The adapter that jobs begin with; None if they begin with new adapters.
            asked: Early-exit settings as the user gave them; None if they are not to be fitted.

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
            asked=asked,
        )

    def at_forward_share(self, forward_share: float) -> TaskContext:
        """Return the context with the evaluations that ``early_exit.evaluation_share`` pays for, if evaluating a token
        takes ``forward_share`` times as long as training it."""
        if self.asked is None:
            return self
        asked = self.task.replace(early_exit=self.asked)
        task = resolve_early_exit(asked, self.data, begins=True, forward_share=forward_share)
        if task.early_exit == self.task.early_exit:
            return self
        train = self.data.train
        jobs = plan_jobs(task, self.backbone.model, len(train), train.sources)
        return replace(self, task=task, jobs=jobs, policy=policy_from(task.early_exit))

    @property
    def fits_rungs(self) -> bool:
        """Whether rungs may keep fewer jobs to fit a time budget."""
        return self.asked is not None and may_fit_rungs(self.task.replace(early_exit=self.asked))

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

    @cached_property
    def evaluation_order(self) -> tuple[int, ...]:
        """The order in which validation rows are evaluated; empty if every evaluation is on all rows."""
        if self.task.early_exit.evaluations is None:
            return ()
        return evaluation_order(len(self.data.validation), self.task.data_seed)

    @property
    def evaluation_tokens(self) -> int:
        """Tokens of one evaluation on all rows. It includes the test rows, because most evaluations are the best of
        their job so far and read them too, unless adapters are tested at the end."""
        held_out = self.data.splits[1:2] if self.evaluation_order else self.data.splits[1:]
        return sum(split.num_tokens for split in held_out)

    @property
    def has_final_evaluations(self) -> bool:
        """Whether evaluations are on few rows, so that the best adapters are measured again at the end."""
        return bool(self.evaluation_order)

    @property
    def row_weights(self) -> tuple[float, ...]:
        """Weights of the validation rows in ``evaluation_order``."""
        weights = self.data.validation.weights
        return tuple(weights[row] for row in self.evaluation_order)

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


def _check_start(start: StartAdapter, task: Task, backbone: Backbone, jobs: tuple[PlannedJob, ...]) -> None:
    """Check that every job, and every job that the search may add, trains the same kind of adapter as ``start``."""
    for job in jobs:
        start.check_job(job.id, job.config, job.shape)
    for config in task.extreme_configs():
        shape = adapter_shape(backbone.model, config, task.label_set)
        start.check_job("a job that the search may add", config, shape)
