"""Jobs: their states, and who may change them when.

The status in the database is what the user wants and sees; the coordinator makes it so. All changes lock the row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from alto.service.errors import JobStateError, UnknownJobError
from alto.service.ids import now
from alto.service.store.events import add_event
from alto.service.store.tables import JobRow

__all__ = [
    "ENDED",
    "OPEN",
    "cancel_job",
    "count_open",
    "find_job",
    "in_turns",
    "levels_of",
    "lock_job",
    "pause_job",
    "resume_job",
    "wanted_jobs",
]

OPEN = ("validating_files", "queued", "running", "paused")
ENDED = ("succeeded", "failed", "cancelled")


def find_job(session: Session, tenant: str, job: str, param: str = "fine_tuning_job_id") -> JobRow:
    """A job of a tenant, which a request names by ``param``.

    Raises:
        UnknownJobError: There is none.
    """
    row = session.scalar(select(JobRow).where(JobRow.id == job, JobRow.tenant == tenant))
    if row is None:
        raise UnknownJobError(job, param)
    return row


def lock_job(session: Session, job: str) -> JobRow | None:
    """The present row of a job, which no other transaction changes until this one ends."""
    return session.scalar(
        select(JobRow).where(JobRow.id == job).with_for_update().execution_options(populate_existing=True)
    )


def count_open(session: Session, tenant: str) -> int:
    """Jobs of a tenant that have not ended."""
    statement = select(func.count()).select_from(JobRow).where(JobRow.tenant == tenant, JobRow.status.in_(OPEN))
    return session.scalar(statement) or 0


def wanted_jobs(session: Session, without: Collection[str]) -> list[tuple[str, str, int]]:
    """Return id, tenant and priority of the jobs that are to run, the highest priority first, except ``without``."""
    rows = session.execute(
        select(JobRow.id, JobRow.tenant, JobRow.priority)
        .where(JobRow.status.in_(("queued", "running")), JobRow.id.not_in(without))
        .order_by(JobRow.priority.desc(), JobRow.number)
    )
    return [(job, tenant, priority) for job, tenant, priority in rows]


def levels_of(jobs: Iterable[tuple[str, str, int]]) -> dict[str, int]:
    """The priority of each job in the schedule, where the best of every tenant are equal.

    A tenant's priorities order its own jobs: a job of its second highest priority has -1, of its third -2. So nobody
    goes before other tenants by asking for a high priority.

    Args:
        jobs: Id, tenant and priority of jobs that wait, the highest priority first.
    """
    found, levels = dict[str, int](), dict[str, dict[int, int]]()
    for job, tenant, priority in jobs:
        known = levels.setdefault(tenant, {})
        found[job] = known.setdefault(priority, -len(known))
    return found


def in_turns(jobs: Sequence[tuple[str, str]], num_live: Mapping[str, int]) -> list[str]:
    """The order in which the control plane gets jobs: one of each tenant in turn, those first who have fewest there.

    Args:
        jobs: Id and tenant, of each tenant in the order of its own priorities.
        num_live: Jobs of a tenant that the control plane has.
    """
    seen, keys = Counter(num_live), dict[str, tuple[int, int]]()
    for place, (job, tenant) in enumerate(jobs):
        keys[job] = seen[tenant], place
        seen[tenant] += 1
    return sorted(keys, key=keys.__getitem__)


def cancel_job(session: Session, tenant: str, job: str) -> JobRow:
    """End a job; an executor of it saves and ends soon.

    Raises:
        UnknownJobError, JobStateError: There is no such job, or it has ended otherwise.
    """
    row, before = _changed(session, tenant, job, dict.fromkeys((*OPEN, "cancelled"), "cancelled"), "cancelled")
    if before != "cancelled":
        row.finished_at, row.estimated_finish = now(), None
        add_event(session, row, "Fine-tuning job cancelled")
    return row


def pause_job(session: Session, tenant: str, job: str) -> JobRow:
    """Have a job wait for :func:`resume_job`; an executor of it saves and ends soon.

    Raises:
        UnknownJobError, JobStateError: There is no such job, or it neither waits nor runs.
    """
    row, before = _changed(session, tenant, job, dict.fromkeys(("queued", "running", "paused"), "paused"), "paused")
    if before != "paused":
        row.estimated_finish = None
        add_event(session, row, "Fine-tuning job paused; resume it to continue from its checkpoint")
    return row


def resume_job(session: Session, tenant: str, job: str) -> JobRow:
    """Let a paused job continue from its checkpoint, once it is its turn.

    Raises:
        UnknownJobError, JobStateError: There is no such job, or it is not paused.
    """
    row, before = _changed(
        session, tenant, job, {"paused": "queued", "queued": "queued", "running": "running"}, "resumed"
    )
    if before == "paused":
        add_event(session, row, "Fine-tuning job resumed and queued")
    return row


def _changed(session: Session, tenant: str, job: str, to: Mapping[str, str], what: str) -> tuple[JobRow, str]:
    """The row of a job with its new status, and the one that it had."""
    find_job(session, tenant, job)
    row = lock_job(session, job)
    assert row is not None, "rows of jobs stay"
    if row.status not in to:
        raise JobStateError(f"expected a job that can be {what}, found {row.id} {row.status}; nothing was changed")
    before, row.status = row.status, to[row.status]
    return row, before
