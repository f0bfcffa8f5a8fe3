"""Deletion of expired request records, files and uploads."""

from __future__ import annotations

from sqlalchemy import select

from alto.service.context import Service
from alto.service.ids import now
from alto.service.openai.files import artefact_of
from alto.service.store.jobs import OPEN
from alto.service.store.replays import forget_old_replays
from alto.service.store.tables import FileRow, JobRow, PartRow, UploadRow

__all__ = ["keep_house"]


def keep_house(service: Service) -> None:
    """Delete expired request records, files and uploads; files that an open job needs stay until it ends."""
    with service.store.writing() as session:
        forget_old_replays(session)
        used = select(JobRow.training_file).where(JobRow.status.in_(OPEN))
        used_too = select(JobRow.validation_file).where(JobRow.status.in_(OPEN), JobRow.validation_file.is_not(None))
        expired = list(
            session.scalars(
                select(FileRow).where(
                    FileRow.expires_at <= now(),
                    FileRow.deleted_at.is_(None),
                    FileRow.id.not_in(used),
                    FileRow.id.not_in(used_too),
                )
            )
        )
        names = [artefact_of(row) for row in expired]
        for row in expired:
            row.deleted_at, row.filename, row.status_details = now(), "", None
        over = list(
            session.scalars(select(UploadRow).where(UploadRow.status == "pending", UploadRow.expires_at <= now()))
        )
        for upload in over:
            upload.status = "expired"
            parts = session.scalars(select(PartRow).where(PartRow.upload == upload.id))
            names += [f"parts/{upload.tenant}/{part.id}" for part in parts]
    for name in names:
        service.artefacts.delete(name)
