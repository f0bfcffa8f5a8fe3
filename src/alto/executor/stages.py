"""The stages of a task before training. Each stage can be run and tested by itself.

load base -> context (plan the jobs) -> reference log-probs -> bank -> train (:class:`alto.executor.Executor`)
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace

import torch

from alto.backbone import Backbone, is_out_of_memory, load_backbone
from alto.base import resume_command
from alto.early_exit import Selection, selection_of
from alto.errors import DeviceMemoryError, TaskInterruptedError
from alto.executor.beginning import RunStart
from alto.executor.conclusion import Hooks
from alto.executor.context import TaskContext
from alto.executor.job_state import JobState, initial_states
from alto.executor.micro_batches import MicroBatches, OnMemoryEvent
from alto.executor.planned_job import PlannedJob
from alto.executor.ranks import Ranks
from alto.executor.recorder import JournalRecorder
from alto.executor.recovery import ResumeState, check_data, check_jobs, check_start
from alto.executor.references import find_references
from alto.executor.shared_bank import SharedBank
from alto.executor.slot_manager import SlotManager, Stopwatch, TaskState
from alto.runs import RunDir
from alto.runs.events import (
    JobAdded,
    JobExited,
    JobReopened,
    ReferenceFact,
)
from alto.spec import LOAD_IN_4BIT, BaseModelSpec, Job, Task, loss_scale, plain


def load_base(
    spec: BaseModelSpec, device: torch.device, ranks: Ranks, *, gradient_checkpointing: bool = False
) -> Backbone:
    """Load the base model, or this rank's share of it.

    Args:
        spec: Specification of the base model and of how it is loaded.
        device: Device of its weights.
        ranks: This process among the ranks that share the model.
        gradient_checkpointing: Whether to recompute each layer's activations in the backward pass.

    Raises:
        DeviceMemoryError: The model does not fit.
        AltoError: See :func:`alto.backbone.load_backbone`.
    """
    try:
        return load_backbone(
            spec, device=device, mesh=ranks.mesh(device), gradient_checkpointing=gradient_checkpointing
        )
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        share = f"its share of {ranks.size}" if ranks.size > 1 else "the whole model"
        raise DeviceMemoryError(
            f"model: expected memory for the base model {spec.id!r} ({share}) on {device}, found less; set num_gpus "
            f"to more than {ranks.size}, so that each GPU holds a part, or {LOAD_IN_4BIT}"
        ) from error


def state_before_training(
    context: TaskContext, recorder: JournalRecorder, start: RunStart, hooks: Hooks, bank: SharedBank | None
) -> TaskState:
    """Run the stages between the context and the training; for arguments and errors see
    :meth:`alto.executor.TaskSession.build`."""
    ranks, resume_state = context.ranks, start.resume_state

    def stop_if_asked() -> None:
        if ranks.broadcast(hooks.is_interrupted(), bool):
            raise TaskInterruptedError(
                "stopped on request while reference log-probs were precomputed; the finished ones are on disk; "
                f"continue with: {resume_command(start.run_dir.root)}"
            )

    check_resumable(context, resume_state)
    micro_batches = MicroBatches(
        max_tokens_per_pass(context, resume_state),
        recorder.memory_ran_out,
        can_retry=ranks.is_alone,
        is_padded=context.backbone.is_padded,
    )
    context = with_references(
        context, micro_batches, stop_if_asked, bank.reinject if bank is not None else lambda: None
    )
    return build_state(
        context,
        resume_state,
        start.run_dir,
        bank,
        max_tokens_per_pass=micro_batches.max_tokens,
        on_memory_event=recorder.memory_ran_out,
    )


def max_tokens_per_pass(context: TaskContext, resume_state: ResumeState) -> int:
    """Return the initial largest number of tokens of a micro-batch: the task's setting, or the lower limit that was set
    when memory last ran out."""
    return min(context.task.max_tokens_per_pass or sys.maxsize, resume_state.max_tokens_per_pass or sys.maxsize)


def check_resumable(context: TaskContext, resume_state: ResumeState) -> None:
    """Check that a run is resumed with the task that it began with; a new run has nothing to check.

    Raises:
        RunChangedError: The data, the adapter that jobs begin with, the jobs, the method, the metric, the evaluation
            points or the early-exit settings differ from those at the beginning of the run.
    """
    if resume_state.lines:
        check_data(resume_state.started, context.data, context.base.chat_template)
        check_start(resume_state.started, None if context.start is None else context.start.fact)
        check_jobs(resume_state.started, {job.id: job.config for job in context.jobs}, context.task)


def with_references(
    context: TaskContext,
    micro_batches: MicroBatches,
    on_turn: Callable[[], None] = lambda: None,
    restore: Callable[[], None] = lambda: None,
) -> TaskContext:
    """Return ``context`` with the log-probs of every reply in its data under the jobs' starting point (the base model,
    or the adapter that ``init_adapter`` names), if its objective needs them.

    Args:
        micro_batches: Splits the rows into micro-batches that fit into memory; training starts with their final size.
        on_turn: Called before every micro-batch, on all ranks; an error that it raises ends the stage.
        restore: Puts the adapters of other tasks back after the jobs' starting adapter has replaced them.

    Raises:
        DeviceMemoryError, ModelError: See :func:`alto.executor.references.find_references`.
    """
    if not context.objective.needs_reference:
        return context
    found = find_references(context, micro_batches, on_turn, restore)
    fact = ReferenceFact(is_cached=found.is_cached, duration_s=found.duration_s)
    return replace(context, data=found.data, references=fact)


def build_state(
    context: TaskContext,
    resume_state: ResumeState,
    run_dir: RunDir,
    bank: SharedBank | None = None,
    *,
    max_tokens_per_pass: int,
    on_memory_event: OnMemoryEvent,
) -> TaskState:
    """Build the bank and the state of every job as of the run's last checkpoint; no job is resident yet.

    Args:
        context: The task's context, with reference log-probs if its objective needs them.
        resume_state: State of an interrupted run; an empty one starts the task from its first step.
        run_dir: Holds the states of jobs.
        bank: The executor's bank; None makes one for this task alone.
        max_tokens_per_pass: Initial largest number of tokens of a micro-batch.
        on_memory_event: Called each time memory runs out.

    Raises:
        DeviceMemoryError: Not even one slot fits beside the base model.
    """
    jobs = initial_states(context)
    for planned, event in _added(context, resume_state):
        jobs.append(JobState(planned=planned, context=context, starts_warm=event.warm, forked_at=event.forked_at))
    misfits = _misfits(resume_state)
    for job in jobs:
        job.fits = job.id not in misfits
    bank = bank or SharedBank(
        context.backbone, context.ranks, context.task.adapter_dtype, context.task.optim_state_dtype
    )
    before = None if resume_state.checkpoint is None else resume_state.checkpoint.time_s
    slot_manager = SlotManager(bank, context, run_dir, on_memory_event, Stopwatch(before))
    slot_manager.attach([job for job in jobs if job.fits], max_tokens_per_pass=max_tokens_per_pass)
    return TaskState(
        context=context,
        jobs={job.id: job for job in jobs},
        selection=_selection(context, jobs, resume_state),
        slot_manager=slot_manager,
    )


def _added(context: TaskContext, resume_state: ResumeState) -> list[tuple[PlannedJob, JobAdded]]:
    """Return the jobs that were added while the task ran, with their events."""
    return [
        (context.plan(_job_of(entry.event, context.task)), entry.event)
        for entry in resume_state.entries
        if isinstance(entry.event, JobAdded)
    ]


def _misfits(resume_state: ResumeState) -> set[str]:
    """Return the jobs that ended because their adapters do not fit into memory."""
    found: set[str] = set()
    for entry in resume_state.entries:
        match entry.event:
            case JobExited(job=job, evidence=evidence) if "adapter_bytes" in evidence:
                found.add(job)
            case JobReopened(job=job):
                found.discard(job)
    return found


def _job_of(event: JobAdded, task: Task) -> Job:
    values = {key: plain(value) for key, value in event.values.items()}
    return Job(id=event.job, config=task.job_config(event.config), values=values)


def _selection(context: TaskContext, jobs: list[JobState], resume_state: ResumeState) -> Selection:
    if resume_state.lines:
        return selection_of(resume_state.entries)
    return Selection(
        context.policy,
        ema_alpha=context.task.early_exit.ema_alpha,
        total_steps={job.id: job.total_steps for job in jobs},
        loss_scales={job.id: loss_scale(job.config.model_dump()) for job in jobs},
        configuration_of=context.task.repetitions,
        row_weights=context.row_weights,
    )
