"""``/tasks/{id}``: a task, its jobs and its curves."""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass, replace
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse
from sqlalchemy import select
from sqlalchemy.orm import Session
from starlette.responses import Response

from alto.errors import RunError
from alto.records import ExitReason
from alto.report import RunFigures, run_figures
from alto.runs import RunHistory
from alto.runs.job_history import Stage
from alto.runs.progress import DeviceHours, device_hours, fraction_done, price_of_hour
from alto.service.access import Caller
from alto.service.api.tasks import history_of
from alto.service.context import Service, ServiceOf
from alto.service.dashboard.rendering import PageRoute, live_answer, page
from alto.service.models import public_base
from alto.service.openai.objects import After
from alto.service.openai.translation import worded_note
from alto.service.savings import Savings, savings_of
from alto.service.store.jobs import OPEN, find_job, page_of
from alto.service.store.tables import FileRow, JobEvent, JobRow, ModelRow
from alto.service.web.access import Reader
from alto.views import JobTable, describe_task, job_table, loss_unit, run_notes

_ENDS = {"failed": ExitReason.FAILED, "cancelled": ExitReason.STOPPED}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """The job table and the figures of a run."""

    table: JobTable
    figures: RunFigures


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskLine:
    """A task with the numbers of its run.

    Attributes:
        history: History of its run; empty before the run begins.
        hours: Device hours that it took; None before the run begins.
        damage: Why the journal of its run cannot be read; empty if it can.
    """

    row: JobRow
    history: RunHistory
    hours: DeviceHours | None
    damage: str = ""

    @property
    def name(self) -> str:
        """The name that its user gave it, or its id."""
        return self.row.suffix or self.row.id

    @property
    def has_suffix(self) -> bool:
        """Whether its user gave it a name."""
        return bool(self.row.suffix)

    @property
    def fraction_done(self) -> float:
        """Completed fraction of the task, in [0, 1]."""
        return 1.0 if self.row.status == "succeeded" else fraction_done(self.history)

    @property
    def savings(self) -> Savings:
        """Training that early exit saved."""
        return savings_of(self.history, self.row.status)

    @property
    def num_ended(self) -> int:
        """Number of jobs that have ended."""
        return sum(job.has_ended for job in self.history.jobs.values())


def line_of(service: Service, row: JobRow) -> TaskLine:
    """Return a task with the current numbers of its journal.

    Raises:
        SpecError: The price in the environment is invalid.
    """
    try:
        history = history_of(service, row)
    except RunError as error:
        return TaskLine(row=row, history=RunHistory(), hours=None, damage=str(error))
    if history.started is None:
        return TaskLine(row=row, history=history, hours=None)
    hours = device_hours(history, price_of_hour(None, history.started.gpu_hour_price))
    return TaskLine(row=row, history=history, hours=hours)


def run_view(history: RunHistory, status: str) -> RunView:
    """Return the table and the figures of ``history``, the run of a task with the status ``status``."""
    return _kept_view(history, status) if history.jobs else _new_view(history, status)


def _new_view(history: RunHistory, status: str) -> RunView:
    shown = _closed(history, status)
    table = job_table(shown)
    return RunView(table=table, figures=run_figures(shown, table))


def _closed(history: RunHistory, status: str) -> RunHistory:
    """Return the history of a failed or cancelled task with all its jobs ended. Its journal has no events for this."""
    reason = _ENDS.get(status)
    if reason is None:
        return history
    shown = copy.copy(history)
    shown.jobs = {
        name: job if job.has_ended else replace(job, stage=Stage.EXITED, exit_reason=reason)
        for name, job in history.jobs.items()
    }
    return shown


_kept_view = functools.lru_cache(maxsize=16)(_new_view)
"""A cache of views: a history is a new object whenever its journal has changed, so all viewers of a task share one."""


_FRAGMENTS = ("heading", "numbers", "metrics", "curve_notes", "jobs", "samples", "events")
_MOST_EVENTS = 200

router = APIRouter()
_pages = APIRouter(route_class=PageRoute)


