"""The state of one task while it runs, and what can happen to its jobs; each of these is told to the journal."""

from __future__ import annotations

import math
import platform
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from alto.backbone import Backbone, device_name
from alto.data import TaskData
from alto.early_exit import Selection, policy_from, rung_notes, selection_of
from alto.executor.job_run import JobPlanner, JobRun
from alto.executor.memory_errors import MemoryEvent, RowTooLargeError
from alto.executor.micro_batches import MicroBatches
from alto.executor.model_notes import model_notes
from alto.executor.ranks import Ranks
from alto.executor.recovery import ResumeState, check_data, check_jobs, data_fingerprint, note_refusal
from alto.executor.references import References, find_references
from alto.executor.slot_manager import SlotManager
from alto.executor.tally import Evaluated
from alto.objectives import find_objective
from alto.records import ExitDecision, ExitReason, LossPoint, StartValue, TaskPlan, Throughput, ThroughputPoint
from alto.runs import Journal, RunDir
from alto.scheduler import JobDemand, LastJob, ResidentLimits, forecast_last_jobs, plan_residents
from alto.spec import Job, ObjectiveSettings, Task
from alto.spec.metric import LOSS, loss_scale, metric_notes, score_of
from alto.spec.rungs import places_at
from alto.version import version_of

__all__ = ["TaskRun"]

FROM_CHECKPOINT = "from_checkpoint"
"""Why a job gets its slot where the scheduler is not asked."""


