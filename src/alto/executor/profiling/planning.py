"""Plans a task before training: its profile, the packing of its jobs, its expected duration."""

from __future__ import annotations

import hashlib
import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from alto.early_exit import policy_from
from alto.errors import DeviceMemoryError, SpecError
from alto.executor.context import TaskContext
from alto.executor.planned_job import PlannedJob
from alto.executor.profiling.budget import MeasuringBudget, usual_token_s
from alto.executor.profiling.measure import MARGIN, one_slot
from alto.executor.profiling.meter import capacity_bytes
from alto.executor.profiling.profile import Profile, find_profile, profile_task
from alto.executor.profiling.sketch import lengths_of
from alto.executor.shared_bank import state_dtype_of
from alto.lora import ADAPTER_DTYPES, BankLayout, bank_bytes
from alto.records import PackingForecast, Rung, TaskPlan, Throughput
from alto.scheduler import (
    JobWork,
    Packing,
    PackingRequest,
    ResidentLimits,
    choose_packing,
    estimate_duration_s,
    expected_duration_s,
    fitted_rungs,
    saturated_pass,
)
from alto.spec import Budget, Task


def disk_bytes(context: TaskContext, num_slots: int) -> int:
    """Return the largest number of bytes that the states of a task's jobs take on disk during training.

    Every job has a best adapter and a last state. Those of resident jobs exist twice while a checkpoint replaces them.
    Jobs that a search adds until its time or its samples are spent are not counted, because their number is unknown.

    Args:
        num_slots: Number of jobs that are resident at a time.
    """
    task = context.task
    sizes = sorted((_bytes_of(task, job) for job in context.jobs), reverse=True)
    search = task.search
    counted = search.max_jobs(task.search_space) if search.algorithm != "tpe" or search.budget.jobs is not None else 0
    added = max(0, counted - len(sizes))
    return sum(sizes) + added * sizes[0] + sum(sizes[:num_slots])


def free_bytes(folder: Path) -> int:
    """Return the free bytes on the disk that holds ``folder``, or would hold it."""
    existing = next(path for path in (folder.resolve(), *folder.resolve().parents) if path.exists())
    return shutil.disk_usage(existing).free


def disk_notes(needed: int, free: int, folder: Path) -> tuple[str, ...]:
    """Return a note if a task may need more disk space than is free in ``folder``."""
    if needed <= free:
        return ()
    return (
        f"The adapters and states of all jobs may take {needed / 2**20:,.0f} MiB of disk space while they train, and "
        f"{free / 2**20:,.0f} MiB are free in {folder}: free some, name a folder on another disk with --output-dir, or "
        "try fewer jobs or smaller ranks. A run that fills the disk stops and can be resumed.",
    )


def with_free_space(plan: TaskPlan, output_dir: Path) -> TaskPlan:
    """Return ``plan`` with the free bytes on the disk of its run, and a note if they may not be enough."""
    free = free_bytes(output_dir)
    notes = disk_notes(plan.disk_bytes, free, output_dir.resolve())
    return replace(plan, disk_free_bytes=free, notes=(*plan.notes, *notes))


def _bytes_of(task: Task, job: PlannedJob) -> int:
    """Return the bytes of a job's best adapter and last state. They equal the bytes of a slot, whose gradients are as
    large as a second copy of the weights."""
    shape, dtype, state_dtype = job.shape, ADAPTER_DTYPES[task.adapter_dtype], state_dtype_of(task.optim_state_dtype)
    layout = BankLayout(modules=shape.targets, max_rank=shape.rank, extras=shape.extras)
    return bank_bytes(layout, 1, {job.config.optim}, dtype, None, state_dtype)


USUAL_TOKENS_PER_PASS = {"cpu": 4096, "cuda": 16384}
"""Tokens above which a larger micro-batch is not faster; this many fill a CPU's caches, or a GPU with a small base
model."""

USUAL_SLOTS = 16

_ROOMY = 0.25
_LIMITS = ("max_slots", "max_tokens_per_step", "max_tokens_per_pass")


def _has_open_limits(task: Task) -> bool:
    """Return whether the engine has to choose the packing of the task's jobs."""
    return task.gradient_checkpointing == "auto" or any(getattr(task, key) is None for key in _LIMITS)


