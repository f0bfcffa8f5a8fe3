"""Aliases: each points to the newest ready model of its tenant, base model and suffix."""

from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.orm import Session

from alto.service.ids import now
from alto.service.models import alias_name
from alto.service.store.tables import AliasRow, JobRow, ModelRow

__all__ = ["move_alias", "settle_aliases"]


def move_alias(session: Session, model: ModelRow, job: JobRow) -> str | None:
    """Point the alias of a newly ready model to this model, unless it points to a newer one.

    Returns:
        The alias if it has moved, else None.
    """
    if not job.suffix:
        return None
    name = alias_name(model.base_model, model.tenant, job.suffix)
    alias = _locked(session, name)
    if alias is None:
        alias = AliasRow(
            name=name, tenant=model.tenant, base_model=model.base_model, suffix=job.suffix, created_at=now()
        )
        session.add(alias)
    else:
        present = session.scalar(select(ModelRow).where(ModelRow.id == alias.model, ModelRow.deleted_at.is_(None)))
        if present is not None and present.number >= model.number:
            return None
    alias.model, alias.moved_at = model.id, now()
    return name


def settle_aliases(session: Session) -> None:
    """Point aliases of deleted models to the newest ready model, and delete aliases for which there is none."""
    statement = select(AliasRow).join(ModelRow, ModelRow.id == AliasRow.model).where(ModelRow.deleted_at.is_not(None))
    for alias in session.scalars(statement.with_for_update(of=AliasRow)).all():
        newest = session.scalar(
            select(ModelRow)
            .join(JobRow, JobRow.id == ModelRow.job)
            .where(
                ModelRow.tenant == alias.tenant,
                ModelRow.base_model == alias.base_model,
                JobRow.suffix == alias.suffix,
                ModelRow.serving == "ready",
                ModelRow.deleted_at.is_(None),
            )
            .order_by(ModelRow.number.desc())
            .limit(1)
        )
        if newest is None:
            session.delete(alias)
        else:
            alias.model, alias.moved_at = newest.id, now()


def _locked(session: Session, name: str) -> AliasRow | None:
    return session.scalar(select(AliasRow).where(AliasRow.name == name).with_for_update())
