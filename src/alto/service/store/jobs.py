"""States of jobs, and the changes that each state allows.

The status in the database is what the user wants and sees; the coordinator acts on it. All changes lock the row.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from sqlalchemy import Select, func, select
from sqlalchemy.orm import InstrumentedAttribute, Session

from alto.service.errors import JobStateError, UnknownJobError
from alto.service.ids import now
from alto.service.store.tables import JobEvent, JobRow

_LOG = logging.getLogger("alto.service.store")


def add_event(
    session: Session,
    job: JobRow,
    message: str,
    *,
    level: str = "info",
    data: dict[str, Any] | None = None,
    created_at: float | None = None,
) -> None:
    """Add an event to ``job``. This transaction must have locked the job's row, so that event numbers have no gaps and
    follow the order of commits.

    Args:
        message: A sentence for users.
        level: ``info``, ``warn`` or ``error``.
        data: Values for programs; with the key ``step``, the event has the type ``metrics``.
        created_at: Unix seconds; None means now.
    """
    job.num_events += 1
    session.add(
        JobEvent(
            job=job.id,
            number=job.num_events,
            created_at=now() if created_at is None else int(created_at),
            level=level,
            type="metrics" if data is not None and "step" in data else "message",
            message=message[:2000],
            data=data,
        )
    )


def events_of(session: Session, job: str, *, since: int, limit: int) -> list[JobEvent]:
    """Return events of a job from number ``since`` on, oldest first."""
    statement = select(JobEvent).where(JobEvent.job == job, JobEvent.number >= since)
    return list(session.scalars(statement.order_by(JobEvent.number).limit(limit)))


Row = TypeVar("Row")


def page_of(
    session: Session,
    statement: Select[Row],
    number: InstrumentedAttribute[Any],
    *,
    after: int | None,
    limit: int,
    is_ascending: bool = False,
) -> tuple[list[Row], bool]:
    """Return the next rows of ``statement``, and whether more rows follow.

    Args:
        statement: Query without an order.
        number: Column that numbers the rows.
        after: Number of the last row of the previous page; None begins with the first row.
        is_ascending: Whether the oldest row comes first; else the newest.
    """
    if after is not None:
        statement = statement.where(number > after if is_ascending else number < after)
    statement = statement.order_by(number.asc() if is_ascending else number.desc()).limit(limit + 1)
    rows = list(session.scalars(statement))
    return rows[:limit], len(rows) > limit


OPEN = ("validating_files", "queued", "running", "paused")
ENDED = ("succeeded", "failed", "cancelled")


def find_job(session: Session, tenant: str, job: str, param: str = "fine_tuning_job_id") -> JobRow:
    """Return a job of a tenant; an error names the request parameter ``param``.

    Raises:
        UnknownJobError: There is no such job.
    """
    row = session.scalar(select(JobRow).where(JobRow.id == job, JobRow.tenant == tenant))
    if row is None:
        raise UnknownJobError(job, param)
    return row


def lock_job(session: Session, job: str) -> JobRow | None:
    """Return the current row of a job and lock it until this transaction ends."""
    return session.scalar(
        select(JobRow).where(JobRow.id == job).with_for_update().execution_options(populate_existing=True)
    )


def count_open(session: Session, tenant: str) -> int:
    """Return the number of a tenant's jobs that have not ended."""
    statement = select(func.count()).select_from(JobRow).where(JobRow.tenant == tenant, JobRow.status.in_(OPEN))
    return session.scalar(statement) or 0


def wanted_jobs(session: Session, without: Collection[str], max_gpus: int) -> list[tuple[str, str, int]]:
    """Return id, tenant and priority of the jobs that are to run on at most ``max_gpus`` GPUs, the highest priority
    first, except ``without``."""
    rows = session.execute(
        select(JobRow.id, JobRow.tenant, JobRow.priority)
        .where(
            JobRow.status.in_(("queued", "running")),
            JobRow.id.not_in(without),
            func.coalesce(JobRow.task["num_gpus"].as_integer(), 1) <= max_gpus,
        )
        .order_by(JobRow.priority.desc(), JobRow.number)
    )
    return [(job, tenant, priority) for job, tenant, priority in rows]


def levels_of(jobs: Iterable[tuple[str, str, int]]) -> dict[str, int]:
    """Return the level of each job in the schedule; the highest level of every tenant is 0.

    A tenant's priorities only order its own jobs: jobs of its second-highest priority have level -1, of its third -2.
    So a tenant cannot get ahead of other tenants by asking for a high priority.

    Args:
        jobs: Id, tenant and priority of waiting jobs, the highest priority first.
    """
    found, levels = dict[str, int](), dict[str, dict[int, int]]()
    for job, tenant, priority in jobs:
        known = levels.setdefault(tenant, {})
        found[job] = known.setdefault(priority, -len(known))
    return found


def in_turns(jobs: Sequence[tuple[str, str]], num_live: Mapping[str, int]) -> list[str]:
    """Return jobs in the order of their submission: tenants take turns, those with the fewest submitted jobs first.

    Args:
        jobs: Id and tenant; jobs of the same tenant in the order of their priorities.
        num_live: Number of jobs of each tenant in the control plane.
    """
    num_submitted, keys = Counter(num_live), dict[str, tuple[int, int]]()
    for place, (job, tenant) in enumerate(jobs):
        keys[job] = num_submitted[tenant], place
        num_submitted[tenant] += 1
    return sorted(keys, key=keys.__getitem__)


def cancel_job(session: Session, tenant: str, job: str) -> JobRow:
    """Cancel a job; its executor saves and ends soon.

    Raises:
        UnknownJobError, JobStateError: There is no such job, or it has ended otherwise.
    """
    row, before = _changed(session, tenant, job, dict.fromkeys((*OPEN, "cancelled"), "cancelled"), "cancelled")
    if before != "cancelled":
        row.finished_at, row.estimated_finish = now(), None
        add_event(session, row, "Fine-tuning job cancelled")
    return row


def pause_job(session: Session, tenant: str, job: str) -> JobRow:
    """Pause a job until :func:`resume_job`; its executor saves and ends soon.

    Raises:
        UnknownJobError, JobStateError: There is no such job, or it is neither queued, running nor paused.
    """
    row, before = _changed(session, tenant, job, dict.fromkeys(("queued", "running", "paused"), "paused"), "paused")
    if before != "paused":
        row.estimated_finish = None
        add_event(session, row, "Fine-tuning job paused; resume it to continue from its checkpoint")
    return row


def resume_job(session: Session, tenant: str, job: str) -> JobRow:
    """Queue a paused job again; it continues from its checkpoint when its turn comes.

    Raises:
        UnknownJobError, JobStateError: There is no such job, or it is neither paused, queued nor running.
    """
    row, before = _changed(
        session, tenant, job, {"paused": "queued", "queued": "queued", "running": "running"}, "resumed"
    )
    if before == "paused":
        add_event(session, row, "Fine-tuning job resumed and queued")
    return row


def _changed(session: Session, tenant: str, job: str, to: Mapping[str, str], what: str) -> tuple[JobRow, str]:
    """Set a job's status to ``to[current status]``. Return the row and the previous status."""
    find_job(session, tenant, job)
    row = lock_job(session, job)
    assert row is not None, "rows of jobs stay"
    if row.status not in to:
        raise JobStateError(f"expected a job that can be {what}, found {row.id} {row.status}; nothing was changed")
    before, row.status = row.status, to[row.status]
    if row.status != before:
        _LOG.info("job %s of tenant %s is %s", row.id, tenant, row.status)
    return row, before