def pack(
    context: TaskContext, *, on_measuring: Callable[[float], None] = lambda _: None
) -> tuple[TaskContext, TaskPlan | None]:
    """Return the context of the task with every limit set, and the plan that set them. Rungs are adapted to the task's
    time budget, and evaluations to their cost on this machine.

    Unless a profile is cached, the task is profiled first if it runs on a GPU, if a CPU's memory may be too small, or
    if the task has a time budget. In all other cases a cached profile is used; without one, default limits apply and
    the plan is None.

    Args:
        on_measuring: Called with the expected seconds of measuring before steps are measured, and again after each
            improved estimate; not called if a profile is cached.

    Raises:
        DeviceMemoryError: The task cannot fit; the message states what does.
        SpecError: No job can be finished within the budget; the message states the time that is needed.
    """
    task = context.task
    has_time_limit = task.search.budget.max_duration_s(context.ranks.size) is not None
    if not _has_open_limits(task) and not has_time_limit:
        return context, None
    device = context.backbone.device
    if (
        device.type == "cpu"
        and not has_time_limit
        and _is_roomy(context)
        and not context.ranks.broadcast(_is_profiled(context), bool)
    ):
        return replace(context, task=_with_usual_limits(task)), None
    task_plan = plan(context, on_measuring=on_measuring)
    context = context.at_forward_share(task_plan.forward_share)
    task = context.task
    if task_plan.rungs:
        rungs = tuple((rung.progress, rung.keep) for rung in task_plan.rungs)
        min_kept = tuple(rung.min_kept for rung in task_plan.rungs)
        early_exit = task.early_exit.replace(rungs=rungs, min_kept=min_kept)
        task = task.replace(early_exit=early_exit).with_note(_rung_note(task_plan.rungs))
    if _has_open_limits(task):
        task = task.replace(
            max_slots=task_plan.max_slots,
            max_tokens_per_step=task_plan.max_tokens_per_step,
            max_tokens_per_pass=task_plan.max_tokens_per_pass,
            gradient_checkpointing=task_plan.gradient_checkpointing,
        )
    return replace(context, task=task, policy=policy_from(task.early_exit)), task_plan


def _with_usual_limits(task: Task) -> Task:
    """Return the task with default limits, for ample memory and no measurements."""
    return task.replace(
        max_slots=task.max_slots or USUAL_SLOTS,
        max_tokens_per_pass=task.max_tokens_per_pass or USUAL_TOKENS_PER_PASS["cpu"],
        gradient_checkpointing=task.gradient_checkpointing is True,
    )


def plan(
    context: TaskContext, *, on_measuring: Callable[[float], None] = lambda _: None, refresh: bool = False
) -> TaskPlan:
    """Plan the task, with the evaluations that ``early_exit.evaluation_share`` pays for on this machine.

    Args:
        on_measuring: See :func:`pack`.
        refresh: Whether to measure again, even if a measurement is cached.

    Raises:
        DeviceMemoryError: The task cannot fit; the message states what does.
        ProfileError: The task could not be measured.
        SpecError: No job can be finished within the budget; the message states the time that is needed.
    """
    task_plan = _plan_fitting(context, on_measuring, refresh=refresh)
    at_cost = context.at_forward_share(task_plan.forward_share)
    if at_cost is context:
        return task_plan
    replanned = _plan_fitting(at_cost, on_measuring, refresh=False)
    return replace(replanned, is_cached=task_plan.is_cached, profile_s=task_plan.profile_s)


def _plan_fitting(context: TaskContext, on_measuring: Callable[[float], None], *, refresh: bool) -> TaskPlan:
    """Plan the task, with gradient checkpointing if ``gradient_checkpointing`` is "auto" and the task does not fit
    without it."""
    task = context.task
    if task.gradient_checkpointing != "auto":
        return _plan(context, task, on_measuring, refresh=refresh)
    try:
        return _plan(context, task.replace(gradient_checkpointing=False), on_measuring, refresh=refresh)
    except DeviceMemoryError:
        context.backbone.checkpoint_layers()
        return _plan(context, task.replace(gradient_checkpointing=True), on_measuring, refresh=refresh)


