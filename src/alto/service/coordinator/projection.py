"""Projection of a run's journal to the events and checkpoints of its job."""

from __future__ import annotations

import csv
import functools
import hashlib
import io
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from alto.base import finite
from alto.records import ExitReason
from alto.results import TaskResult, load_run
from alto.runs import JournalEntry, JournalTail
from alto.runs import events as journaled
from alto.runs.progress import trained_tokens
from alto.service.context import Service
from alto.service.ids import new_id, now
from alto.service.models import fine_tuned_name
from alto.service.openai.files import RESULTS, artefact_of
from alto.service.openai.translation import multiplier_of, worded_note
from alto.service.savings import savings_of
from alto.service.store.jobs import add_event
from alto.service.store.tables import Checkpoint, FileRow, JobEvent, JobRow, ModelRow
from alto.spec import find_method
from alto.views import format_loss

_NUM_AT_ONCE = 500
"""Maximum number of journal entries per transaction."""


@dataclass(slots=True)
class Projection:
    """The writer that copies a run's journal entries to the database, each entry once.

    A run that was resumed from a checkpoint repeats steps; steps that the database already has are skipped.
    """

    job: str
    path: Path
    _tail: JournalTail = field(init=False)
    _left: list[JournalEntry] = field(init=False, default_factory=list)
    _steps: dict[str, int] | None = field(init=False, default=None)
    _ended: set[str] = field(init=False, default_factory=set)

    def __post_init__(self) -> None:
        self._tail = JournalTail(self.path)

    def has_unwritten(self) -> bool:
        """Return whether entries wait to be written."""
        if not self._left:
            self._left = self._tail.read()
        return bool(self._left)

    def write(self, session: Session, row: JobRow) -> None:
        """Write the new entries, at most 500 per call; ``row`` must be locked."""
        if self._steps is None:
            self._begin(session, row)
        now, self._left = self._left[:_NUM_AT_ONCE], self._left[_NUM_AT_ONCE:]
        for entry in now:
            self._write(session, row, entry)
        if now:
            row.journal_seq = now[-1].seq + 1

    def _begin(self, session: Session, row: JobRow) -> None:
        """Skip entries that an earlier coordinator wrote, and restore the last step of each configuration."""
        self._steps = {}
        known = session.scalars(select(JobEvent.data).where(JobEvent.job == row.id, JobEvent.data.is_not(None)))
        for data in known:
            if data is not None and "job" in data:
                if "step" in data:
                    self._steps[data["job"]] = max(self._steps.get(data["job"], 0), int(data["step"]))
                if "exit_reason" in data:
                    self._ended.add(data["job"])
        self._left = [entry for entry in self._left if entry.seq >= row.journal_seq]

    def _write(self, session: Session, row: JobRow, entry: JournalEntry) -> None:
        event, at = entry.event, entry.time
        note = functools.partial(add_event, session, row, created_at=at)
        match event:
            case journaled.TaskStarted(jobs=jobs):
                note(f"Training {len(jobs)} configuration{'' if len(jobs) == 1 else 's'}")
                for text in event.notes:
                    note(worded_note(text), level="warn")
            case journaled.TaskResumed():
                note("Training continues from its checkpoints")
            case journaled.JobEvaluated():
                self._on_evaluated(session, row, event, at)
            case journaled.WarmupEnded(kept=kept, dropped=dropped, progress=progress) if dropped:
                note(
                    f"Selected {len(kept)} of {len(kept) + len(dropped)} configurations at {progress:.1%} of their "
                    "steps",
                    data={"kept": list(kept), "dropped": list(dropped), "progress": progress},
                )
            case journaled.JobExited(job=job, reason=reason) if job not in self._ended:
                self._ended.add(job)
                note(
                    _ended(job, reason),
                    data={"job": job, "exit_reason": str(reason), "evidence": _finite(dict(event.evidence))},
                )
            case journaled.JobReopened(job=job) | journaled.JobAdded(job=job):
                self._ended.discard(job)
                note(f"Configuration {job} was added to the training", data={"job": job})
            case journaled.OutOfMemory():
                note("Memory ran out; training continues with fewer configurations at a time", level="warn")

    def _on_evaluated(self, session: Session, row: JobRow, event: journaled.JobEvaluated, at: float) -> None:
        assert self._steps is not None
        if event.step <= self._steps.get(event.job, 0):
            return  # repeated after resuming from a checkpoint
        self._steps[event.job] = event.step
        metrics = _finite(
            {
                "step": event.step,
                "train_loss": event.train_ema,
                "full_valid_loss": event.validation_loss,
                "valid_loss": event.validation_loss,
            }
        )
        add_event(
            session,
            row,
            f"Configuration {event.job}, step {event.step}/{event.total_steps}: training loss "
            f"{format_loss(event.train_ema)}, validation loss {format_loss(event.validation_loss)}",
            created_at=at,
            data={
                **metrics,
                "job": event.job,
                "total_steps": event.total_steps,
                **_finite(dict(event.metrics)),
            },
        )
        if event.is_best:
            name = fine_tuned_name(row.model, row.tenant, row.suffix, row.id)
            session.add(
                Checkpoint(
                    id=f"ftckpt-{row.id.partition('-')[2]}-{event.job}-{event.step}",
                    job=row.id,
                    task_job=event.job,
                    step=event.step,
                    created_at=int(at),
                    model=f"{name}:ckpt-{event.job}-step-{event.step}",
                    metrics=metrics,
                )
            )


