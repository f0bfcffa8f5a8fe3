"""The stages of a task before training. Each stage can be run and tested by itself.

load base -> context (plan the jobs) -> reference log-probs -> bank -> train (:class:`alto.executor.Executor`)
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from alto.backbone import Backbone, is_out_of_memory, load_backbone
from alto.base import resume_command
from alto.data import EncodedDataset, JobRows, collate, digest_of
from alto.early_exit import Selection, selection_of
from alto.errors import DeviceMemoryError, ModelError, TaskInterruptedError
from alto.executor import cache
from alto.executor.beginning import RunInputs
from alto.executor.conclusion import Hooks
from alto.executor.context import JobState, TaskContext, initial_states
from alto.executor.forward_plan import divided
from alto.executor.init_adapter import Within, beginning_with
from alto.executor.micro_batches import MicroBatches, OnMemoryEvent, RowTooLargeError, watching
from alto.executor.planned_job import PlannedJob
from alto.executor.ranks import Ranks
from alto.executor.recorder import JournalRecorder
from alto.executor.recovery import ResumeState, check_data, check_jobs, check_start
from alto.executor.shared_bank import SharedBank
from alto.executor.slot_manager import SlotManager, Stopwatch, TrainingState
from alto.objectives import reference_sums
from alto.runs import RunDir
from alto.runs.events import JobAdded, JobExited, JobReopened, ReferenceFact
from alto.spec import LOAD_IN_4BIT, BaseModelSpec, Job, Task, loss_scale, plain


def load_base(
    spec: BaseModelSpec, device: torch.device, ranks: Ranks, *, gradient_checkpointing: bool = False
) -> Backbone:
    """Load the base model, or this rank's part of it.

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
        which_part = f"its share of {ranks.size}" if ranks.size > 1 else "the whole model"
        raise DeviceMemoryError(
            f"model: not enough memory on {device} for the base model {spec.id!r} ({which_part}). Set num_gpus above "
            f"{ranks.size} to shard the model over more GPUs, or set {LOAD_IN_4BIT}"
        ) from error


def state_before_training(
    context: TaskContext, recorder: JournalRecorder, start: RunInputs, hooks: Hooks, bank: SharedBank | None
) -> TrainingState:
    """Run the stages between the context and the training; for arguments and errors see
    :class:`alto.executor.TaskSession`."""
    ranks, resume_state = context.ranks, start.resume_state

    def check_stop() -> None:
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
    context = with_references(context, micro_batches, check_stop, bank.reinject if bank is not None else lambda: None)
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