@_pages.get("/tasks/{task}")
def show(request: Request, service: ServiceOf, caller: Reader, task: str) -> HTMLResponse:
    """Return the page of a task."""
    return page(request, "task.html.jinja", caller, **_context(service, caller, task))


@router.get("/dashboard/tasks/{task}")
def show_now(
    service: ServiceOf, caller: Reader, task: str, seen: Annotated[str, Query(max_length=64)] = ""
) -> Response:
    """Return the changed parts of the open page, and its figures."""
    context = _context(service, caller, task)
    line = context["line"]
    data = {
        "figures": context["view"].figures.data,
        "opens_logarithmic": context["view"].figures.opens_logarithmic,
        "is_live": line.row.status in OPEN,
        "said": f"Task {line.row.status.replace('_', ' ')}",
    }
    return live_answer(seen, _FRAGMENTS, data=data, caller=caller, **context)


def _context(service: Service, caller: Caller, task: str) -> dict[str, Any]:
    with service.store.reading() as session:
        row = find_job(session, caller.tenant, task)
        events, has_more = page_of(
            session,
            select(JobEvent).where(JobEvent.job == row.id),
            JobEvent.number,
            after=None,
            limit=_MOST_EVENTS,
        )
        names = session.execute(
            select(FileRow.id, FileRow.filename).where(
                FileRow.tenant == caller.tenant, FileRow.id.in_((row.training_file, row.validation_file or ""))
            )
        )
        files = dict(names.all())
        outputs = _outputs(session, row)
    line = line_of(service, row)
    history = line.history
    return {
        "line": line,
        "row": row,
        "history": history,
        "view": run_view(history, row.status),
        "hours": line.hours,
        "files": files,
        **outputs,
        "events": events,
        "has_more_events": has_more,
        "subtitle": _subtitle(service, row, history),
        "notes": [worded_note(note) for note in run_notes(history)],
        "loss_unit": loss_unit(history.method),
        "can_write": "write" in caller.scopes,
        "takes_commands": row.status in OPEN and row.run_dir is not None and row.status != "validating_files",
    }


def _subtitle(service: Service, row: JobRow, history: RunHistory) -> list[str]:
    """Return the facts about a task under its name, with the base model as requests name it. The run knows uploaded
    rows only by the file name of its copy; the page shows the name of the upload elsewhere."""
    if history.started is None:
        return []
    started = replace(history.started, model=public_base(service.settings, row.model))
    return [part for part in describe_task(started) if not part.endswith("training.jsonl")]


def _outputs(session: Session, row: JobRow) -> dict[str, Any]:
    """Return the outputs of a task that were not deleted since: its result files, and whether it has a model."""
    kept = select(FileRow.id).where(
        FileRow.id.in_((row.result or {}).get("result_files", [])), FileRow.deleted_at.is_(None)
    )
    model = select(ModelRow.id).where(ModelRow.id == row.fine_tuned_model, ModelRow.deleted_at.is_(None))
    return {"result_files": list(session.scalars(kept)), "has_model": session.scalar(model) is not None}


_PER_PAGE = 25


@_pages.get("/")
def tasks(request: Request, service: ServiceOf, caller: Reader, after: After = None) -> HTMLResponse:
    """Return the page of tasks, newest first."""
    return page(request, "tasks.html.jinja", caller, **_list_context(service, caller, after))


@router.get("/dashboard/tasks")
def tasks_now(
    service: ServiceOf, caller: Reader, after: After = None, seen: Annotated[str, Query(max_length=64)] = ""
) -> Response:
    """Return the changed parts of the open page."""
    context = _list_context(service, caller, after)
    return live_answer(
        seen, ("tasks",), data={"is_live": any(line.row.status in OPEN for line in context["lines"])}, **context
    )


def _list_context(service: Service, caller: Caller, after: str | None) -> dict[str, Any]:
    with service.store.reading() as session:
        number = None if after is None else find_job(session, caller.tenant, after, "after").number
        statement = select(JobRow).where(JobRow.tenant == caller.tenant)
        rows, has_more = page_of(session, statement, JobRow.number, after=number, limit=_PER_PAGE)
    return {"lines": [line_of(service, row) for row in rows], "has_more": has_more, "after": after}


router.include_router(_pages)
