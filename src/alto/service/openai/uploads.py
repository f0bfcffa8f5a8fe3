"""``/v1/uploads``: files that are uploaded in parts."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from typing import Annotated, Any

from fastapi import APIRouter, Request, UploadFile
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import func, select

from alto.service.access import Caller
from alto.service.context import ServiceOf
from alto.service.errors import ApiError, refused
from alto.service.files import sha256_of
from alto.service.ids import new_id, now
from alto.service.openai.files import (
    check_pending,
    check_purpose,
    check_quota,
    find_file,
    find_upload,
    keep_file,
    shown_filename,
)
from alto.service.openai.objects import part_object, upload_object
from alto.service.store.tables import PartRow, UploadRow
from alto.service.web.access import Writer
from alto.service.web.answers import mark_of
from alto.service.web.bodies import BodyRoute

_LIFE_S = 3600
_MAX_PART_BYTES = 64 * 2**20
_MAX_PARTS = 10_000

router = APIRouter(route_class=BodyRoute)


class _Expiry(BaseModel):
    anchor: str = Field(pattern="^created_at$")
    seconds: int = Field(ge=3600, le=30 * 24 * 3600)


class _Upload(BaseModel):
    model_config = ConfigDict(extra="ignore")

    bytes: int = Field(ge=1)
    filename: str = Field(min_length=1, max_length=255)
    mime_type: str = Field(max_length=100)
    purpose: str
    expires_after: _Expiry | None = None


class _Complete(BaseModel):
    model_config = ConfigDict(extra="ignore")

    part_ids: list[Annotated[str, Field(max_length=64)]] = Field(min_length=1, max_length=_MAX_PARTS)
    md5: str | None = Field(default=None, pattern="^[0-9a-fA-F]{32}$")


@router.post("/uploads")
def create(request: Request, service: ServiceOf, caller: Writer, body: _Upload) -> dict[str, Any]:
    """Create an upload: register a file whose parts the client sends later."""
    check_purpose(body.purpose)
    if body.bytes > service.settings.max_upload_bytes:
        raise refused(f"bytes: expected at most {service.settings.max_upload_bytes}, found {body.bytes}", "bytes")
    mark = mark_of(request, caller.tenant, request.state.body_hash)
    with service.store.writing() as session:
        before = mark.find(session)
        if before is not None:
            known = find_upload(session, caller.tenant, before)
            if mark.key or known.status != "cancelled":  # cancelled: its client had the answer, so this is a new upload
                return upload_object(known)
        check_quota(service, session, caller, body.bytes)
        row = UploadRow(
            id=new_id("upload"),
            tenant=caller.tenant,
            filename=shown_filename(body.filename),
            purpose=body.purpose,
            num_bytes=body.bytes,
            created_at=now(),
            expires_at=now() + _LIFE_S,
            expires_after_s=None if body.expires_after is None else body.expires_after.seconds,
            status="pending",
        )
        session.add(row)
        mark.note(session, "upload", row.id)
    return upload_object(row)


@router.post("/uploads/{upload_id}/parts")
def add_part(request: Request, service: ServiceOf, caller: Writer, upload_id: str, data: UploadFile) -> dict[str, Any]:
    """Store a part of a file."""
    digest = sha256_of(data.file)
    num_bytes = data.file.tell()
    if not num_bytes:
        raise refused("data: expected bytes, found none", "data")
    if num_bytes > _MAX_PART_BYTES:
        raise ApiError(413, f"data: expected at most {_MAX_PART_BYTES} bytes a part, found {num_bytes}", param="data")
    mark = mark_of(request, caller.tenant, digest)
    row = PartRow(id=new_id("part"), upload=upload_id, created_at=now(), num_bytes=num_bytes)
    with service.store.reading() as session:
        check_pending(find_upload(session, caller.tenant, upload_id))
    data.file.seek(0)
    service.artefacts.write(_artefact_of(caller.tenant, row), data.file)
    is_kept = False
    try:
        with service.store.writing() as session:
            before = mark.find(session)
            if before is not None and (known := session.get(PartRow, before)) is not None:
                return part_object(known)
            upload = find_upload(session, caller.tenant, upload_id, lock=True)
            check_pending(upload)
            had = select(func.count(), func.coalesce(func.sum(PartRow.num_bytes), 0)).where(PartRow.upload == upload_id)
            num_parts, num_before = session.execute(had).one()
            if num_parts >= _MAX_PARTS:
                raise refused(f"data: expected at most {_MAX_PARTS} parts, found more; send larger parts", "data")
            if int(num_before) + num_bytes > upload.num_bytes:
                raise refused(
                    f"data: expected {upload.num_bytes} bytes in all parts, found more; create an upload of the size "
                    "of the file",
                    "data",
                )
            session.add(row)
            mark.note(session, "part", row.id)
        is_kept = True
    finally:
        if not is_kept:
            service.artefacts.delete(_artefact_of(caller.tenant, row))
    return part_object(row)


@router.post("/uploads/{upload_id}/complete")
def complete(service: ServiceOf, caller: Writer, upload_id: str, body: _Complete) -> dict[str, Any]:
    """Join the parts to a file, in the given order."""
    with service.store.reading() as session:
        upload = find_upload(session, caller.tenant, upload_id)
        if upload.status == "completed" and upload.file is not None:  # the client lost the answer
            return upload_object(upload, find_file(session, caller.tenant, upload.file))
        check_pending(upload)
        parts = {row.id: row for row in session.scalars(select(PartRow).where(PartRow.upload == upload_id))}
    missing = [part for part in body.part_ids if part not in parts]
    if missing or len(set(body.part_ids)) != len(body.part_ids):
        raise refused(
            f"part_ids: expected ids of parts of this upload, each once, found {(missing or ['one twice'])[0][:64]!r}",
            "part_ids",
        )
    chosen = [parts[part] for part in body.part_ids]
    num_bytes = sum(part.num_bytes for part in chosen)
    if num_bytes != upload.num_bytes:
        raise refused(f"part_ids: expected {upload.num_bytes} bytes as announced, found {num_bytes}", "part_ids")
    with tempfile.TemporaryFile() as whole:
        try:
            for part in chosen:
                with service.artefacts.open(_artefact_of(caller.tenant, part)) as source:
                    shutil.copyfileobj(source, whole)
        except FileNotFoundError:  # ended by another request meanwhile
            return _ended(service, caller, upload_id)
        whole.seek(0)
        digest = hashlib.file_digest(whole, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
        if body.md5 is not None and digest != body.md5.lower():
            raise refused(f"md5: expected {body.md5}, found {digest}; send the parts again", "md5")
        whole.seek(0)
        file = keep_file(
            service,
            caller,
            whole,
            filename=upload.filename,
            purpose=upload.purpose,
            expires_after_s=upload.expires_after_s,
            upload=upload_id,
        )
    with service.store.reading() as session:
        upload = find_upload(session, caller.tenant, upload_id)
    _forget_parts(service, caller.tenant, list(parts.values()))
    return upload_object(upload, file)


@router.post("/uploads/{upload_id}/cancel")
def cancel(service: ServiceOf, caller: Writer, upload_id: str) -> dict[str, Any]:
    """Cancel an upload; its parts are deleted."""
    with service.store.writing() as session:
        upload = find_upload(session, caller.tenant, upload_id, lock=True)
        if upload.status != "cancelled":
            check_pending(upload)
        upload.status = "cancelled"
        parts = list(session.scalars(select(PartRow).where(PartRow.upload == upload_id)))
    _forget_parts(service, caller.tenant, parts)
    return upload_object(upload)


def _ended(service: ServiceOf, caller: Caller, upload_id: str) -> dict[str, Any]:
    with service.store.reading() as session:
        upload = find_upload(session, caller.tenant, upload_id)
        if upload.file is None:
            check_pending(upload)
            raise refused(
                "upload_id: expected an upload with all its parts, found that parts are missing; start a new upload",
                "upload_id",
            )
        return upload_object(upload, find_file(session, caller.tenant, upload.file))


def _forget_parts(service: ServiceOf, tenant: str, parts: list[PartRow]) -> None:
    for part in parts:
        service.artefacts.delete(_artefact_of(tenant, part))


def _artefact_of(tenant: str, part: PartRow) -> str:
    return f"parts/{tenant}/{part.id}"
