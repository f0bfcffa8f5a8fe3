"""``/api/cluster``: machines, planned and actual schedule, utilisation. Tasks of other tenants have no names."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter
from sqlalchemy import func, select

from alto.engine.estimates import UNKNOWN_DURATION_S
from alto.records import Placement
from alto.runs import QueueHistory
from alto.runs.queue_history import TaskHistory
from alto.service.context import Service, ServiceOf, newest_journal
from alto.service.store.jobs import OPEN
from alto.service.store.tables import JobRow
from alto.service.web.access import Reader

_MOST_TASKS = 200

router = APIRouter(prefix="/cluster")


class ClusterView:
    """The control plane's journal, as a tenant may see it.

    Attributes:
        now: Unix time up to which running tasks are counted.
    """

    def __init__(self, history: QueueHistory, tenant: str) -> None:
        self.history = history
        self.now = history.last_seen_at or 0.0 if history.is_completed else time.time()
        self._tenant = tenant
        lately = list(history.tasks.values())[-_MOST_TASKS:]
        jobs = dict.fromkeys(job_of(task) for task in history.tasks)
        self._numbers = {job: number for number, job in enumerate(jobs, 1)}
        self.tasks: list[TaskHistory] = lately

    @classmethod
    def read(cls, service: Service, tenant: str) -> ClusterView:
        """Return the current view; empty if no server has led yet."""
        journal = newest_journal(service.settings.root)
        return cls(QueueHistory() if journal is None else QueueHistory.read(journal), tenant)

    def shown_name(self, task: str) -> str:
        """Return the task's id if the task belongs to the tenant, else a text with a number."""
        found = self.history.tasks.get(task)
        if found is not None and found.demand.tenant == self._tenant:
            return job_of(task)
        return f"another tenant's task {self._numbers.get(job_of(task), 0)}"

    def planned(self) -> list[Placement]:
        """Return each task's placement in the first plan that holds it. Tasks without a measured duration are left out,
        because their plans are based on a guess."""
        return [task.first_plan for task in self.tasks if task.first_plan is not None and is_measured(task)]

    def actual(self) -> list[Placement]:
        """Return the placements that executors really had, in seconds since the control plane began."""
        shown = {task.task for task in self.tasks}
        return [place for place in self.history.actual_placements(self.now) if place.task in shown]


def is_measured(task: TaskHistory) -> bool:
    """Return whether a task's expected duration was measured on an earlier task of this kind."""
    return task.demand.duration_s != UNKNOWN_DURATION_S


def job_of(task: str) -> str:
    """Return the id of the job with the name ``task`` in the control plane. This name changes at every resumption."""
    return task.partition(".")[0]


@router.get("")
def get(service: ServiceOf, caller: Reader) -> dict[str, Any]:
    """Return machines, open tasks by status, planned and actual placements, and the share of GPU time that was used.

    A task has a planned placement only if such a task was measured before.
    """
    view = ClusterView.read(service, caller.tenant)
    with service.store.reading() as session:
        counts = session.execute(
            select(JobRow.status, func.count()).where(JobRow.status.in_(OPEN)).group_by(JobRow.status)
        )
        waiting = {row[0]: row[1] for row in counts}
    history = view.history
    return {
        "devices": "gpus" if history.has_gpus else "cpu slots",
        "nodes": [{"name": node.name, "gpus": len(node.gpus)} for node in history.nodes],
        "open_tasks": waiting,
        "utilisation": round(history.utilisation(view.now), 4),
        "planned": [_placement(view, place) for place in view.planned()],
        "actual": [_placement(view, place) for place in view.actual()],
    }


def _placement(view: ClusterView, place: Placement) -> dict[str, Any]:
    return {
        "task": view.shown_name(place.task),
        "gpus": [{"node": gpu.node, "index": gpu.index} for gpu in place.gpus],
        "start_s": round(place.start_s, 3),
        "duration_s": round(place.duration_s, 3),
    }
