"""The jobs of a task, resolved for its base model and its rows, before their first step."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from transformers import PreTrainedModel

from alto.backbone import router_coefficient
from alto.data import DataOrder, MixtureOrder, TaskData
from alto.early_exit import LEAST_PAIRS, budgeted, evaluation_steps, policy_from
from alto.errors import SpecError
from alto.lora import AdapterShape, adapter_shape, check_optimizer
from alto.search import population_rungs
from alto.spec import LOSS, OWN_METHODS, SHAPE_FIELDS, Job, JobConfig, Task, ceil_fraction, find_method, rung_step

USUAL_FORWARD_SHARE = 0.45
"""Time to evaluate a token divided by the time to train it, used if it is not measured. Source: two CPU cores,
SmolLM2-135M."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedJob:
    """One job, resolved for this base model and data.

    Attributes:
        total_steps: Number of steps without early exit.
        schedule_steps: Number of steps of its learning-rate schedule; larger than ``total_steps`` for a refit, which
            stops at the step of the winner's best checkpoint.
        evaluation_steps: Step counts after which it is evaluated; empty without validation.
        evaluation_rows: Number of validation rows by step count; empty if every evaluation is on all rows.
        ranking_steps: Step counts after which it is compared with other jobs: at rungs, and at its end.
        router_aux_loss_coef: Factor of the routers' load-balancing loss in its loss; 0 if it is not added.
    """

    job: Job
    shape: AdapterShape
    order: DataOrder
    total_steps: int
    schedule_steps: int
    evaluation_steps: frozenset[int]
    evaluation_rows: Mapping[int, int]
    ranking_steps: frozenset[int]
    router_aux_loss_coef: float

    @property
    def id(self) -> str:
        return self.job.id

    def evaluations_after(self, step: int, num_rows: int) -> float:
        """Return the number of evaluations after ``step``. An evaluation on some of the ``num_rows`` validation rows
        counts as a fraction."""
        later = [at for at in self.evaluation_steps if at > step]
        return sum(self.evaluation_rows.get(at, num_rows) for at in later) / num_rows if num_rows else 0.0

    @property
    def config(self) -> JobConfig:
        return self.job.config

    @property
    def treats_tokens_alike(self) -> bool:
        """Whether equal tokens at equal positions give equal results, so that rows can share their beginnings. That
        holds if a step draws no random numbers for tokens and counts none for router losses."""
        draws = self.config.lora_dropout or self.config.neftune_noise_alpha
        return not draws and not self.router_aux_loss_coef


def plan_job(
    job: Job, task: Task, model: PreTrainedModel, num_rows: int, sources: Sequence[tuple[str, int]] = ()
) -> PlannedJob:
    """Return ``job`` resolved for a base model.

    Args:
        model: The base model, with or without injected adapters.
        num_rows: Rows of the training split.
        sources: Names and numbers of rows of a mixture's sources; empty for a single dataset.

    Raises:
        TargetModuleError: Its targets do not fit the base model.
        UnsupportedError: Its optimizer is not installed or does not support the model's device.
        UnsupportedModelError: It sets ``router_aux_loss_coef``, and the model has no such loss.
    """
    check_optimizer(job.config.optim, model.device)
    config, schedule_steps = job.config, job.config.total_steps(num_rows)
    total_steps = schedule_steps if task.refit is None else task.refit.steps
    rungs = policy_from(task.early_exit).rungs
    is_validated = task.refit is None
    rows: dict[int, int] = {}
    for progress, num_rows_then in (task.early_exit.evaluations or ()) if is_validated else ():
        step = max(1, ceil_fraction(progress, total_steps))
        rows[step] = max(num_rows_then, rows.get(step, 0))
    points = rows or (evaluation_steps(total_steps, task.eval_steps, rungs) if is_validated else ())
    ranking = (total_steps, *(rung_step(rung, total_steps) for rung in rungs)) if is_validated else ()
    return PlannedJob(
        job=job,
        shape=adapter_shape(model, config, task.label_set),
        order=_order(config, num_rows, sources),
        total_steps=total_steps,
        schedule_steps=schedule_steps,
        evaluation_steps=frozenset(points),
        evaluation_rows=rows,
        ranking_steps=frozenset(ranking),
        router_aux_loss_coef=router_coefficient(model, config.router_aux_loss_coef, task.method),
    )


