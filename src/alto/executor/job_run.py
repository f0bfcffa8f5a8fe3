"""The state of one job while its task runs."""

from __future__ import annotations

from dataclasses import dataclass, field

from alto.backbone import Backbone
from alto.data import DataOrder, TaskData
from alto.early_exit import evaluation_steps, policy_from
from alto.lora import AdapterShape, AdapterWeights, find_targets, linear_modules
from alto.spec import Job, JobConfig, Task

__all__ = ["JobRun", "plan_jobs"]


@dataclass(slots=True, kw_only=True)
class JobRun:
    """One job: what is fixed, and how far it is.

    Attributes:
        shape: Rank and targets of its adapter.
        order: Which rows each step trains.
        total_steps: Steps if nothing ends it early.
        evaluation_steps: Counts of steps done after which it is evaluated.
        step: Steps done.
        slot: Where it sits; None while it is pending, parked or over.
        unsaved_losses: Training losses since the last ``train`` event.
        unsaved_best: Its best adapter, where that is not on disk yet.
    """

    job: Job
    shape: AdapterShape
    order: DataOrder
    total_steps: int
    evaluation_steps: frozenset[int]
    step: int = 0
    slot: int | None = None
    unsaved_losses: list[float] = field(default_factory=list)
    unsaved_best: AdapterWeights | None = None

    @property
    def id(self) -> str:
        return self.job.id

    @property
    def config(self) -> JobConfig:
        return self.job.config

    @property
    def learning_rate(self) -> float:
        """The rate of the step that comes next."""
        return self.config.learning_rate_at(self.step, self.total_steps)


def plan_jobs(task: Task, backbone: Backbone, data: TaskData) -> list[JobRun]:
    """Every job of ``task`` on this base model and data, before its first step.

    Raises:
        TargetModuleError: A job's targets or rank do not fit the base model.
        UnsupportedModelError: A row is too long for this base model to train beside others.
    """
    backbone.check_length(max(data.train.longest, data.validation.longest))
    modules, num_rows, rungs = linear_modules(backbone.model), len(data.train), policy_from(task.early_exit).rungs
    runs = []
    for job in task.jobs:
        config, total_steps = job.config, job.config.total_steps(num_rows)
        targets = find_targets(modules, config.target_modules, config.r)
        runs.append(
            JobRun(
                job=job,
                shape=AdapterShape(rank=config.r, targets=targets),
                order=DataOrder(num_rows, config.per_device_train_batch_size, config.seed),
                total_steps=total_steps,
                evaluation_steps=frozenset(evaluation_steps(total_steps, task.eval_steps, rungs)),
            )
        )
    return runs