def build_state(
    context: TaskContext,
    resume_state: ResumeState,
    run_dir: RunDir,
    bank: SharedBank | None = None,
    *,
    max_tokens_per_pass: int,
    on_memory_event: OnMemoryEvent,
) -> TrainingState:
    """Build the bank and the state of every job as of the run's last checkpoint; no job is resident yet.

    Args:
        context: The task's context, with reference log-probs if its objective needs them.
        resume_state: State of an interrupted run; an empty one starts the task from its first step.
        bank: The executor's bank; None makes one for this task alone.
        max_tokens_per_pass: Initial largest number of tokens of a micro-batch.

    Raises:
        DeviceMemoryError: Not even one slot fits into memory together with the base model.
    """
    jobs = initial_states(context)
    for planned, event in _added(context, resume_state):
        jobs.append(JobState(planned=planned, context=context, starts_warm=event.warm, forked_at=event.forked_at))
    misfits = _jobs_out_of_memory(resume_state)
    for job in jobs:
        job.fits = job.id not in misfits
    bank = bank or SharedBank(
        context.backbone, context.ranks, context.task.adapter_dtype, context.task.optim_state_dtype
    )
    before = None if resume_state.checkpoint is None else resume_state.checkpoint.time_s
    slot_manager = SlotManager(bank, context, run_dir, on_memory_event, Stopwatch(before))
    slot_manager.attach([job for job in jobs if job.fits], max_tokens_per_pass=max_tokens_per_pass)
    return TrainingState(
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


def _jobs_out_of_memory(resume_state: ResumeState) -> set[str]:
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


# -- reference log-probs -----------------------------------------------------------------------------------------

COLUMNS = 4
"""Numbers for every pair: the log-probs of both replies, and for each reply the part that comes from tokens beyond the
length of the shorter reply."""

PART_ROWS = 2048
"""Number of pairs that are computed and saved together. After an interruption, the saved parts are used again."""


def with_references(
    context: TaskContext,
    micro_batches: MicroBatches,
    on_turn: Callable[[], None] = lambda: None,
    restore: Callable[[], None] = lambda: None,
) -> TaskContext:
    """Return ``context`` with the reference log-probs of every reply in its data, if its objective needs them: the
    log-probabilities under the starting point of its jobs, which is the base model, or the adapter on it that
    ``init_adapter`` names, as in TRL.

    They are computed once for all jobs. The adapters of a bank are never active meanwhile. Each rank computes a part
    of the rows. The results are cached, except for a base model that was given as an object and that no name loads,
    because its fingerprint only samples its weights.

    Args:
        context: The task's context, identical on all ranks.
        micro_batches: Splits the rows into micro-batches that fit into memory; training starts with their final size.
        on_turn: Called before every micro-batch, on all ranks; an error that it raises stops the stage.
        restore: Puts the adapters of a bank back after the jobs' starting adapter has replaced them.

    Raises:
        DeviceMemoryError: A single pair does not fit into memory; or a micro-batch does not, and other ranks have
            already begun it.
        ModelError: The base model gives a reply a log-probability that is not finite.
    """
    if not context.objective.needs_reference:
        return context
    ranks, is_cached, began = context.ranks, True, time.perf_counter()
    splits = []
    for split in context.data.splits:
        chunks = []
        for part in split.parts(PART_ROWS):
            key = _reference_key(context, part)
            known = _cached_references(key, len(part)) if ranks.is_first and context.base.is_loadable else None
            references = ranks.broadcast_tensor(known, (len(part), COLUMNS), torch.float64)
            if references is None:
                is_cached = False
                references = _computed_references(context, part, micro_batches, on_turn, restore)
                if ranks.is_first and context.base.is_loadable:
                    cache.save("references", key, references.tolist())
            chunks.append(references)
        sums, tails = torch.cat(chunks).split(2, dim=1)
        splits.append(split.with_references(sums.contiguous(), tails.contiguous()))
    fact = ReferenceFact(is_cached=is_cached, duration_s=time.perf_counter() - began)
    return replace(context, data=context.data.with_splits(splits), references=fact)


def _cached_references(key: Mapping[str, Any], num_rows: int) -> Tensor | None:
    cached = cache.load("references", key)
    if cached is None:
        return None
    try:
        known = torch.tensor(cached, dtype=torch.float64)
        if known.shape != (num_rows, COLUMNS) or not bool(known.isfinite().all()):
            raise ValueError(f"not {COLUMNS} finite numbers for each of {num_rows} pairs")
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        cache.discard("references", key, error)
        return None
    return known


@torch.no_grad()
def _computed_references(
    context: TaskContext,
    dataset: EncodedDataset,
    micro_batches: MicroBatches,
    on_turn: Callable[[], None],
    restore: Callable[[], None],
) -> Tensor:
    backbone, ranks = context.backbone, context.ranks
    everything = JobRows(dataset, 0, tuple(range(len(dataset))))
    work, num_micro_batches = divided(everything, micro_batches, ranks)
    by_row: dict[int, Sequence[float]] = {}

    def compute(parts: Sequence[JobRows], within: Within) -> None:
        on_turn()
        with watching("evaluation"):
            batch = collate(parts, backbone.device)
            with within(sum(batch.job_tokens)):
                log_probs = torch.cat(reference_sums(backbone, batch), dim=1).tolist()
        by_row.update(zip((row for part in parts for row in part.rows), log_probs, strict=bool(parts)))

    try:
        with beginning_with(context.start, backbone, restore) as within:
            micro_batches.run(
                work,
                lambda parts: compute(parts, within),
                forget=by_row.clear,
                split_jobs=True,
                num_micro_batches=num_micro_batches,
            )
    except RowTooLargeError as error:
        raise DeviceMemoryError(
            f"not enough memory on {backbone.device} for a forward pass of the base model on a row of "
            f"{error.evidence['row_tokens']:,} tokens; lower max_length, or set {LOAD_IN_4BIT}"
        ) from error
    numbers = [number for row in range(len(dataset)) for number in by_row.get(row, (0.0,) * COLUMNS)]
    references = torch.tensor(ranks.sum(numbers), dtype=torch.float64).view(-1, COLUMNS)
    num_broken = int((~references.isfinite()).any(1).sum())
    if num_broken:
        raise ModelError(
            f"expected finite log-probabilities of every reply under the base model, found infinite or NaN ones in "
            f"{num_broken} of {len(dataset)} pairs; the model's weights are broken, or {backbone.dtype} is too narrow "
            "for it (dtype: float32)"
        )
    return references


def _reference_key(context: TaskContext, dataset: EncodedDataset) -> dict[str, Any]:
    """Return everything that the log-probs depend on: the loaded files and precision of the base model, not the
    requested ones."""
    backbone = context.backbone
    return {
        "base": context.base.key() | {"id": backbone.path, "dtype": str(backbone.dtype)},
        "commit": getattr(backbone.model.config, "_commit_hash", None),
        "weights": cache.weights_of(context.base.id),
        "versions": cache.versions(),
        "device": backbone.device.type,
        "columns": COLUMNS,
        "data": digest_of(dataset),
        "tenant": context.task.tenant,  # a cache hit is reported, and must not reveal what another tenant has trained
        **({} if context.start is None else {"adapter": context.start.fact.fingerprint}),
    }