class TaskRun:
    """All jobs of a task, the selection between them, and where they are.

    Args:
        runs: The task's jobs, from :func:`alto.executor.plan_jobs`.
        backbone: The base model the jobs were planned for.
        run_dir, journal: Where everything goes.
        past: What an interrupted run goes on from; empty for a task that begins.
        ranks: This process among those that train the task. Each has all of this, and it is the same on all.
        on_turn: Called now and then while the base is asked about the data, on all ranks; it may raise.
        base: Fingerprint and precision of the base model, for the journal.

    Attributes:
        runs: Every job by id, clones last.
        selection: Who trains, who waits, who has ended.
        slot_manager: Which job is in which slot.

    Raises:
        RunChangedError: The data, the jobs, the method, the metric, the evaluation points or the early-exit settings
            are other ones than the run began with.
        DeviceMemoryError, ModelError: See :func:`alto.executor.references.find_references`.
    """

    def __init__(
        self,
        task: Task,
        runs: Sequence[JobRun],
        backbone: Backbone,
        data: TaskData,
        *,
        run_dir: RunDir,
        journal: Journal,
        resume_state: ResumeState,
        ranks: Ranks,
        on_turn: Callable[[], None],
        base: Mapping[str, Any] | None = None,
    ) -> None:
        self.task = task
        self._base = base
        self.journal = journal
        self._ranks = ranks
        self._run_dir = run_dir
        self._backbone = backbone
        self._planner = JobPlanner(task, backbone.model, len(data.train))
        self.runs = {run.id: run for run in [*runs, *self._clones(resume_state)]}
        if resume_state.events:
            check_data(resume_state.events[0], data)
            check_jobs(resume_state.events[0], {run.id: run.config for run in self.runs.values()}, task)
        self.selection = self._selection_after(resume_state)
        self._unreported: list[MemoryEvent] = []
        self._has_begun = False
        max_tokens = min(task.max_tokens_per_pass or sys.maxsize, resume_state.max_tokens_per_pass or sys.maxsize)
        self._references: References | None = None
        if find_objective(task.method).needs_reference:
            micro_batches = MicroBatches(max_tokens, self._on_memory_event, can_retry=ranks.is_alone)
            self._references = find_references(task, backbone, data, micro_batches, ranks, on_turn)
            data, max_tokens = self._references.data, micro_batches.max_tokens
        self._data = data
        self.slot_manager = SlotManager(
            task,
            self.runs.values(),
            backbone,
            data,
            run_dir=run_dir,
            max_tokens_per_pass=max_tokens,
            on_memory_event=self._on_memory_event,
            ranks=ranks,
        )
        self._row_tokens = data.train.num_tokens / len(data.train)
        self._ahead: frozenset[str] = frozenset()
        self._admitted_for: tuple[int, ResidentLimits] | None = None
        self._throughput: Throughput | None = None
        self._num_offered: int | None = None

    def begin(self, resume_state: ResumeState, forecast: TaskPlan | None = None) -> None:
        """Say what is about to be trained, and what is expected of it."""
        configs = [run.config for run in self.runs.values()]
        metric_note = metric_notes(self.task.metric, self.task.method, configs)
        about_model = model_notes(self._backbone.model, configs)
        self.journal.append(
            "task_started",
            task=self.task.name,
            model=self.task.model,
            base_model=self._backbone.path,
            **({} if self._base is None else {"base": self._base}),
            dataset=self.task.dataset,
            method=self.task.method,
            metric=self.task.metric,
            eval_steps=self.task.eval_steps,
            num_train=len(self._data.train),
            num_validation=len(self._data.validation),
            data={**self._data.counts(), "fingerprint": data_fingerprint(self._data)},
            notes=[*resume_state.notes, *self._data.notes, *about_model, *metric_note, *self._rung_notes()],
            **self._reference_facts(),
            max_slots=self.slot_manager.num_slots,
            packing=self._packing(),
            early_exit=self.task.early_exit.resolved().model_dump(mode="json"),
            device=str(self._backbone.device),
            num_ranks=self._ranks.size,
            versions=_versions(),
            jobs=[self._description(run) for run in self.runs.values()],
        )
        if forecast is not None:
            self.journal.append("profile", **_profile_facts(forecast))
            self._throughput = forecast.throughput
        self._record_refusal(resume_state)
        self._record_memory_events()

    def evaluate_base(self) -> None:
        """Find out, once, what validation gives before the first step of every job: what it gives with the frozen base.
        Where a row does not fit into memory, jobs that evaluate it will say so."""
        alike: dict[ObjectiveSettings, list[JobRun]] = {}  # which have the same loss on the frozen base
        for run in self.runs.values():
            alike.setdefault(run.config.objective, []).append(run)
        try:
            found = self.slot_manager.trainer.evaluate_base([runs[0].config for runs in alike.values()])
        except RowTooLargeError:
            return
        values = []
        for runs, worth in zip(alike.values(), found, strict=True):
            score = score_of(self.task.metric, worth.metrics)
            start = StartValue(validation_loss=worth.loss, score=score, score_rows=worth.metric_rows)
            values.append({"jobs": [run.id for run in runs], **worth.facts()})
            for run in runs:
                self.selection.observe_base(run.id, start)
        self.journal.append("base_evaluated", values=values)

    def _start_like_others(self, clone: JobRun) -> None:
        """A clone that begins with fresh weights has the base's value that other jobs with the same loss have."""
        for run in self.runs.values():
            start = self.selection.start_of(run.id)
            if start is not None and run.config.objective == clone.config.objective:
                self.selection.observe_base(clone.id, start)
                metrics = {} if self.task.metric == LOSS else {self.task.metric: start.score}
                known = Evaluated(loss=start.validation_loss, metrics=metrics, metric_rows=start.score_rows)
                self.journal.append("base_evaluated", values=[{"jobs": [clone.id], **known.facts()}])
                return

    def _packing(self) -> dict[str, Any]:
        """What decides which jobs share a forward pass; with the same, another run has the same bits."""
        return {
            "max_slots": self.task.max_slots,
            "max_tokens_per_step": self.task.max_tokens_per_step,
            "max_tokens_per_pass": self.task.max_tokens_per_pass,
            "gradient_checkpointing": self.task.gradient_checkpointing,
            "device": device_name(self._backbone.device),
        }

    def resume(self, resume_state: ResumeState) -> None:
        """Put every job where the checkpoint left it."""
        self.journal.append(
            "task_resumed",
            notes=list(resume_state.notes),
            **({"base": self._base} if resume_state.base is None and self._base is not None else {}),
            versions=_versions(),
            max_slots=self.slot_manager.num_slots,
            num_ranks=self._ranks.size,
        )
        self._record_refusal(resume_state)
        self._record_memory_events()
        if resume_state.events[0].get("num_ranks", 1) == self._ranks.size:
            self._throughput = _measured_throughput(resume_state)
        assert resume_state.checkpoint is not None
        for job, at in resume_state.checkpoint["jobs"].items():
            run = self.runs[job]
            run.step = run.saved_step = at["step"]
            run.saved_best_step = at["best_step"]
            # A task may go on with fewer slots than it began with; whoever finds none is parked.
            if at["slot"] is not None and at["slot"] < self.slot_manager.num_slots:
                self.admit(run, at["slot"], FROM_CHECKPOINT)

    def admit_jobs(self) -> None:
        """Carry out the scheduler's plan, where it may have changed."""
        limits = ResidentLimits(
            num_slots=self.slot_manager.num_slots,
            max_tokens=self.task.max_tokens_per_step,
            num_ranks=self._ranks.size,
        )
        if self._admitted_for == (self.selection.num_changes, limits):
            return
        plan = plan_residents(self._demands(), limits)
        for parking in plan.park:
            self.park(self.runs[parking.job], parking.reason)
        if plan.park:
            self._ranks.wait()  # what one rank has put on disk another may read
        for admission in plan.admit:
            self.admit(
                self.runs[admission.job], admission.slot, admission.reason, is_data_parallel=admission.is_data_parallel
            )
        self._ahead = plan.ahead
        self._offer_gpus()
        self._admitted_for = (self.selection.num_changes, limits)

    def _offer_gpus(self) -> None:
        """Say, once for as many jobs as are left, what they would take on a GPU each; the queue may then ask this
        executor to end and go on so."""
        training = self.active()
        if (
            self._throughput is None
            or len(training) != len(self.selection.training)
            or len(training) == self._num_offered
        ):
            return
        jobs = [
            LastJob(num_tokens=self._step_tokens(run), num_steps=run.total_steps - run.step, step=run.step)
            for run in training
        ]
        rungs = policy_from(self.task.early_exit).rungs
        places = [(rung.progress, places_at(rungs, index, len(self.runs))) for index, rung in enumerate(rungs)]
        tail = forecast_last_jobs(jobs, self._throughput, self._ranks.size, places=places)
        if tail is not None:
            self._num_offered = len(training)
            self.journal.append("gpus_offered", **asdict(tail))

    def admit(self, run: JobRun, slot: int, reason: str, *, is_data_parallel: bool = False) -> None:
        """A job enters ``slot``; one that is spread enters the same place on every rank."""
        self.slot_manager.admit(run, slot, is_data_parallel=is_data_parallel)
        self.journal.append(
            "job_resumed" if run.step else "job_admitted",
            job=run.id,
            slot=slot,
            step=run.step,
            reason=reason,
            **self._where(slot, is_data_parallel=is_data_parallel),
        )

    def _where(self, slot: int, *, is_data_parallel: bool) -> dict[str, Any]:
        """The ranks that train the job in ``slot``; nothing where there is one only."""
        if self._ranks.is_alone:
            return {}
        rank = self.slot_manager.trainer.slots.rank_of(slot)
        return {"ranks": list(range(self._ranks.size)) if is_data_parallel else [rank]}

    def park(self, run: JobRun, reason: str) -> None:
        """A job leaves its slot and will come back."""
        self.record_losses(run)
        slot = self.slot_manager.evict(run)
        self.journal.append("job_parked", job=run.id, slot=slot, step=run.step, reason=reason)

    def end(self, run: JobRun, decision: ExitDecision | None, command: str | None = None) -> None:
        """A job is over: by ``decision`` (``command`` is what asked for it), or because all its steps are done."""
        self.record_losses(run)
        slot = self.slot_manager.evict(run) if run.slot is not None else None
        best = self.selection.best(run.id)
        facts = {
            "job": run.id,
            "slot": slot,
            "step": run.step,
            "best_step": best.step if best else 0,
            "best_validation_loss": best.validation_loss if best else None,
            "samples_trained": self._samples(run, run.step),
            **({} if command is None else {"command": command}),
        }
        if decision is None:
            self.journal.append("job_completed", **facts)
        else:
            self.journal.append("job_exited", reason=decision.reason, evidence=dict(decision.evidence), **facts)

    def plan_clone(self, job: Job) -> JobRun:
        """The run of a job that may be added; raises as :meth:`Objective.check` and :meth:`JobPlanner.plan` do."""
        find_objective(self.task.method).check(self._data.train, [job.config])
        return self._planner.plan(job)

    def add(self, clone: JobRun, origin: JobRun, command: str) -> None:
        """A job that came up while the task runs is pending from now on.

        Raises:
            DeviceMemoryError: Its adapter does not fit; nothing has changed.
        """
        slots = {run.id: run.slot for run in self.runs.values()}
        without_slot = self.slot_manager.fit([*self.runs.values(), clone])
        for run in without_slot:
            self.record_losses(run)
            self.journal.append("job_parked", job=run.id, slot=slots[run.id], step=run.step, reason="fewer_slots")
        self.runs[clone.id] = clone
        self.selection.add(clone.id, clone.total_steps, loss_scale(clone.config.model_dump()))
        self.journal.append(
            "job_added", origin=origin.id, warm=clone.starts_warm, command=command, **self._description(clone)
        )
        if not clone.starts_warm:
            self._start_like_others(clone)

    def fail(self, error: RowTooLargeError) -> None:
        """End the job whose row does not fit into memory."""
        run = next(run for run in self.runs.values() if run.slot == error.slot)
        evidence = {"row_tokens": error.num_tokens, "largest_pass": self.slot_manager.trainer.micro_batches.largest}
        decision = ExitDecision(job=run.id, step=run.step, reason=ExitReason.FAILED, evidence=evidence)
        self.selection.end(decision)
        self.end(run, decision)

    def reopen(self, run: JobRun, command: str) -> None:
        """A job that was ended goes on."""
        self.selection.reopen(run.id)
        self.journal.append("job_reopened", job=run.id, step=run.step, command=command)

    def record_losses(self, run: JobRun) -> None:
        """Journal the training losses that it has not heard of."""
        if run.unsaved_losses:
            first_step = run.step - len(run.unsaved_losses) + 1
            self.journal.append("train", job=run.id, first_step=first_step, losses=run.unsaved_losses)
            run.unsaved_losses = []

    def save(self) -> None:
        """Commit a checkpoint: all states, and the journal up to here, survive anything from now on.

        Raises:
            RunBusyError: As of :meth:`alto.runs.RunDir.check_lock`; no rank has written a state.
            RunWriteError: The run directory cannot be written.
        """
        self._run_dir.check_lock()
        self._ranks.wait()  # until the first rank, which holds the lock, has found that it still does
        for run in self.runs.values():
            self.record_losses(run)
            self.slot_manager.save(run)
        self._ranks.wait()  # until every state is on disk
        self.journal.append(
            "checkpoint",
            jobs={
                run.id: {"step": run.saved_step, "slot": run.slot, "best_step": run.saved_best_step}
                for run in self.runs.values()
                if run.saved_step
            },
        )
        self.journal.sync()
        self._ranks.wait()  # until the journal is, too
        self.slot_manager.commit()

    def complete(self, winner: LossPoint, tied: Sequence[LossPoint] = ()) -> None:
        """Journal the winner, and what it took.

        Args:
            tied: Best evaluations of other jobs whose score by the task's metric cannot be told from the winner's.
        """
        runs = self.runs.values()
        self.journal.append(
            "task_completed",
            best_job=winner.job,
            best_validation_loss=winner.validation_loss,
            **({"within_noise": [_standing(point) for point in tied]} if tied else {}),
            samples_trained=sum(self._samples(run, run.step) for run in runs),
            samples_budgeted=sum(self._samples(run, run.total_steps) for run in runs),
        )
        self.journal.sync()

    def is_competing(self, run: JobRun) -> bool:
        """Whether the job has not ended."""
        return self.selection.is_training(run.id)

    def active(self) -> list[JobRun]:
        """The jobs that take the next step."""
        return [run for run in self.runs.values() if run.slot is not None and self._trains(run)]

    def _trains(self, run: JobRun) -> bool:
        return run.id in self._ahead or not self.selection.is_waiting(run.id)

    def _on_memory_event(self, event: MemoryEvent) -> None:
        if not self._ranks.is_alone and event.phase in ("forward", "backward", "evaluation"):
            note_refusal(self._run_dir, self._facts(event))  # for the next attempt: this one ends
            return
        self._unreported.append(event)
        if self._has_begun:
            self._record_memory_events()

    def _record_memory_events(self) -> None:
        """Journal what has happened; the bank is made before there is anything that it could follow."""
        self._has_begun = True
        for event in self._unreported:
            self.journal.append("oom", **self._facts(event))
        self._unreported.clear()

    def _facts(self, event: MemoryEvent) -> dict[str, Any]:
        residents = [run for run in self.runs.values() if run.slot is not None]
        return {
            "phase": event.phase,
            "residents": [run.id for run in residents if self.slot_manager.trainer.local_slot(run) in event.slots],
            "num_tokens": event.num_tokens,
            "max_tokens_per_pass": event.max_tokens_per_pass,
            **({} if event.num_slots is None else {"num_slots": event.num_slots}),
        }

    def _record_refusal(self, resume_state: ResumeState) -> None:
        """Journal why the attempt before this one ended, where it could not."""
        if resume_state.refusal is not None:
            self.journal.append("oom", **resume_state.refusal)

    def _clones(self, resume_state: ResumeState) -> list[JobRun]:
        clones = []
        for event in resume_state.events:
            if event["event"] == "job_added":
                run = self._planner.plan(Job(id=event["job"], config=self.task.job_config(event["config"])))
                run.starts_warm = event["warm"]
                clones.append(run)
        return clones

    def _selection_after(self, resume_state: ResumeState) -> Selection:
        if resume_state.events:
            return selection_of(resume_state.events)
        settings = self.task.early_exit
        total_steps = {job: run.total_steps for job, run in self.runs.items()}
        scales = {job: loss_scale(run.config.model_dump()) for job, run in self.runs.items()}
        return Selection(
            policy_from(settings), ema_alpha=settings.ema_alpha, total_steps=total_steps, loss_scales=scales
        )

    def _reference_facts(self) -> dict[str, Any]:
        if self._references is None:
            return {}
        return {"references": {"is_cached": self._references.is_cached, "duration_s": self._references.duration_s}}

    def _rung_notes(self) -> tuple[str, ...]:
        rungs = policy_from(self.task.early_exit).rungs
        runs = self.runs.values()
        rises = [run.config.lr_warmup_share(run.total_steps) for run in runs]
        return rung_notes(rungs, [run.total_steps for run in runs], rises)

    def _samples(self, run: JobRun, steps: int) -> int:
        return run.config.samples_after(steps, len(self._data.train))

    def _description(self, run: JobRun) -> dict[str, object]:
        return {
            "job": run.id,
            "config": run.config.model_dump(mode="json"),
            "total_steps": run.total_steps,
            "samples_budgeted": self._samples(run, run.total_steps),
            "num_parameters": run.shape.num_parameters,
        }

    def _step_tokens(self, run: JobRun) -> int:
        """Tokens of a step in expectation, rounded up."""
        num_rows = min(run.config.per_device_train_batch_size, len(self._data.train))
        return math.ceil(num_rows * self._row_tokens)

    def _demands(self) -> Iterator[JobDemand]:
        """What every job that has not ended wants of the bank."""
        certain = self.selection.certain_to_be_kept()
        for job in self.selection.training:
            run = self.runs[job]
            yield JobDemand(
                job=job,
                batch_size=run.config.per_device_train_batch_size,
                num_tokens=self._step_tokens(run),
                slot=run.slot,
                is_data_parallel=run.is_data_parallel,
                is_waiting=self.selection.is_waiting(job),
                may_run_ahead=job in certain,
                has_started=run.step > 0,
            )


