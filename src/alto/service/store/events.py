"""Events of jobs: each job has a journal that followers read in order."""

from __future__ import annotations

from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from alto.service.ids import now
from alto.service.store.tables import JobEvent, JobRow

__all__ = ["add_event", "events_of"]


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
