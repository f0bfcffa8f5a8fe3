"""``/api/tasks``: tasks with their jobs, loss curves and commands."""

from __future__ import annotations

import copy
import html
import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from fastapi import APIRouter
from fastapi.responses import HTMLResponse
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import select

from alto.base import finite
from alto.errors import MailboxFullError
from alto.report import report_page
from alto.runs import METRICS_NAME, JobAction, Mailbox, RunDir, RunHistory
from alto.runs.job_history import JobHistory
from alto.runs.progress import device_hours, fraction_done
from alto.service.context import Service, ServiceOf
from alto.service.errors import ApiError, not_found, refused
from alto.service.models import public_base
from alto.service.openai.objects import After, Limit, job_object
from alto.service.openai.translation import clone_changes, worded_note
from alto.service.savings import savings_of
from alto.service.store.jobs import OPEN, add_event, find_job, lock_job, page_of
from alto.service.store.tables import JobRow
from alto.service.web.access import Reader, Writer
from alto.service.web.bodies import BodyRoute

_ANSWER_S = 20.0
_WAITING = threading.BoundedSemaphore(8)
"""Limit of requests that wait for an executor's answer; others are answered at once, so that threads stay free."""
_REPORT_POLICY = (
    "sandbox allow-scripts allow-popups; default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "img-src data:; font-src data:"
)
"""Content security policy of reports. They contain texts of users: even a script in them can neither act for the user
nor send anything."""

router = APIRouter(prefix="/tasks", route_class=BodyRoute)


class Clone(BaseModel):
    """Options of a cloned job: the settings that it changes, and whether it starts warm."""

    model_config = ConfigDict(extra="forbid")

    changes: dict[str, Any] = Field(default_factory=dict)
    warm: bool = False


class Priority(BaseModel):
    """The priority of a task among waiting tasks."""

    model_config = ConfigDict(extra="forbid")

    priority: int = Field(ge=0, le=100)


@router.get("")
def list_(service: ServiceOf, caller: Reader, after: After = None, limit: Limit = 20) -> dict[str, Any]:
    """List the tenant's tasks, newest first."""
    with service.store.reading() as session:
        number = None if after is None else find_job(session, caller.tenant, after, "after").number
        statement = select(JobRow).where(JobRow.tenant == caller.tenant)
        rows, has_more = page_of(session, statement, JobRow.number, after=number, limit=limit)
    return {"data": [task_object(service, row) for row in rows], "has_more": has_more}


@router.get("/{task}")
def get(service: ServiceOf, caller: Reader, task: str) -> dict[str, Any]:
    """Return a task with all its jobs, best first; once it has succeeded, also the measurements of its best job."""
    with service.store.reading() as session:
        row = find_job(session, caller.tenant, task)
    history = history_of(service, row)
    return {
        **task_object(service, row),
        "result": _result_of(service, row),
        "jobs": [_job_object(job, rank) for rank, job in enumerate(history.ranked(), 1)],
        "notes": list(history.notes),
        "rungs": [
            {"progress": rung.progress, "kept": list(rung.kept), "dropped": list(rung.dropped)}
            for rung in history.rungs
        ],
        "samples": [
            {
                "prompt": sample.prompt,
                "reference": sample.reference,
                "base": sample.base,
                "adapters": dict(sample.adapters),
            }
            for sample in history.samples
        ],
    }


@router.get("/{task}/curves")
def curves(service: ServiceOf, caller: Reader, task: str) -> dict[str, Any]:
    """Return the losses of every job at its evaluations."""
    with service.store.reading() as session:
        row = find_job(session, caller.tenant, task)
    history = history_of(service, row)
    return {"metric": history.metric, "jobs": {job.job: _curve(job) for job in history.jobs.values()}}


