"""What finished runs have taken, kept for the next such task."""

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
    """Keep how long the finished run of ``job`` has taken, for drafts and for schedules. An estimate that cannot be
    kept is missing later, and nothing else.

    Args:
        service: The service.
        job: A job that has succeeded.
        remember: Of the control plane: keeps the seconds of a task.
    """
    root = service.run_of(job)
    try:
        history = service.histories.read(root)
        if not _was_changed(history):
            remember(_asked_task(job, RunDir.open(root)), history.duration_s)
    except (AltoError, OSError) as error:
        _LOG.warning("what job %s has taken is not kept", job.id, exc_info=error)


def _asked_task(job: JobRow, run: RunDir) -> Task:
    """The task of a run as it was asked for; what is in its folder has values in place of ``auto``, which the executor
    wrote there."""
    trained = load_run_task(run, trust_remote_code=True)
    files = {"dataset": trained.dataset, "validation_dataset": trained.validation_dataset}
    return portable(Task(**job.task, **files, name=job.id, tenant=job.tenant, report_to="none"))


def _was_changed(history: RunHistory) -> bool:
    """Whether its user has stopped configurations: it took less time than it asked for."""
    return any(job.exit_reason == ExitReason.STOPPED for job in history.jobs.values())
