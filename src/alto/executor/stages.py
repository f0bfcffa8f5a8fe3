"""The stages of a task before training. Each stage can be run and tested by itself.

load base -> context (plan the jobs) -> reference log-probs -> bank -> train (:class:`alto.executor.Executor`)
"""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import PreTrainedModel

from alto.backbone import Backbone, config_notes, device_name, is_out_of_memory, load_backbone, router_notes
from alto.base import resume_command
from alto.data import TaskData
from alto.early_exit import Selection, rung_notes, selection_of
from alto.errors import DeviceMemoryError, TaskInterruptedError
from alto.executor.conclusion import Hooks
from alto.executor.context import TaskContext
from alto.executor.evaluations import evaluate_base
from alto.executor.job_state import JobState, initial_states
from alto.executor.lifecycle import JobLifecycle
from alto.executor.micro_batches import MicroBatches, OnMemoryEvent
from alto.executor.planned_job import PlannedJob
from alto.executor.profiling.planning import disk_bytes, disk_notes, free_bytes
from alto.executor.ranks import Ranks
from alto.executor.recorder import JournalRecorder, describe_job
from alto.executor.recovery import ResumeState, check_data, check_jobs, check_start, data_fingerprints, refit_fact
from alto.executor.references import find_references
from alto.executor.shared_bank import SharedBank
from alto.executor.slot_manager import SlotManager, TaskState
from alto.executor.tally import Stopwatch
from alto.lora import bias_notes, rank_notes, tying_notes, untrained_notes
from alto.records import TaskPlan, Throughput
from alto.runs import Event, RunDir
from alto.runs.events import (
    BaseDescription,
    JobAdded,
    JobExited,
    JobReopened,
    ProfileMeasured,
    ReferenceFact,
    TaskResumed,
    TaskStarted,
)
from alto.spec import LOAD_IN_4BIT, BaseModelSpec, Job, JobConfig, Task, loss_scale, metric_notes, plain
from alto.version import version_of


def model_notes(model: PreTrainedModel, configs: Sequence[JobConfig], method: str) -> tuple[str, ...]:
    """Return notes about the base model: parts that the jobs do not train, ranks larger than a module's smaller side,
    an output head tied to the embeddings, requested biases that do not exist, dropout of the base model, and the
    load-balancing loss of its routers.

    Args:
        model: The base model, with or without weights, with or without injected adapters.
        configs: Configurations of all jobs.
        method: The task's method.
    """
    return (
        *untrained_notes(model, configs),
        *rank_notes(model, configs),
        *tying_notes(model, configs),
        *bias_notes(model, configs),
        *config_notes(model.config),
        *router_notes(model, [config.router_aux_loss_coef for config in configs], method),
    )


_REPORT_EVERY_S = 5.0
"""Seconds between two events about kernels that are being compiled."""

