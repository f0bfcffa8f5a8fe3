"""``/``: the tenant's tasks."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse
from sqlalchemy import select
from starlette.responses import Response

from alto.service.access import Caller
from alto.service.context import Service, ServiceOf
from alto.service.dashboard.rendering import PageRoute, live_answer, page
from alto.service.dashboard.run_view import line_of
from alto.service.openai.paging import After
from alto.service.store.jobs import OPEN, find_job
from alto.service.store.paging import page_of
from alto.service.store.tables import JobRow
from alto.service.web.access import Reader

__all__ = ["router"]

_PER_PAGE = 25

router = APIRouter()
_pages = APIRouter(route_class=PageRoute)


@_pages.get("/")
def tasks(request: Request, service: ServiceOf, caller: Reader, after: After = None) -> HTMLResponse:
    """Return the page of tasks, newest first."""
    return page(request, "tasks.html.jinja", caller, **_context(service, caller, after))


@router.get("/dashboard/tasks")
def tasks_now(
    service: ServiceOf, caller: Reader, after: After = None, seen: Annotated[str, Query(max_length=64)] = ""
) -> Response:
    """Return the changed parts of the open page."""
    context = _context(service, caller, after)
    return live_answer(
        seen, ("tasks",), data={"is_live": any(line.row.status in OPEN for line in context["lines"])}, **context
    )


def _context(service: Service, caller: Caller, after: str | None) -> dict[str, Any]:
    with service.store.reading() as session:
        number = None if after is None else find_job(session, caller.tenant, after, "after").number
        statement = select(JobRow).where(JobRow.tenant == caller.tenant)
        rows, has_more = page_of(session, statement, JobRow.number, after=number, limit=_PER_PAGE)
    return {"lines": [line_of(service, row) for row in rows], "has_more": has_more, "after": after}


router.include_router(_pages)
