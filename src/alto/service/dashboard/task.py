"""``/tasks/{id}``: a task, its jobs and its curves."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse
from sqlalchemy import select
from sqlalchemy.orm import Session
from starlette.responses import Response

from alto.export import describe_task, loss_unit, run_notes
from alto.service.access import Caller
from alto.service.context import Service, ServiceOf
from alto.service.dashboard.rendering import PageRoute, live_answer, page
from alto.service.dashboard.run_view import line_of, run_view
from alto.service.store.jobs import OPEN, find_job
from alto.service.store.paging import page_of
from alto.service.store.tables import FileRow, JobEvent, JobRow, ModelRow
from alto.service.web.access import Reader

__all__ = ["router"]

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
        # The run knows uploaded rows only by the file name of its copy, so the page shows the name of the upload.
        "subtitle": [part for part in describe_task(history.started) if not part.endswith("training.jsonl")],
        "notes": run_notes(history),
        "loss_unit": loss_unit(history.method),
        "can_write": "write" in caller.scopes,
        "takes_commands": row.status in OPEN and row.run_dir is not None and row.status != "validating_files",
    }


def _outputs(session: Session, row: JobRow) -> dict[str, Any]:
    """Return the outputs of a task that were not deleted since: its result files, and whether it has a model."""
    kept = select(FileRow.id).where(
        FileRow.id.in_((row.result or {}).get("result_files", [])), FileRow.deleted_at.is_(None)
    )
    model = select(ModelRow.id).where(ModelRow.id == row.fine_tuned_model, ModelRow.deleted_at.is_(None))
    return {"result_files": list(session.scalars(kept)), "has_model": session.scalar(model) is not None}


router.include_router(_pages)