@router.get("/{task}/report", response_model=None, responses={200: {"content": {"text/html": {}}}})
def report(service: ServiceOf, caller: Reader, task: str) -> HTMLResponse:
    """Return the report of the task so far, as a page."""
    with service.store.reading() as session:
        row = find_job(session, caller.tenant, task)
    history = history_of(service, row)
    if history.started is None or row.run_dir is None:
        raise ApiError(
            404,
            f"task: expected a task that has started, found {row.id} {row.status}; try again later",
            param="task",
            code="not_started",
        )
    shown, name = copy.copy(history), public_base(service.settings, row.model)
    rows = Path(history.started.dataset).name
    notes = tuple(worded_note(note) for note in history.started.notes)
    shown.started = replace(history.started, model=name, base_model=name, dataset=rows, notes=notes)
    page = report_page(service.run_of(row), shown, shown_as=Path(row.id))
    if Path(folder := history.started.base_model).is_absolute():  # as the Python code of the model card names it
        page = page.replace(html.escape(folder), html.escape(name))
    return HTMLResponse(page, headers={"Content-Security-Policy": _REPORT_POLICY})


@router.post("/{task}/jobs/{job}/clone")
def clone(service: ServiceOf, caller: Writer, task: str, job: str, body: Clone) -> dict[str, Any]:
    """Train a job of an open task once more, with other settings."""
    return _command(service, caller.tenant, task, job, JobAction.CLONE, body)


@router.post("/{task}/jobs/{job}/{action}")
def command(
    service: ServiceOf, caller: Writer, task: str, job: str, action: Literal["stop", "resume"]
) -> dict[str, Any]:
    """Stop a job of an open task, or resume it."""
    return _command(service, caller.tenant, task, job, JobAction(action), Clone())


@router.post("/{task}/priority")
def priority(service: ServiceOf, caller: Writer, task: str, body: Priority) -> dict[str, Any]:
    """Change the priority of a waiting task."""
    with service.store.writing() as session:
        find_job(session, caller.tenant, task)
        row = lock_job(session, task)
        assert row is not None
        if row.status not in ("validating_files", "queued", "paused"):
            raise refused(
                f"task: expected a waiting or paused task, found {row.id} {row.status}", "task", "invalid_state"
            )
        if row.priority != body.priority:
            row.priority = body.priority
            add_event(session, row, f"Priority changed to {body.priority}", data={"priority": body.priority})
    service.work.set()
    return task_object(service, row)


def history_of(service: Service, row: JobRow) -> RunHistory:
    """Return the history of a task's run; an empty one if it has no run yet."""
    return RunHistory() if row.run_dir is None else service.histories.read(service.run_of(row))


def task_object(service: Service, row: JobRow) -> dict[str, Any]:
    """Return a task and its progress."""
    status = row.status
    figures = (
        _figures_of(RunHistory(), status)
        if row.run_dir is None
        else service.histories.figures(service.run_of(row), status, lambda history: _figures_of(history, status))
    )
    return {
        **job_object(row),
        "object": "task",
        "priority": row.priority,
        "suffix": row.suffix,
        **figures,
        "request": row.request,
    }


def _figures_of(history: RunHistory, status: str) -> dict[str, Any]:
    hours = device_hours(history) if history.started is not None else None
    savings = savings_of(history, status)
    best = history.best
    return {
        "num_jobs": len(history.jobs),
        "num_ended": sum(job.has_ended for job in history.jobs.values()),
        "share_done": round(fraction_done(history), 4),
        "best_job": None if best is None else best.job,
        "best_valid_loss": None if best is None else finite(best.best_validation_loss),
        "samples_trained": history.samples_trained,
        "samples_saved": savings.samples,
        "samples_budgeted": history.samples_budgeted,
        "time_saved_s": finite(savings.time_s),
        "device": None if hours is None else hours.device,
        "device_hours": None if hours is None else round(hours.spent_h, 5),
        "device_hours_saved": None if savings.device_h is None else round(savings.device_h, 5),
    }


