"""Durations of finished runs, stored as estimates for similar tasks."""

from __future__ import annotations

import logging
from collections.abc import Callable

from alto.engine.runner import portable
from alto.errors import AltoError
from alto.records import ExitReason
from alto.runs import RunDir, RunHistory, load_run_task
from alto.service.context import Service
from alto.service.store.tables import JobRow
from alto.spec import Task

__all__ = ["remember_duration"]

_LOG = logging.getLogger("alto.service.coordinator")


def remember_duration(service: Service, job: JobRow, remember: Callable[[Task, float], None]) -> None:
    """Store how long the finished run of ``job`` took, for drafts and for schedules. If that fails, only the estimate
    is missing later.

    Args:
        job: A job that has succeeded.
        remember: Method of the control plane that stores the duration of a task in seconds.
    """
    root = service.run_of(job)
    try:
        history = service.histories.read(root)
        if not _was_changed(history):
            remember(_asked_task(job, RunDir.open(root)), history.duration_s)
    except (AltoError, OSError) as error:
        _LOG.warning("the duration of job %s cannot be recorded", job.id, exc_info=error)


def _asked_task(job: JobRow, run: RunDir) -> Task:
    """Return a run's task as its user requested it. In the task file, the executor has replaced ``auto`` by values."""
    trained = load_run_task(run, trust_remote_code=True)
    files = {"dataset": trained.dataset, "validation_dataset": trained.validation_dataset}
    return portable(Task(**job.task, **files, name=job.id, tenant=job.tenant, report_to="none"))


def _was_changed(history: RunHistory) -> bool:
    """Return whether the user stopped configurations, so that the run took less time than requested."""
    return any(job.exit_reason == ExitReason.STOPPED for job in history.jobs.values())
