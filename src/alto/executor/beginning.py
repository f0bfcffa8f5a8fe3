"""The beginning of a task that starts or is resumed, with its first journal events."""

from __future__ import annotations

import platform
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from transformers import PreTrainedModel

from alto.backbone import Backbone, config_notes, device_name, router_notes
from alto.data import TaskData
from alto.early_exit import rung_notes
from alto.executor.context import TaskContext
from alto.executor.evaluations import evaluate_base
from alto.executor.lifecycle import JobLifecycle
from alto.executor.profiling.planning import disk_bytes, disk_notes, free_bytes
from alto.executor.recorder import JournalRecorder, describe_job
from alto.executor.recovery import ResumeState, data_fingerprints, refit_fact
from alto.executor.slot_manager import TrainingState
from alto.lora import bias_notes, rank_notes, tying_notes, untrained_notes
from alto.records import TaskPlan, Throughput
from alto.runs import Event, RunDir
from alto.runs.events import (
    BaseDescription,
    KernelsCompiled,
    ProfileMeasured,
    TaskResumed,
    TaskStarted,
)
from alto.spec import BaseModelSpec, JobConfig, metric_notes
from alto.version import version_of


def model_notes(model: PreTrainedModel, configs: Sequence[JobConfig], method: str) -> tuple[str, ...]:
    """Return notes about the base model: parts that the jobs do not train, ranks larger than a module's smaller side,
    an output head tied to the embeddings, requested biases that do not exist, dropout of the base model, and the
    load-balancing loss of its routers.

    Args:
        model: The base model, with or without weights, with or without injected adapters.
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
class RunInputs:
    """The inputs of a run that starts or is resumed.

    Attributes:
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


def begin_task(state: TrainingState, start: RunInputs, recorder: JournalRecorder, lifecycle: JobLifecycle) -> None:
    """Record that a task begins, or restore its jobs from the last checkpoint."""
    first = [_resume_event(state, start)] if start.is_resumed else _begin_events(state, start)
    recorder.begin(first, start.resume_state.oom_record)
    _compile_kernels(state, recorder)
    if start.is_resumed:
        _restore_jobs(state, start, lifecycle)
    else:
        with state.stopwatch.timing("evaluation"):
            evaluate_base(state, recorder)


def _compile_kernels(state: TrainingState, recorder: JournalRecorder) -> None:
    """Compile the kernels that the first step would otherwise wait for, and record the progress."""
    configs = [job.config for job in state.jobs.values()]
    began_s = reported_s = time.monotonic()
    for done, total in state.trainer.compile_kernels(configs):
        now_s = time.monotonic()
        if done in (0, total) or now_s - reported_s >= _REPORT_EVERY_S:
            reported_s = now_s
            recorder.append(KernelsCompiled(done=done, total=total, duration_s=now_s - began_s))


def _restore_jobs(state: TrainingState, start: RunInputs, lifecycle: JobLifecycle) -> None:
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


def _begin_events(state: TrainingState, start: RunInputs) -> Iterator[Event]:
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
        validation_weights=context.validation_weights,
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
        refit=refit_fact(task.refit),
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
        yield ProfileMeasured(**{fact.name: getattr(start.forecast, fact.name) for fact in fields(ProfileMeasured)})


def _described(data: TaskData, fingerprints: dict[str, str]) -> dict[str, Any]:
    how: dict[str, Any] = {}
    if data.layout is not None:
        how = {"form": data.layout.form, "of_messages": data.layout.of_messages, "max_length": data.max_length}
    return {**data.counts(), **how, **fingerprints}


def _resume_event(state: TrainingState, start: RunInputs) -> TaskResumed:
    """Return the event of a resumed run. It describes the base model if the journal does not yet."""
    return TaskResumed(
        notes=start.resume_state.notes,
        base=start.base if start.resume_state.base is None else None,
        versions=_versions(),
        max_slots=state.slot_manager.num_slots,
        num_ranks=state.context.ranks.size,
        fused=state.context.backbone.fusion.described(),
    )


def _packing(state: TrainingState) -> dict[str, Any]:
    """Return the settings that determine which jobs share a forward pass, and the number of CPU threads (None on a
    GPU); runs with the same settings are bit-identical."""
    task, device = state.context.task, state.context.backbone.device
    return {
        "max_slots": task.max_slots,
        "max_tokens_per_step": task.max_tokens_per_step,
        "max_tokens_per_pass": task.max_tokens_per_pass,
        "gradient_checkpointing": task.gradient_checkpointing,
        "device": device_name(device),
        "threads": torch.get_num_threads() if device.type == "cpu" else None,
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


def _disk_notes(state: TrainingState, run_dir: RunDir) -> tuple[str, ...]:
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


def compile_notes(state: TrainingState) -> tuple[str, ...]:
    """Return a note with the number of groups of linear layers whose adapters are inside the compiled layers, and the
    reason if some are not."""
    if not state.context.backbone.is_compiled:
        return ()
    inside, total = state.trainer.passes.forward_context.graph_groups
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


def _rung_notes(state: TrainingState) -> tuple[str, ...]:
    jobs, policy, task = state.jobs.values(), state.context.policy, state.context.task
    rungs = policy.rungs
    if task.search.algorithm == "grid":  # other algorithms add jobs, so that any rung may stop jobs
        rungs = policy.ending_rungs(len({task.repetitions.get(job, job) for job in state.jobs}))
    lr_warmup = max((job.config.lr_warmup_fraction(job.total_steps) for job in jobs), default=0.0)
    earliest = max((job.config.earliest_rung(job.total_steps) for job in jobs), default=0.0)
    return rung_notes(rungs, lr_warmup=lr_warmup, earliest=earliest)


def _versions() -> dict[str, str | None]:
    return {
        "python": platform.python_version(),
        **{name: version_of(name) for name in ("alto-lora", "torch", "transformers")},
    }
