"""A task's run as pages show it: numbers, the job table and the figures, from its journal."""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass, replace

from alto.errors import RunError
from alto.export import JobTable, RunFigures, job_table, run_figures
from alto.records import ExitReason
from alto.runs import RunHistory
from alto.runs.device_hours import DeviceHours, device_hours, price_of_hour
from alto.runs.job_history import Stage
from alto.service.api.tasks import history_of
from alto.service.context import Service
from alto.service.savings import Savings, savings_of
from alto.service.store.tables import JobRow

__all__ = ["RunView", "TaskLine", "line_of", "run_view"]

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
    def share_done(self) -> float:
        """Completed fraction of the task, in [0, 1]."""
        return 1.0 if self.row.status == "succeeded" else self.history.decided_share

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
    """Return a history in which all jobs of a failed or cancelled task have ended, which its journal does not say."""
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