FROM_CHECKPOINT = "from_checkpoint"
"""Journal reason of an admission that the scheduler did not plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStart:
    """The inputs of a run that starts or is resumed.

    Attributes:
        run_dir: The run directory.
        resume_state: State of an interrupted run; an empty one starts the task from its first step.
        forecast: Measured memory, packing and duration of the task; None if nothing was measured.
        base: Fingerprint and precision of the base model, for the journal; None if they are not recorded.
    """

    run_dir: RunDir
    resume_state: ResumeState = field(default_factory=ResumeState)
    forecast: TaskPlan | None = None
    base: BaseDescription | None = None

    @property
    def is_resumed(self) -> bool:
        return bool(self.resume_state.lines)

    def throughput(self, num_ranks: int) -> Throughput | None:
        """Return the measured duration of steps on ``num_ranks`` ranks; None if it was not measured."""
        if not self.is_resumed:
            return None if self.forecast is None else self.forecast.throughput
        if self.resume_state.started.num_ranks != num_ranks:
            return None
        events = (entry.event for entry in self.resume_state.entries)
        return next((event.throughput for event in events if isinstance(event, ProfileMeasured)), None)


def begin_task(state: TaskState, start: RunStart, recorder: JournalRecorder, lifecycle: JobLifecycle) -> None:
    """Record that a task begins, or restore its jobs from the last checkpoint."""
    first = [_resume_event(state, start)] if start.is_resumed else _begin_events(state, start)
    recorder.begin(first, start.resume_state.refusal)
    _compile_kernels(state, recorder)
    if start.is_resumed:
        _restore_jobs(state, start, lifecycle)
    else:
        with state.stopwatch.timing("evaluation"):
            evaluate_base(state, recorder)


def _compile_kernels(state: TaskState, recorder: JournalRecorder) -> None:
    """Compile the kernels that the first step would otherwise wait for, and record the progress."""
    configs = [job.config for job in state.jobs.values()]
    began_s = reported_s = time.monotonic()
    for done, total in state.trainer.compile_kernels(configs):
        now_s = time.monotonic()
        if done in (0, total) or now_s - reported_s >= _REPORT_EVERY_S:
            reported_s = now_s
            recorder.kernels_compiled(done, total, now_s - began_s)


def _restore_jobs(state: TaskState, start: RunStart, lifecycle: JobLifecycle) -> None:
    """Restore every job as the checkpoint recorded it."""
    assert start.resume_state.checkpoint is not None
    for job_id, saved in start.resume_state.checkpoint.jobs.items():
        job = state.jobs[job_id]
        job.step = job.saved_step = saved.step
        job.saved_best_step = saved.best_step
        job.is_resumable = saved.is_resumable
        # If the bank now has fewer slots, or a job of another task in this slot, the job stays parked.
        if saved.slot is not None and state.slot_manager.is_free(saved.slot):
            lifecycle.admit(job, saved.slot, FROM_CHECKPOINT)


def _begin_events(state: TaskState, start: RunStart) -> Iterator[Event]:
    """Yield the events before the first job is admitted: the task's description, its expected memory and duration."""
    context, jobs = state.context, list(state.jobs.values())
    task, data, configs = context.task, context.data, [job.config for job in jobs]
    yield TaskStarted(
        task=task.name,
        model=task.model,
        base_model=context.backbone.path,
        base=start.base,
        dataset=task.dataset_name,
        method=task.method,
        metric=task.metric,
        eval_steps=task.eval_steps,
        num_train=len(data.train),
        num_validation=len(data.validation),
        validation_weights=tuple(data.validation.weights),
        evaluation_order=context.evaluation_order,
        data=_described(data, data_fingerprints(data, context.base.chat_template)),
        notes=(
            *start.resume_state.notes,
            *task.notes,
            *_object_notes(context.base),
            *_refit_notes(context),
            *(() if context.start is None else context.start.notes),
            *data.notes,
            *model_notes(context.backbone.model, configs, task.method),
            *_padding_notes(context.backbone),
            *compile_notes(state),
            *_fusion_notes(context.backbone),
            *metric_notes(task.metric, task.method, configs),
            *_rung_notes(state),
            *context.evaluation_notes,
            *_disk_notes(state, start.run_dir),
        ),
        references=context.references,
        gpu_hour_price=task.search.budget.gpu_hour_price,
        init_adapter=None if context.start is None else context.start.fact,
        refit=None if task.refit is None else refit_fact(task.refit),
        fused=context.backbone.fusion.described(),
        max_slots=state.slot_manager.num_slots,
        packing=_packing(state),
        early_exit=task.early_exit.resolved().model_dump(mode="json"),
        device=str(context.backbone.device),
        num_ranks=context.ranks.size,
        versions=_versions(),
        jobs=tuple(describe_job(job) for job in jobs),
    )
    if start.forecast is not None:
        yield _profile(start.forecast)


def _described(data: TaskData, fingerprints: dict[str, str]) -> dict[str, Any]:
    how: dict[str, Any] = {}
    if data.max_length is not None:
        how = {"form": data.form, "of_messages": data.of_messages, "max_length": data.max_length}
    return {**data.counts(), **how, **fingerprints}


def _resume_event(state: TaskState, start: RunStart) -> TaskResumed:
    """Return the event of a resumed run. It describes the base model if the journal does not yet."""
    return TaskResumed(
        notes=start.resume_state.notes,
        base=start.base if start.resume_state.base is None else None,
        versions=_versions(),
        max_slots=state.slot_manager.num_slots,
        num_ranks=state.context.ranks.size,
        fused=state.context.backbone.fusion.described(),
    )