def _order(config: JobConfig, num_rows: int, sources: Sequence[tuple[str, int]]) -> DataOrder:
    if not sources:
        return DataOrder(num_rows, config.rows_per_step, config.seed)
    shares = dict(config.mixture_weights or ())
    names, sizes = zip(*sources, strict=True)
    return MixtureOrder(sizes, [shares[name] for name in names], config.rows_per_step, config.seed)


def plan_jobs(
    task: Task, model: PreTrainedModel, num_rows: int, sources: Sequence[tuple[str, int]] = ()
) -> tuple[PlannedJob, ...]:
    """Plan every job of ``task``. Arguments and errors are as in :func:`plan_job`; jobs that the search may add are
    checked too."""
    jobs = tuple(plan_job(job, task, model, num_rows, sources) for job in task.jobs)
    _check_suggestions(task, model)
    return jobs


def _check_suggestions(task: Task, model: PreTrainedModel) -> None:
    """Check that the jobs that the search may add while the task runs fit the base model."""
    known = {_adapter_settings(job.config) for job in task.jobs}
    for config in task.extreme_configs():
        settings = _adapter_settings(config)
        if settings in known:
            continue
        known.add(settings)
        check_optimizer(config.optim, model.device)
        adapter_shape(model, config, task.label_set)


def trains_router_loss(task: Task, model: PreTrainedModel) -> bool:
    """Return whether a job of ``task``, or a job that its search may add, trains with the routers' load-balancing loss.

    Raises:
        UnsupportedModelError: See :func:`plan_job`.
    """
    configs = (*(job.config for job in task.jobs), *task.extreme_configs())
    coefficients = [router_coefficient(model, config.router_aux_loss_coef, task.method) for config in configs]
    return any(coefficients)


def _adapter_settings(config: JobConfig) -> tuple[object, ...]:
    """Return the settings that decide the adapter and the optimizer of a job."""
    return tuple(getattr(config, key) for key in (*SHAPE_FIELDS, "optim"))


def resolve_rungs(task: Task, num_rows: int, *, begins: bool = True) -> Task:
    """Return ``task`` with explicit rungs.

    Rungs of a preset come after the learning-rate warmup of every job. If answers choose among finalists, all finalists
    train to their end. A population is ranked at every interval. A task with a single configuration has no selection.

    Args:
        num_rows: Rows of the training split.
        begins: False for a resumed run, which keeps the selection that it began with, even if an earlier version began
            it.
    """
    early_exit, search = task.early_exit, task.search
    if begins and _is_one_configuration(task):
        early_exit = early_exit.replace(select=False)
    if search.algorithm == "pbt" and not early_exit.has_own_rungs:
        keep = 1 - search.exchanged
        early_exit = early_exit.replace(
            rungs=tuple((progress, keep) for progress in population_rungs(search.interval)),
            min_kept=math.ceil(keep * len(task.jobs)),
            finish_from=1.0,
        )
    finish = early_exit.selection_rungs[-1] if early_exit.selection_rungs else None
    is_scored = task.scoring is not None and finish is not None and task.scoring.is_at(finish.progress)
    if task.scoring is not None and not is_scored and early_exit.finish_from is None:
        early_exit = early_exit.replace(finish_from=1.0)
    configs = (*(job.config for job in task.jobs), *task.extreme_configs())
    earliest = max(config.earliest_rung(config.total_steps(num_rows)) for config in configs)
    steps = {config.total_steps(num_rows) for config in configs}
    is_fitted = begins and (task.scoring is None or not task.scoring.rungs)  # the user has chosen the scored rungs
    return task.replace(early_exit=early_exit.resolved(earliest=earliest, steps=steps if is_fitted else ()))