def _ended(job: str, reason: str) -> str:
    """Return the message for a configuration that ended before its last step."""
    if reason == ExitReason.STOPPED:
        return f"Configuration {job} was stopped by a user"
    return f"Configuration {job} stopped early: {reason}"


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    """Return ``values`` with None for numbers that are not finite, which JSON cannot hold."""
    return {key: finite(value) if isinstance(value, float) else value for key, value in values.items()}


_COLUMNS = ("job", "step", "progress", "train_loss", "valid_loss", "test_loss")


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """Stored results of a finished run, which its job does not show yet.

    Attributes:
        result: Value of the job's ``result``.
        message: A sentence for users.
        data: The same for programs.
    """

    model: ModelRow
    curves: FileRow
    result: dict[str, Any]
    message: str
    data: dict[str, Any]


def publish(service: Service, job: JobRow) -> Publication:
    """Store the adapter and the loss curves of the finished run of ``job`` among the artifacts.

    Raises:
        AltoError: The run has no result.
        OSError: The artifacts cannot be written.
    """
    result = load_run(service.run_of(job))
    adapter = f"models/{job.tenant}/{job.id}"
    service.artefacts.write_folder(adapter, service.run_of(job) / "best")
    text = _curves(result).encode()
    curves = FileRow(
        id=new_id("file"),
        tenant=job.tenant,
        filename=f"{job.id}-results.csv",
        purpose=RESULTS,
        num_bytes=len(text),
        sha256=hashlib.sha256(text).hexdigest(),
        created_at=now(),
        status="processed",
    )
    service.artefacts.write(artefact_of(curves), io.BytesIO(text))
    name = fine_tuned_name(job.model, job.tenant, job.suffix, job.id)
    model = ModelRow(
        id=name, tenant=job.tenant, job=job.id, base_model=job.model, adapter=adapter, created_at=now(), serving="none"
    )
    best = next(job_result for job_result in result.job_results if job_result.job == result.best_job)
    history = result.history
    saved = savings_of(history, "succeeded").share
    facts = {
        "job": result.best_job,
        "best_step": best.best_step,
        "best_valid_loss": finite(result.best_validation_loss),
        "test_loss": finite(best.test_loss),
        "configurations": len(result.job_results),
        "samples_trained": history.samples_trained,
        "samples_budgeted": history.samples_budgeted,
        "saved_share": round(saved, 4),
    }
    loss, learns_from_rewards = result.best_validation_loss, find_method(history.method).entry.generates
    value = f"mean reward {format_loss(0.0 - loss)}" if learns_from_rewards else f"validation loss {format_loss(loss)}"
    message = f"Best of {len(result.job_results)} configurations: {result.best_job}, {value}"
    if saved:
        message += f"; early exit saved {saved:.0%} of the training"
    return Publication(
        model=model,
        curves=curves,
        result={
            **facts,
            "trained_tokens": trained_tokens(history),
            "result_files": [curves.id],
            "hyperparameters": _chosen(best.config),
        },
        message=message,
        data=facts,
    )


def write_result(session: Session, row: JobRow, found: Publication) -> None:
    """End a job as succeeded, with its published results; ``row`` must be locked."""
    session.add(found.model)
    session.add(found.curves)
    row.status, row.finished_at, row.estimated_finish = "succeeded", now(), None
    row.fine_tuned_model, row.result = found.model.id, found.result
    add_event(session, row, found.message, data=found.data)
    add_event(session, row, f"New fine-tuned model created: {found.model.id}")
    add_event(session, row, "The job has successfully completed")


def _chosen(config: Any) -> dict[str, Any]:
    """Return the best configuration's hyperparameters under OpenAI's names, with ALTO's learning rate and rank. A batch
    of completions counts their prompts."""
    batch_size = config.get("per_device_train_batch_size")
    if batch_size is not None and "num_generations" in config:
        batch_size //= config["num_generations"]
    found = {
        "n_epochs": config.get("num_train_epochs"),
        "batch_size": batch_size,
        "learning_rate_multiplier": multiplier_of(config["learning_rate"]),
        "beta": config.get("beta"),
    }
    return {key: value for key, value in found.items() if value is not None} | {
        "learning_rate": config["learning_rate"],
        "r": config.get("r"),
    }


def _curves(result: TaskResult) -> str:
    """Return all evaluations as CSV, one line per evaluation."""
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(_COLUMNS)
    for job in result.history.jobs.values():
        for point in job.evaluations:
            test = job.test_losses.get(point.step)
            writer.writerow(
                [
                    job.job,
                    point.step,
                    round(point.step / point.total_steps, 6),
                    _text(point.train_ema),
                    _text(point.validation_loss),
                    _text(test),
                ]
            )
    return text.getvalue()


def _text(value: float | None) -> str:
    return "" if value is None or not math.isfinite(value) else f"{value:.7g}"
