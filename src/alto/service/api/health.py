"""``/healthz``, ``/readyz`` and ``/metrics`` for operators of the service. They need no key and name no tenant."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from sqlalchemy import func, select, text
from sqlalchemy.exc import SQLAlchemyError

from alto.service.context import Service, ServiceOf, control_folder
from alto.service.store.tables import FileRow, JobRow, LeaderRow
from alto.service.web.answers import WITHOUT_KEY, RequestCounts

router = APIRouter()

_STATES = ("validating_files", "queued", "running", "paused", "succeeded", "failed", "cancelled")


@router.head("/healthz", include_in_schema=False)
@router.get("/healthz", openapi_extra=WITHOUT_KEY)
def healthz() -> dict[str, str]:
    """Report that this process answers."""
    return {"status": "ok"}


@router.head("/readyz", include_in_schema=False)
@router.get("/readyz", openapi_extra=WITHOUT_KEY, responses={503: {"description": "The service is not ready yet."}})
def readyz(request: Request, service: ServiceOf) -> Response:
    """Report whether requests can be carried out: the database answers, and a server leads that is connected to its
    cluster. Errors of single tasks do not count; they are in the events of these tasks, and in ``alto_tasks_put_off``
    of ``/metrics``."""
    problems = _problems(request, service)
    status = "ready" if not problems else "not ready"
    return JSONResponse({"status": status, "problems": problems}, status_code=503 if problems else 200)


@router.head("/metrics", include_in_schema=False)
@router.get("/metrics", openapi_extra=WITHOUT_KEY, response_class=PlainTextResponse)
def metrics(request: Request, service: ServiceOf) -> PlainTextResponse:
    """Return metrics for Prometheus, without labels of tenants or tasks."""
    with service.store.reading() as session:
        found = session.execute(select(JobRow.status, func.count()).group_by(JobRow.status))
        states: dict[str, int] = {row[0]: row[1] for row in found}
        files = select(func.count(), func.coalesce(func.sum(FileRow.num_bytes), 0)).where(FileRow.deleted_at.is_(None))
        num_files, num_bytes = session.execute(files).one()
    coordinator = request.app.state.coordinator
    plane = None if coordinator is None else coordinator.plane
    lines = _gauge("alto_tasks", "Number of tasks by status.", [(f'status="{s}"', states.get(s, 0)) for s in _STATES])
    lines += _gauge("alto_files", "Number of stored files.", [("", num_files)])
    lines += _gauge("alto_files_bytes", "Total size of the stored files, in bytes.", [("", int(num_bytes))])
    lines += _gauge("alto_leads", "Whether this process drives the control plane.", [("", int(plane is not None))])
    if plane is not None:
        num_used, num_all = plane.num_gpus()
        lines += _gauge("alto_gpus", "Number of GPUs, or of CPU slots.", [("", num_all)])
        lines += _gauge("alto_gpus_used", "Number of GPUs, or of CPU slots, that executors use.", [("", num_used)])
        put_off = [("", coordinator.num_put_off)]
        lines += _gauge("alto_tasks_put_off", "Tasks whose files cannot be read or written now.", put_off)
    counts: RequestCounts = request.app.state.request_counts
    return PlainTextResponse("\n".join([*lines, *counts.lines(), ""]), media_type="text/plain; version=0.0.4")


def _problems(request: Request, service: Service) -> list[str]:
    try:
        with service.store.reading() as session:
            session.execute(text("SELECT 1"))
            leader: Any = session.get(LeaderRow, 1)
    except SQLAlchemyError:
        return ["the database does not answer"]
    coordinator = request.app.state.coordinator
    if leader is None or not leader.holder:
        return ["no server leads yet"]
    if coordinator is not None and coordinator.problem:
        return [coordinator.problem]
    if not (control_folder(service.settings.root, leader.epoch) / "journal.jsonl").exists():
        return ["the server that leads is not connected to its cluster yet"]
    return []


def _gauge(name: str, about: str, values: list[tuple[str, float]]) -> list[str]:
    samples = [f"{name}{{{labels}}} {value}" if labels else f"{name} {value}" for labels, value in values]
    return [f"# HELP {name} {about}", f"# TYPE {name} gauge", *samples]