def _plan(context: TaskContext, task: Task, on_measuring: Callable[[float], None], *, refresh: bool) -> TaskPlan:
    jobs, device = context.jobs, context.backbone.device
    profile = _profile(context, task, on_measuring, refresh=refresh)
    bytes_per_slot = one_slot(task, jobs, context.backbone).bytes_per_slot
    works = [_work(job, context) for job in jobs]
    longest = context.longest_row
    longest_rows = sorted(context.data.train.num_row_tokens, reverse=True)
    packing = choose_packing(
        PackingRequest(
            step_tokens=[work.num_tokens for work in works],
            most_step_tokens=[
                max(work.num_tokens, sum(longest_rows[: job.config.rows_per_step]))
                for work, job in zip(works, jobs, strict=True)
            ],
            longest_row=longest,
            slot_bytes=bytes_per_slot,
            usual_tokens_per_pass=_usual_tokens(device, profile.throughput),
            num_ranks=context.ranks.size,
            max_slots=task.max_slots,
            max_tokens_per_step=task.max_tokens_per_step,
            max_tokens_per_pass=task.max_tokens_per_pass,
            smallest_pass=_smallest_pass(context),
        ),
        profile.memory,
        profile.throughput,
    )
    limits = ResidentLimits(num_slots=packing.max_slots, max_tokens=packing.max_tokens_per_step)
    speed = replace(profile.throughput, pass_tokens=context.ranks.size * packing.max_tokens_per_pass)
    validation_tokens = context.evaluation_tokens
    alone_s = [estimate_duration_s([work], speed, limits, validation_tokens=validation_tokens) for work in works]
    check_budget(task.search.budget, min(alone_s), context.ranks.size, is_rough=speed.is_unsteady)
    duration_s = estimate_duration_s(works, speed, limits, validation_tokens=validation_tokens)
    train_s = _with_search(duration_s, context)
    # In a population, a copy of a better job replaces each job that ends.
    rungs = () if task.search.algorithm == "pbt" else context.policy.rungs
    references_s = 0.0
    if context.objective.needs_reference:  # an upper bound, because the reference log-probs may be cached
        references_s = (context.data.train.num_tokens + validation_tokens) * speed.eval_token_s
    limit_s, fitted = task.search.budget.max_duration_s(context.ranks.size) or math.inf, rungs
    if context.fits_rungs:
        fitted = fitted_rungs(
            works,
            speed,
            limits,
            validation_tokens=validation_tokens,
            rungs=rungs,
            limit_s=limit_s,
        )
    changed = () if fitted == rungs else tuple(rung for rung in fitted if rung.max_kept is None)

    def expected(throughput: Throughput) -> float:
        if not fitted:
            return estimate_duration_s(works, throughput, limits, validation_tokens=validation_tokens)
        return expected_duration_s(works, throughput, limits, validation_tokens=validation_tokens, rungs=fitted)

    budget_notes = _budget_notes(changed, expected(speed), limit_s) if changed else ()
    modules = {module.name for job in jobs for module in job.shape.targets}
    parameters = [job.shape.num_parameters for job in jobs]
    return TaskPlan(
        task=task.name,
        model=task.model,
        device=str(device),
        num_jobs=len(jobs),
        num_parameters=(min(parameters), max(parameters)),
        row_tokens=(context.row_tokens, longest),
        slot_bytes=bytes_per_slot,
        max_slots=packing.max_slots,
        max_tokens_per_step=packing.max_tokens_per_step,
        max_tokens_per_pass=packing.max_tokens_per_pass,
        gradient_checkpointing=task.gradient_checkpointing is True,
        peak_bytes=packing.peak_bytes,
        why_one_slot=packing.why_one_slot,
        packings=_forecasts(profile, packing, bytes_per_slot, len(jobs), context.ranks.size),
        memory=profile.memory,
        throughput=speed,
        duration_s=references_s + train_s,
        expected_duration_s=references_s + _with_search(expected(speed), context),
        expected_step_s=expected(replace(speed, job_s=0.0, token_s=0.0, eval_token_s=0.0)),
        is_at_budget=train_s == task.search.budget.max_duration_s(context.ranks.size),
        modules=hashlib.sha256("\n".join(sorted(modules)).encode()).hexdigest()[:16],
        is_cached=profile.is_cached,
        profile_s=profile.duration_s,
        notes=(*budget_notes, *_unsteady_notes(speed), *context.evaluation_notes),
        profile=profile.name,
        disk_bytes=disk_bytes(context, packing.max_slots),
        rungs=changed,
        forward_share=_forward_share(works, speed, limits),
    )