def resolve_early_exit(task: Task, data: TaskData, *, begins: bool, forward_share: float = USUAL_FORWARD_SHARE) -> Task:
    """Return ``task`` with explicit rungs and, if its evaluations get a share of the time, explicit evaluations.

    Args:
        begins: False for a resumed run, which keeps the settings that it began with.
        forward_share: Time to evaluate a token divided by the time to train it.

    Raises:
        SpecError: The task sets evaluations that its method or metric cannot compare.
    """
    resolved = resolve_rungs(task, len(data.train), begins=begins)
    if not begins:
        return resolved
    evaluations, num_rows = task.early_exit.evaluations or (), len(data.validation)
    if not has_comparable_rows(task) and any(rows < num_rows for _, rows in evaluations):
        methods = ", ".join(name for name in OWN_METHODS if find_method(name).entry.has_row_losses)
        raise SpecError(
            f"early_exit.evaluations: expected metric loss and one of the methods {methods}, whose losses on a part of "
            f"the rows can be compared, found {task.metric} and {task.method}. Remove the key."
        )
    has_preset = not task.early_exit.has_own_rungs
    return budget_evaluations(resolved, data, has_preset=has_preset, forward_share=forward_share)


def budget_evaluations(task: Task, data: TaskData, *, has_preset: bool, forward_share: float) -> Task:
    """Return ``task`` with the evaluations that ``early_exit.evaluation_share`` pays for; unchanged if that does not
    apply.

    Args:
        task: A task with resolved rungs, see :func:`resolve_rungs`.
        has_preset: Whether its rungs come from a preset; some of these may be left out.
        forward_share: Time to evaluate a token divided by the time to train it.
    """
    early_exit = task.early_exit
    applies = early_exit.enabled and early_exit.policy == "alto" and early_exit.evaluation_share != "all"
    if not applies or early_exit.evaluations is not None or not data.has_validation:
        return task
    least_rows = LEAST_PAIRS if find_method(task.method).entry.is_paired else 0
    num_rows, configs = len(data.train), [job.config for job in task.jobs]
    samples = statistics.fmean(config.samples_after(config.total_steps(num_rows), num_rows) for config in configs)
    validation_tokens = data.validation.num_tokens / len(data.validation)
    job_tokens = samples * data.train.num_tokens / num_rows
    has_scored_rungs = task.scoring is not None and bool(task.scoring.rungs)
    early_exit = budgeted(
        early_exit,
        steps=[config.total_steps(num_rows) for config in configs],
        num_rows=len(data.validation),
        row_cost=forward_share * validation_tokens / job_tokens,
        every=task.eval_steps,
        least_rows=least_rows if has_comparable_rows(task) else len(data.validation),
        drops_rungs=has_preset and task.search.algorithm != "pbt" and not has_scored_rungs,
    )
    return task.replace(early_exit=early_exit)


def has_comparable_rows(task: Task) -> bool:
    """Return whether evaluations on some of the rows can be compared by their common rows; if not, every evaluation is
    on all rows."""
    return task.metric == LOSS and find_method(task.method).entry.has_row_losses


def may_fit_rungs(task: Task) -> bool:
    """Return whether the rungs of ``task`` may keep fewer jobs to fit a time budget: rungs of a preset may, if all jobs
    begin with the task and none repeats another. Call it before :func:`resolve_rungs`."""
    early_exit, is_fixed = task.early_exit, task.search.algorithm in ("grid", "random")
    ranks_jobs = early_exit.enabled and early_exit.select and not _is_one_configuration(task)
    return is_fixed and ranks_jobs and not early_exit.has_own_rungs and not task.repetitions


def _is_one_configuration(task: Task) -> bool:
    """Return whether all jobs of ``task`` differ only in their seeds, the search adds no jobs and no rung is scored."""
    has_scored_rungs = task.scoring is not None and bool(task.scoring.rungs)
    is_fixed = task.search.algorithm in ("grid", "random") and not has_scored_rungs
    return is_fixed and len({job.config.replace(seed=0) for job in task.jobs}) == 1