def _packing(state: TaskState) -> dict[str, Any]:
    """Return the settings that decide which jobs share a forward pass; runs with equal settings are bit-identical."""
    task = state.context.task
    return {
        "max_slots": task.max_slots,
        "max_tokens_per_step": task.max_tokens_per_step,
        "max_tokens_per_pass": task.max_tokens_per_pass,
        "gradient_checkpointing": task.gradient_checkpointing,
        "device": device_name(state.context.backbone.device),
    }


def _refit_notes(context: TaskContext) -> tuple[str, ...]:
    refit = context.task.refit
    if refit is None:
        return ()
    [job] = context.jobs
    return (
        f"Refit of {refit.run}: the configuration of its best job, {refit.job}, is trained on all "
        f"{len(context.data.train):,} rows, including the validation rows, for the {refit.steps:,} steps of its best "
        f"checkpoint (its learning-rate schedule has {job.schedule_steps:,} steps). There is no validation.",
    )


def _disk_notes(state: TaskState, run_dir: RunDir) -> tuple[str, ...]:
    needed = disk_bytes(state.context, state.slot_manager.num_slots)
    return disk_notes(needed, free_bytes(run_dir.root), run_dir.root)


def _padding_notes(backbone: Backbone) -> tuple[str, ...]:
    if not backbone.is_padded:
        return ()
    why = backbone.why_padded.split("; ")[0]
    return (
        f"Rows are padded to the longest row of a forward pass, which costs time and memory: {why}. Losses and "
        "adapters are computed only from the rows' own tokens.",
    )


def compile_notes(state: TaskState) -> tuple[str, ...]:
    """Return a note on how many groups of linear layers have their adapters inside the compiled layers, and why not
    all."""
    if not state.context.backbone.is_compiled:
        return ()
    inside, total = state.trainer.graph_groups
    note = f"torch_compile: adapters are inside the compiled layers for {inside} of {total} inputs of linear modules"
    if inside == total:
        return (f"{note}.",)
    why = "rows are padded" if state.context.backbone.is_padded else "jobs train biases (bias) or magnitudes (use_dora)"
    return (f"{note}; for the others they run outside the compiled layers, with more kernel launches, as {why}.",)


def _fusion_notes(backbone: Backbone) -> tuple[str, ...]:
    """Return a note on modules of the base model that run without fused kernels on a GPU."""
    fusion = backbone.fusion
    if backbone.device.type != "cuda" or not fusion.kept:
        return ()
    kept = "; ".join(f"{name}: {why}" for name, why in fusion.kept.items())
    if fusion.counts:
        return (f"Some modules of the base model run without fused kernels ({kept}).",)
    return (f"No module of the base model runs with fused kernels ({kept}).",)


def _object_notes(base: BaseModelSpec) -> tuple[str, ...]:
    if base.is_loadable:
        return ()
    return (
        f"The base model was given as an object, {base.id}, and no name was found that loads the same model and "
        "tokenizer, so the adapter's files have this description instead of a name. To use the adapter elsewhere, save "
        "the model (save_pretrained).",
    )


def _rung_notes(state: TaskState) -> tuple[str, ...]:
    jobs, policy, task = state.jobs.values(), state.context.policy, state.context.task
    rungs = policy.rungs
    if task.search.algorithm == "grid":  # other algorithms add jobs, so that any rung may end jobs
        rungs = policy.ending_rungs(len({task.repetitions.get(job, job) for job in state.jobs}))
    rises = [job.config.lr_warmup_share(job.total_steps) for job in jobs]
    return rung_notes(rungs, rises)


def _profile(forecast: TaskPlan) -> ProfileMeasured:
    return ProfileMeasured(
        is_cached=forecast.is_cached,
        profile_s=forecast.profile_s,
        memory=forecast.memory,
        throughput=forecast.throughput,
        slot_bytes=forecast.slot_bytes,
        max_slots=forecast.max_slots,
        max_tokens_per_step=forecast.max_tokens_per_step,
        max_tokens_per_pass=forecast.max_tokens_per_pass,
        gradient_checkpointing=forecast.gradient_checkpointing,
        peak_bytes=forecast.peak_bytes,
        duration_s=forecast.duration_s,
        expected_duration_s=forecast.expected_duration_s,
    )


def _versions() -> dict[str, str | None]:
    return {
        "python": platform.python_version(),
        **{name: version_of(name) for name in ("alto-lora", "torch", "transformers")},
    }


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
    """Check that a run is resumed with the task that it began with; a run that begins passes.

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
