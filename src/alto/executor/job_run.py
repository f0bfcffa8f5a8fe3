"""The state of one job while its task runs."""

from __future__ import annotations

from dataclasses import dataclass, field

from transformers import PreTrainedModel

from alto.backbone import Backbone
from alto.data import DataOrder, TaskData
from alto.early_exit import evaluation_steps, policy_from
from alto.lora import AdapterShape, AdapterWeights, check_optimizer, find_targets
from alto.spec import Job, JobConfig, Task

__all__ = ["JobPlanner", "JobRun", "plan_jobs", "resolve_rungs"]


@dataclass(slots=True, kw_only=True)
class JobRun:
    """One job: what is fixed, and how far it is.

    Attributes:
        shape: Rank and targets of its adapter.
        order: Which rows each step trains.
        total_steps: Steps if nothing ends it early.
        evaluation_steps: Counts of steps done after which it is evaluated.
        starts_warm: A clone that begins with the adapter in its ``start`` folder.
        step: Steps done.
        slot: Where it sits, counted over all ranks; None while it is pending, parked or over.
        is_data_parallel: Every rank holds a copy of its adapter in the same place and trains a part of its rows;
            ``slot`` is that of the first.
        saved_step: Step of its ``last`` state on disk; 0 while there is none.
        unsaved_losses: Training losses since the last ``train`` event.
        saved_best_step: Step of its ``best`` state on disk; 0 while there is none.
        unsaved_best: Step and weights of its best adapter, where that is not on disk yet; the weights are with the
            rank that will write them.
    """

    job: Job
    shape: AdapterShape
    order: DataOrder
    total_steps: int
    evaluation_steps: frozenset[int]
    starts_warm: bool = False
    step: int = 0
    slot: int | None = None
    is_data_parallel: bool = False
    saved_step: int = 0
    saved_best_step: int = 0
    unsaved_losses: list[float] = field(default_factory=list)
    unsaved_best: tuple[int, AdapterWeights | None] | None = None

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


class JobPlanner:
    """Turns jobs of one task into runs that have not taken a step.

    Args:
        model: The base model, with or without injected adapters.
        num_rows: Rows of the training split.
    """

    def __init__(self, task: Task, model: PreTrainedModel, num_rows: int) -> None:
        self._model = model
        self._num_rows = num_rows
        self._eval_steps = task.eval_steps
        self._rungs = policy_from(task.early_exit).rungs

    def plan(self, job: Job) -> JobRun:
        """The run of ``job``.

        Raises:
            TargetModuleError: Its targets or rank do not fit the base model.
            UnsupportedError: Its optimizer is not installed, or not there on the model's device.
        """
        check_optimizer(job.config.optim, self._model.device)
        config, total_steps = job.config, job.config.total_steps(self._num_rows)
        targets = find_targets(self._model, config.target_modules, config.r)
        return JobRun(
            job=job,
            shape=AdapterShape(rank=config.r, targets=targets),
            order=DataOrder(self._num_rows, config.per_device_train_batch_size, config.seed),
            total_steps=total_steps,
            evaluation_steps=frozenset(evaluation_steps(total_steps, self._eval_steps, self._rungs)),
        )


def resolve_rungs(task: Task, num_rows: int) -> Task:
    """``task`` with its rungs spelt out: those of a preset lie behind the rise of every job's learning rate; and where
    answers choose among finalists, these all train to their end.

    Args:
        num_rows: Rows of the training split.
    """
    early_exit = task.early_exit
    if task.select_by == "eval_accuracy" and early_exit.finish_from is None:
        early_exit = early_exit.replace(finish_from=1.0)
    shares = [job.config.lr_warmup_share(job.config.total_steps(num_rows)) for job in task.jobs]
    return task.replace(early_exit=early_exit.resolved(lr_warmup=max(shares)))


def plan_jobs(task: Task, backbone: Backbone, data: TaskData) -> list[JobRun]:
    """Every job of ``task`` on this base model and data, before its first step.

    Raises:
        TargetModuleError: A job's targets or rank do not fit the base model.
        UnsupportedError: A job's optimizer is not installed, or not there on the model's device.
        UnsupportedModelError: A row is too long for this base model to train beside others.
    """
    backbone.check_length(max(data.train.longest_sequence, data.validation.longest_sequence))
    planner = JobPlanner(task, backbone.model, len(data.train))
    return [planner.plan(job) for job in task.jobs]
