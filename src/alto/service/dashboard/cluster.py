"""``/cluster``: machines and the schedule. Tasks of other tenants have no names."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse
from sqlalchemy import select
from starlette.responses import Response

from alto.records import Placement
from alto.report import gantt_figure
from alto.runs.queue_history import TaskHistory, TaskStage
from alto.service.access import Caller
from alto.service.api.cluster import ClusterView, is_measured, job_of
from alto.service.context import Service, ServiceOf
from alto.service.dashboard.rendering import PageRoute, live_answer, page
from alto.service.store.jobs import levels_of
from alto.service.store.tables import JobRow
from alto.service.web.access import Reader

_FRAGMENTS = ("machines", "queue")
_LEAST_GAP_S = 1.0
"""Shorter interruptions are not marked in the figure."""

router = APIRouter()
_pages = APIRouter(route_class=PageRoute)


@_pages.get("/cluster")
def show(request: Request, service: ServiceOf, caller: Reader) -> HTMLResponse:
    """Return the page."""
    return page(request, "cluster.html.jinja", caller, **_context(service, caller))


@router.get("/dashboard/cluster")
def show_now(service: ServiceOf, caller: Reader, seen: Annotated[str, Query(max_length=64)] = "") -> Response:
    """Return the changed parts of the open page, and its figure."""
    context = _context(service, caller)
    data = {"gantt": context["gantt"], "is_live": True}
    return live_answer(seen, _FRAGMENTS, data=data, **context)


def _context(service: Service, caller: Caller) -> dict[str, Any]:
    view = ClusterView.read(service, caller.tenant)
    history = view.history
    gaps = [
        (history.worked_s(start), end - start) for start, end in history.interruptions if end - start >= _LEAST_GAP_S
    ]
    planned, actual = _named(view, view.planned()), _named(view, view.actual())
    running = [task for task in view.tasks if task.state is TaskStage.RUNNING]
    tasks = _tasks(service, view)
    ordered: dict[str, list[_ShownTask]] = {"running": [], "waiting": [], "paused": [], "ended": []}
    for task in tasks:
        ordered[task.state if task.state in ordered else "ended"].append(task)
    # The next waiting task comes first, as far as plans say; the figure shows when it is expected to begin.
    ordered["waiting"].sort(key=lambda task: (-task.level, task.planned_start_s or 0.0))
    ordered["ended"].reverse()
    return {
        "history": history,
        "device": "GPU" if history.has_gpus else "CPU slot",
        "utilisation": history.utilisation(view.now),
        "busy": _busy(running),
        "num_running": len(ordered["running"]),
        "num_waiting": len(ordered["waiting"]),
        "lines": [_line(view, task) for group in ordered.values() for task in group],
        "gantt": gantt_figure(planned, actual, history.nodes, gaps=gaps) if planned or actual else None,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class _ShownTask:
    """A task with all its entries in the control plane: the first one, and one for each time that it was resumed.

    Attributes:
        parts: Entries of the control plane's journal, oldest first.
        state: State of the task. ``paused`` is not a state of the control plane, which lists such tasks as cancelled.
        priority: Priority among its tenant's tasks; None if the task belongs to another tenant.
        level: Level in the schedule, see :func:`alto.service.store.jobs.levels_of`.
    """

    parts: list[TaskHistory]
    state: str
    priority: int | None
    level: int

    @property
    def last(self) -> TaskHistory:
        return self.parts[-1]

    @property
    def planned_start_s(self) -> float | None:
        return next((part.first_plan.start_s for part in self.parts if part.first_plan is not None), None)


def _tasks(service: Service, view: ClusterView) -> list[_ShownTask]:
    parts: dict[str, list[TaskHistory]] = {}
    for task in view.tasks:
        parts.setdefault(job_of(task.task), []).append(task)
    with service.store.reading() as session:
        found = session.execute(
            select(JobRow.id, JobRow.tenant, JobRow.priority, JobRow.status)
            .where(JobRow.id.in_(list(parts)))
            .order_by(JobRow.priority.desc(), JobRow.number)
        ).all()
    statuses = {row.id: row.status for row in found}
    priorities = {row.id: row.priority for row in found}
    levels = levels_of((row.id, row.tenant, row.priority) for row in found if row.status == "queued")
    return [
        _ShownTask(
            parts=each,
            state=_state(each[-1], statuses.get(job, "")),
            priority=priorities.get(job) if view.shown_name(each[-1].task) == job else None,
            level=levels.get(job, 0),
        )
        for job, each in parts.items()
    ]


def _state(task: TaskHistory, status: str) -> str:
    if task.state is not TaskStage.CANCELLED or not status:
        return task.state.value
    return TaskStage.WAITING.value if status in ("queued", "running") else status  # resumed a moment ago


def _named(view: ClusterView, placements: list[Placement]) -> list[Placement]:
    return [replace(place, task=view.shown_name(place.task)) for place in placements]


def _busy(running: list[TaskHistory]) -> dict[str, int]:
    """Return how many devices of each machine executors use now."""
    used = {(gpu.node, gpu.index) for task in running for gpu in (task.attempts[-1].gpus if task.attempts else ())}
    counts: dict[str, int] = {}
    for node, _ in used:
        counts[node] = counts.get(node, 0) + 1
    return counts


def _line(view: ClusterView, task: _ShownTask) -> dict[str, Any]:
    last, history = task.last, view.history
    name = view.shown_name(last.task)
    attempts = [attempt for part in task.parts for attempt in part.attempts]
    return {
        "name": name,
        "is_own": job_of(last.task) == name,
        "state": task.state,
        "num_gpus": last.demand.num_gpus,
        "priority": "" if task.priority is None else task.priority,
        "planned_start_s": task.planned_start_s if is_measured(last) else None,
        "start_s": history.worked_s(attempts[0].start) if attempts else None,
        "expected_s": last.demand.duration_s if is_measured(last) else None,
        "spent_s": sum(attempt.duration_s(view.now) for attempt in attempts) if attempts else None,
    }


router.include_router(_pages)
