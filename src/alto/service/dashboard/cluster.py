"""``/cluster``: machines and the schedule. Tasks of other tenants have no names."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse
from starlette.responses import Response

from alto.export import gantt_figure
from alto.records import Placement
from alto.runs.queue_history import TaskHistory, TaskStage
from alto.service.access import Caller
from alto.service.api.cluster import ClusterView, is_measured
from alto.service.context import Service, ServiceOf
from alto.service.dashboard.rendering import PageRoute, live_answer, page
from alto.service.web.access import Reader

__all__ = ["router"]

_FRAGMENTS = ("machines", "queue")
_LEAST_GAP_S = 1.0
"""Shorter interruptions are not marked."""

router = APIRouter()
_pages = APIRouter(route_class=PageRoute)


@_pages.get("/cluster")
def show(request: Request, service: ServiceOf, caller: Reader) -> HTMLResponse:
    """The page."""
    return page(request, "cluster.html.jinja", caller, **_context(service, caller))


@router.get("/dashboard/cluster")
def show_now(service: ServiceOf, caller: Reader, seen: Annotated[str, Query(max_length=64)] = "") -> Response:
    """The same, for the open page; with its figure."""
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
    waiting = [task for task in view.tasks if task.state is TaskStage.WAITING]
    running = [task for task in view.tasks if task.state is TaskStage.RUNNING]
    ended = [task for task in reversed(view.tasks) if task.state not in (TaskStage.WAITING, TaskStage.RUNNING)]
    # Of those that wait, the next one first, as far as plans say; estimates of when it begins are in the figure.
    waiting.sort(key=lambda task: (-task.priority, task.first_plan.start_s if task.first_plan else 0.0))
    return {
        "history": history,
        "device": "GPU" if history.has_gpus else "CPU slot",
        "busy": _busy(running),
        "num_running": len(running),
        "num_waiting": len(waiting),
        "lines": [_line(view, task) for task in (*running, *waiting, *ended)],
        "gantt": gantt_figure(planned, actual, history.nodes, gaps=gaps) if planned or actual else None,
    }


def _named(view: ClusterView, placements: list[Placement]) -> list[Placement]:
    return [replace(place, task=view.shown_name(place.task)) for place in placements]


def _busy(running: list[TaskHistory]) -> dict[str, int]:
    """How many devices of each machine executors have now."""
    used = {(gpu.node, gpu.index) for task in running for gpu in (task.attempts[-1].gpus if task.attempts else ())}
    counts: dict[str, int] = {}
    for node, _ in used:
        counts[node] = counts.get(node, 0) + 1
    return counts


def _line(view: ClusterView, task: TaskHistory) -> dict[str, Any]:
    name = view.shown_name(task.task)
    history = view.history
    plan = task.first_plan if is_measured(task) else None
    return {
        "name": name,
        "is_own": task.task.partition(".")[0] == name,
        "state": task.state.value,
        "num_gpus": task.num_gpus,
        "priority": task.priority,
        "planned_start_s": None if plan is None else plan.start_s,
        "start_s": history.worked_s(task.attempts[0].start) if task.attempts else None,
        "expected_s": task.duration_s if is_measured(task) else None,
        "spent_s": task.spent_s(history.last_seen_at or 0.0) if task.attempts else None,
    }


router.include_router(_pages)