def _forward_share(works: Sequence[JobWork], throughput: Throughput, limits: ResidentLimits) -> float:
    """Return the time to evaluate a token divided by the time to train it, in a run with this packing."""
    train_s = estimate_duration_s(works, throughput, limits, validation_tokens=0)
    return throughput.eval_token_s * sum(work.num_tokens * work.num_steps for work in works) / train_s


def _usual_tokens(device: torch.device, throughput: Throughput) -> int:
    """Return the tokens above which a larger micro-batch is not faster. On a CPU, measured steps may reach its full
    speed with fewer tokens; memory that brings no speed is left to other programs."""
    usual = USUAL_TOKENS_PER_PASS[device.type]
    return min(usual, saturated_pass(throughput.points)) if device.type == "cpu" else usual


def check_budget(budget: Budget, shortest_s: float, num_gpus: int, *, is_rough: bool = False) -> None:
    """Check that a budget of time or money is enough to finish at least one job.

    Args:
        shortest_s: Expected seconds of the shortest job when it trains alone.
        is_rough: Whether other programs used the machine during the measurement.

    Raises:
        SpecError: The budget is too small; the message states what is needed.
    """
    limit_s = budget.max_duration_s(num_gpus)
    if limit_s is None or shortest_s <= limit_s:
        return
    found, enough = f"duration_s {limit_s:g}", f"duration_s to at least {math.ceil(shortest_s)}"
    if limit_s != budget.duration_s and budget.gpu_hour_price is not None:
        cost = math.ceil(100 * shortest_s / 3600 * num_gpus * budget.gpu_hour_price) / 100
        found, enough = f"cost {budget.cost:g}, which pays for {limit_s:.3g} s", f"cost to at least {cost:g}"
    busy = (
        " Other programs used the machine during the measurement: when it is idle, alto plan --refresh measures again."
        if is_rough
        else ""
    )
    raise SpecError(
        f"search.budget: expected enough to train one configuration to its end, about {math.ceil(shortest_s)} s for "
        f"the shortest one, found {found}. Raise {enough}, or train fewer steps.{busy}"
    )


def _rung_note(rungs: Sequence[Rung]) -> str:
    """Return a note about rungs that keep fewer jobs to fit a time budget."""
    kept = ", ".join(str(rung.min_kept) for rung in rungs)
    at = ", ".join(f"{100 * rung.progress:.3g}" for rung in rungs)
    return f"To fit search.budget, the rungs at {at} % of the steps keep {kept} jobs."


def _budget_notes(rungs: Sequence[Rung], expected_s: float, limit_s: float) -> tuple[str, ...]:
    if expected_s <= limit_s:
        return (_rung_note(rungs),)
    return (
        _rung_note(rungs),
        f"Not all configurations can be ranked within search.budget: that takes about {math.ceil(expected_s)} s. The "
        "best configuration that is ranked in time is trained to its end.",
    )


def _unsteady_notes(throughput: Throughput) -> tuple[str, ...]:
    if not throughput.is_unsteady:
        return ()
    return (
        f"Measured steps took at least {100 * throughput.spread:.0f} % longer than on an idle machine: other programs "
        "used the machine, and the times above are rough. Measure again with --refresh when it is idle; a run that "
        "trains with this measurement corrects it too.",
    )


def _with_search(duration_s: float, context: TaskContext) -> float:
    """Return the duration of the task including the jobs that the search will add within its budget. These jobs are
    assumed to take as long as the first ones."""
    search, jobs = context.task.search, context.jobs
    duration_s *= search.max_jobs(context.task.search_space) / len(jobs)
    num_rows = len(context.data.train)
    samples = sum(job.config.samples_after(job.total_steps, num_rows) for job in jobs)
    samples = samples * search.max_jobs(context.task.search_space) // len(jobs)
    if search.budget.samples is not None:
        duration_s *= min(1.0, search.budget.samples / samples)
    return min(duration_s, search.budget.max_duration_s(context.ranks.size) or math.inf)