def _standing(point: LossPoint) -> dict[str, Any]:
    return {"job": point.job, "gain": point.score, "validation_loss": point.validation_loss}


def _profile_facts(forecast: TaskPlan) -> dict[str, Any]:
    return {
        "is_cached": forecast.is_cached,
        "profile_s": forecast.profile_s,
        "memory": asdict(forecast.memory),
        "throughput": asdict(forecast.throughput),
        "slot_bytes": forecast.slot_bytes,
        "max_slots": forecast.max_slots,
        "max_tokens_per_step": forecast.max_tokens_per_step,
        "max_tokens_per_pass": forecast.max_tokens_per_pass,
        "gradient_checkpointing": forecast.gradient_checkpointing,
        "peak_bytes": forecast.peak_bytes,
        "duration_s": forecast.duration_s,
        "expected_duration_s": forecast.expected_duration_s,
    }


def _measured_throughput(resume_state: ResumeState) -> Throughput | None:
    profile = next((event for event in resume_state.events if event["event"] == "profile"), None)
    if profile is None:
        return None
    law = profile["throughput"]
    return Throughput(**{**law, "points": tuple(ThroughputPoint(**point) for point in law["points"])})


def _versions() -> dict[str, str | None]:
    return {
        "python": platform.python_version(),
        **{name: version_of(name) for name in ("alto-lora", "torch", "transformers")},
    }