def _result_of(service: Service, row: JobRow) -> dict[str, Any] | None:
    """Return settings, losses and metrics of the best job, and the task's cost; None if the task has not succeeded."""
    if row.status != "succeeded":
        return None
    try:
        found: dict[str, Any] = json.loads((service.run_of(row) / "best" / METRICS_NAME).read_bytes())
    except FileNotFoundError:
        return None
    return found


def _job_object(job: JobHistory, rank: int) -> dict[str, Any]:
    return {
        "id": job.job,
        "rank": rank,
        "stage": job.stage.value,
        "config": dict(job.config),
        "step": job.step,
        "total_steps": job.total_steps,
        "best_step": job.best_step,
        "best_valid_loss": finite(job.best_validation_loss) if job.best_step else None,
        "best_metrics": {key: finite(value) for key, value in job.best_metrics.items()},
        "test_loss": finite(job.best_test_loss),
        "test_metrics": {key: finite(value) for key, value in job.best_test_metrics.items()},
        "exit_reason": job.exit_reason,
        "exit_evidence": {
            key: finite(value) if isinstance(value, float) else value for key, value in job.exit_evidence.items()
        },
        "samples_trained": job.samples_trained,
        "samples_saved": job.samples_saved,
        "origin": job.origin,
    }


def _curve(job: JobHistory) -> dict[str, Any]:
    return {
        "exit_reason": job.exit_reason,
        "step": [point.step for point in job.evaluations],
        "progress": [round(point.step / point.total_steps, 6) for point in job.evaluations],
        "train_loss": [finite(point.train_ema) for point in job.evaluations],
        "valid_loss": [finite(point.validation_loss) for point in job.evaluations],
        "test_loss": [finite(job.test_losses.get(point.step)) for point in job.evaluations],
    }


def _command(service: Service, tenant: str, task: str, job: str, action: JobAction, body: Clone) -> dict[str, Any]:
    with service.store.reading() as session:
        row = find_job(session, tenant, task)
    if row.status not in OPEN or row.run_dir is None or row.status == "validating_files":
        raise refused(
            f"task: expected a running, waiting or paused task, found {row.id} {row.status}", "task", "invalid_state"
        )
    jobs = history_of(service, row).jobs
    if job not in jobs:
        raise not_found("job", job, "job", of_what="a job of this task")
    changes = clone_changes(body.changes)
    mailbox = Mailbox(RunDir(service.run_of(row)))
    with service.store.writing() as session:
        lock_job(session, row.id)  # so that requests at the same time cannot exceed the limits together
        if action is JobAction.CLONE:
            _check_num_jobs(service, history_of(service, row), mailbox.num_waiting(JobAction.CLONE))
        try:
            command = mailbox.send(action, job, changes=changes, warm=body.warm)
        except MailboxFullError as error:
            raise ApiError(
                429, str(error), param="task", code="too_many_commands", headers={"Retry-After": "60"}
            ) from None
    answer = None
    if row.status == "running" and _WAITING.acquire(blocking=False):
        try:
            answer = mailbox.wait_for_answer(command, _ANSWER_S)
        finally:
            _WAITING.release()
    if answer is None:
        return {
            "object": "command",
            "id": command,
            "done": False,
            "message": "The executor carries out the command as soon as it runs.",
        }
    if not answer.done:
        raise refused(f"job: {answer.message}", "job", "command_refused")
    return {"object": "command", "id": command, "done": True, "message": answer.message}


def _check_num_jobs(service: Service, history: RunHistory, num_waiting: int) -> None:
    """Check that a task may have another job; waiting clones count.

    Raises:
        ApiError: The task has the maximum number of jobs.
    """
    most, found = service.settings.max_jobs, len(history.jobs) + num_waiting
    if found >= most:
        raise refused(
            f"job: expected a task with fewer than {most} jobs, found {found} jobs; send a new task",
            "job",
            "too_many_configurations",
        )