def _profile(context: TaskContext, task: Task, on_measuring: Callable[[float], None], *, refresh: bool) -> Profile:
    device, lengths = context.backbone.device, lengths_of(context.data.train, num_generated=context.longest_completion)
    profile = None if refresh else find_profile(task, lengths, device, num_ranks=context.ranks.size)
    profile = context.ranks.broadcast(profile, Profile | None)
    if profile is not None:
        return profile
    num_rows, max_tokens = len(context.data.train), 2 * USUAL_TOKENS_PER_PASS[device.type]
    most_jobs = min(len(context.jobs), task.max_slots or len(context.jobs))
    budget = MeasuringBudget.of(
        task,
        lengths,
        num_rows=num_rows,
        max_tokens=max_tokens,
        num_ranks=context.ranks.size,
        num_jobs=math.ceil(most_jobs / context.ranks.size),
        device=device,
    )
    on_measuring(budget.remaining_s(0, token_s=usual_token_s(context.backbone), spent_s=0.0))
    return profile_task(
        task,
        lengths,
        device,
        num_rows=num_rows,
        max_tokens=max_tokens,
        backbone=context.backbone,
        ranks=context.ranks,
        on_progress=on_measuring,
    )


def _is_profiled(context: TaskContext) -> bool:
    task, device = context.task, context.backbone.device
    known = task.replace(gradient_checkpointing=task.gradient_checkpointing is True)
    lengths = lengths_of(context.data.train, num_generated=context.longest_completion)
    return find_profile(known, lengths, device, num_ranks=context.ranks.size) is not None


def _is_roomy(context: TaskContext) -> bool:
    """Return whether a coarse upper bound of the task's memory is a small part of the device's memory."""
    config = context.backbone.model.config.get_text_config()
    shapes = [job.shape for job in context.jobs]
    # Twice the activations of a gated transformer layer, and the adapters' narrow activations.
    width = 20 * config.hidden_size + 8 * getattr(config, "intermediate_size", 4 * config.hidden_size)
    narrow = sum(2 * max(shape.rank for shape in shapes) for _ in shapes[0].targets)
    bytes_per_token = 2 * 4 * (config.num_hidden_layers * width + narrow) + 16 * config.hidden_size
    weights = context.backbone.num_bytes
    num_slots = min(context.task.max_slots or USUAL_SLOTS, len(shapes))
    bank = num_slots * one_slot(context.task, context.jobs, context.backbone).bytes_per_slot
    longest = context.longest_row
    tokens = max(context.task.max_tokens_per_pass or USUAL_TOKENS_PER_PASS["cpu"], longest)
    bound = 2 * weights + bank + tokens * bytes_per_token
    return bool(bound <= _ROOMY * MARGIN * capacity_bytes(context.backbone.device, context.ranks.size))


def _smallest_pass(context: TaskContext) -> int | None:
    """Return the tokens of the pass in which a job generates the next token of each completion of a step; None if jobs
    do not generate."""
    if not context.objective.method.entry.generates:
        return None
    return min(job.config.sequences_per_step for job in context.jobs)


def _work(job: PlannedJob, context: TaskContext) -> JobWork:
    batch_size = job.config.rows_per_step
    return JobWork(
        job=job.id,
        batch_size=batch_size,
        num_tokens=context.tokens_of_rows(batch_size, job.config),
        num_steps=job.total_steps,
        num_evaluations=job.evaluations_after(0, len(context.data.validation)),
    )


def _forecasts(
    profile: Profile, packing: Packing, bytes_per_slot: int, num_jobs: int, num_ranks: int
) -> tuple[PackingForecast, ...]:
    """Return forecasts for the chosen packing and for smaller and larger ones: slots of all ranks, tokens and bytes of
    each."""
    memory, throughput = profile.memory, profile.throughput
    slots = sorted({1, *(packing.max_slots * factor // 2 for factor in (1, 2, 4)), num_jobs} - {0})
    tokens = [packing.max_tokens_per_pass * factor // 4 for factor in (1, 2, 4, 8)]
    room = memory.margin * memory.capacity_bytes
    return tuple(
        PackingForecast(
            num_slots=num_slots,
            num_tokens=num_tokens,
            peak_bytes=(peak := memory.peak_bytes(num_tokens, math.ceil(num_slots / num_ranks) * bytes_per_slot)),
            fits=peak <= room,
            tokens_per_s=num_ranks * num_tokens / throughput.duration_s(num_slots, num_ranks * num_tokens),
        )
        for num_slots in slots
        if num_slots <= num_jobs
        for num_tokens in tokens
    )
