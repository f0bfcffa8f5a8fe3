"""``/v1/files``: uploaded files and result files."""

from __future__ import annotations

import hashlib
from typing import Annotated, Any, BinaryIO, Literal
from urllib.parse import quote

from fastapi import APIRouter, Form, Query, Request, UploadFile
from fastapi.responses import StreamingResponse
from sqlalchemy import Select, func, select
from sqlalchemy.orm import Session

from alto.service.access import Caller
from alto.service.context import Service, ServiceOf
from alto.service.errors import ApiError, not_found, refused
from alto.service.files import check_rows, chunks_of, sha256_of
from alto.service.ids import new_id, now
from alto.service.openai.objects import After, file_object, list_object
from alto.service.store.jobs import OPEN, page_of
from alto.service.store.store import RequestMark
from alto.service.store.tables import FileRow, JobRow, Tenant, UploadRow
from alto.service.web.access import Reader, Writer
from alto.service.web.answers import mark_of
from alto.service.web.bodies import BodyRoute

FINE_TUNE = "fine-tune"
RESULTS = "fine-tune-results"

_LEAST_EXPIRY_S, _MOST_EXPIRY_S = 3600, 30 * 24 * 3600
_MAX_NAME_CHARS = 255

router = APIRouter(route_class=BodyRoute)


@router.post("/files")
def create(
    request: Request,
    service: ServiceOf,
    caller: Writer,
    file: UploadFile,
    purpose: Annotated[str, Form()],
    anchor: Annotated[str | None, Form(alias="expires_after[anchor]")] = None,
    seconds: Annotated[int | None, Form(alias="expires_after[seconds]")] = None,
) -> dict[str, Any]:
    """Store a file; its status says whether it can be used."""
    check_purpose(purpose)
    expires_after_s = _expiry_s(anchor, seconds)
    digest = sha256_of(file.file)
    name = file.filename or "upload.jsonl"
    parts = "\0".join((digest, purpose, name, str(expires_after_s)))
    mark = mark_of(request, caller.tenant, hashlib.sha256(parts.encode()).hexdigest())
    file.file.seek(0)
    row = keep_file(
        service, caller, file.file, filename=name, purpose=purpose, expires_after_s=expires_after_s, mark=mark
    )
    return file_object(row)


@router.get("/files")
def list_(
    service: ServiceOf,
    caller: Reader,
    after: After = None,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
    order: Literal["asc", "desc"] = "desc",
    purpose: Annotated[str | None, Query(max_length=64)] = None,
) -> dict[str, Any]:
    """List the tenant's files."""
    with service.store.reading() as session:
        statement = select(FileRow).where(FileRow.tenant == caller.tenant, _is_available(now()))
        if purpose is not None:
            statement = statement.where(FileRow.purpose == purpose)
        number = None
        if after is not None:
            number = session.scalar(select(FileRow.number).where(FileRow.id == after, FileRow.tenant == caller.tenant))
            if number is None:
                raise not_found("file", after, "after")
        rows, has_more = page_of(
            session, statement, FileRow.number, after=number, limit=limit, is_ascending=order == "asc"
        )
    return list_object([file_object(row) for row in rows], has_more=has_more)


@router.get("/files/{file_id}")
def get(service: ServiceOf, caller: Reader, file_id: str) -> dict[str, Any]:
    """Return a file's object."""
    with service.store.reading() as session:
        return file_object(find_file(session, caller.tenant, file_id))


@router.get("/files/{file_id}/content")
def content(service: ServiceOf, caller: Reader, file_id: str) -> StreamingResponse:
    """Return a file's content."""
    with service.store.reading() as session:
        row = find_file(session, caller.tenant, file_id)
    try:
        opened = service.artefacts.open(artefact_of(row))
    except FileNotFoundError:  # deleted meanwhile
        raise not_found("file", file_id, "file_id") from None
    return StreamingResponse(
        chunks_of(opened),
        media_type="application/octet-stream",
        headers={"Content-Disposition": f"attachment; filename*=UTF-8''{quote(row.filename, safe='')}"},
    )


@router.delete("/files/{file_id}")
def delete(service: ServiceOf, caller: Writer, file_id: str) -> dict[str, Any]:
    """Delete a file that no open job needs."""
    with service.store.writing() as session:
        row = find_file(session, caller.tenant, file_id)
        used = session.scalar(
            select(JobRow.id)
            .where(
                JobRow.status.in_(OPEN),
                (JobRow.training_file == file_id) | (JobRow.validation_file == file_id),
            )
            .limit(1)
        )
        if used is not None:
            raise refused(
                f"file_id: expected a file that no open job needs, found that {used} needs it; cancel that job first",
                "file_id",
                "file_in_use",
            )
        row.deleted_at, row.filename, row.status_details = now(), "", None
    service.artefacts.delete(artefact_of(row))
    return {"id": file_id, "object": "file", "deleted": True}


def find_file(session: Session, tenant: str, file: str, param: str = "file_id") -> FileRow:
    """Return a file of a tenant.

    Raises:
        ApiError: There is no such file.
    """
    row = session.scalar(_available_file(tenant, file))
    if row is None:
        raise not_found("file", file, param)
    return row


def _available_file(tenant: str, file: str) -> Select[FileRow]:
    """Return a query for a file of a tenant that is neither deleted nor expired."""
    return select(FileRow).where(FileRow.id == file, FileRow.tenant == tenant, _is_available(now()))


def keep_file(
    service: Service,
    caller: Caller,
    content: BinaryIO,
    *,
    filename: str,
    purpose: str,
    expires_after_s: int | None = None,
    mark: RequestMark | None = None,
    upload: str | None = None,
) -> FileRow:
    """Store ``content``, which must be at its beginning, as a file of the caller.

    Args:
        mark: Mark of the request; a repetition returns the same file.
        upload: The upload that the file completes; if it has a file already, that file is returned.

    Raises:
        ApiError: The file is too large, the tenant has too many bytes, or the upload has ended otherwise.
    """
    checked = check_rows(content)
    fault = checked.fault if purpose == FINE_TUNE else ""
    if checked.num_bytes > service.settings.max_upload_bytes:
        raise ApiError(
            413,
            f"file: expected at most {service.settings.max_upload_bytes} bytes, found {checked.num_bytes}; send less",
            param="file",
            code="request_too_large",
        )
    row = FileRow(
        id=new_id("file"),
        tenant=caller.tenant,
        filename=shown_filename(filename),
        purpose=purpose,
        num_bytes=checked.num_bytes,
        sha256=checked.sha256,
        created_at=now(),
        expires_at=None if expires_after_s is None else now() + expires_after_s,
        status="error" if fault else "processed",
        status_details=fault or None,
    )
    content.seek(0)
    service.artefacts.write(artefact_of(row), content)
    is_kept = False
    try:
        with service.store.writing() as session:
            before = mark.find(session) if mark is not None else None
            if before is not None and (known := session.scalar(_available_file(caller.tenant, before))) is not None:
                return known
            if upload is not None:
                pending = find_upload(session, caller.tenant, upload, lock=True)
                if pending.status == "completed" and pending.file is not None:
                    return find_file(session, caller.tenant, pending.file)
                check_pending(pending)
                pending.status, pending.file = "completed", row.id
            else:
                check_quota(service, session, caller, checked.num_bytes)
            session.add(row)
            if mark is not None:
                mark.note(session, "file", row.id)
        is_kept = True
    finally:
        if not is_kept:
            service.artefacts.delete(artefact_of(row))
    return row


def artefact_of(row: FileRow) -> str:
    """Return the artifact name of a file's content."""
    return f"files/{row.tenant}/{row.id}"


def check_purpose(purpose: str) -> None:
    """Check that files of this purpose can be uploaded.

    Raises:
        ApiError: They cannot.
    """
    if purpose != FINE_TUNE:
        raise refused(
            f"purpose: expected {FINE_TUNE!r}, found {purpose[:50]!r}; this service only fine-tunes models", "purpose"
        )


def find_upload(session: Session, tenant: str, upload: str, *, lock: bool = False) -> UploadRow:
    """Return an upload of a tenant; ``lock`` reads its current row and locks it until this transaction ends.

    Raises:
        ApiError: There is no such upload.
    """
    statement = select(UploadRow).where(UploadRow.id == upload, UploadRow.tenant == tenant)
    if lock:
        statement = statement.with_for_update().execution_options(populate_existing=True)
    row = session.scalar(statement)
    if row is None:
        raise not_found("upload", upload, "upload_id")
    return row


def check_pending(row: UploadRow) -> None:
    """Check that an upload still takes parts.

    Raises:
        ApiError: It has ended.
    """
    status = "expired" if row.status == "pending" and row.expires_at <= now() else row.status
    if status != "pending":
        raise refused(f"upload_id: expected a pending upload, found that it is {status}", "upload_id", "invalid_state")


def check_quota(
    service: Service, session: Session, caller: Caller, num_bytes: int, *, param: str | None = "file"
) -> None:
    """Check that a tenant may store ``num_bytes`` more. Announced sizes of pending uploads and run folders count too.

    Args:
        num_bytes: 0 checks that the tenant is not over its limit already.

    Raises:
        ApiError: The tenant would be over its limit.
    """
    most = service.limits_of(session.get(Tenant, caller.tenant)).max_bytes
    if most is None:
        return
    kept = select(func.coalesce(func.sum(FileRow.num_bytes), 0)).where(
        FileRow.tenant == caller.tenant, FileRow.deleted_at.is_(None)
    )
    announced = select(func.coalesce(func.sum(UploadRow.num_bytes), 0)).where(
        UploadRow.tenant == caller.tenant, UploadRow.status == "pending", UploadRow.expires_at > now()
    )
    files = int(session.scalar(kept) or 0) + int(session.scalar(announced) or 0)
    runs = service.run_bytes(caller.tenant)
    if files + runs + num_bytes > most:
        raise ApiError(
            429,
            f"expected at most {most} bytes of files and runs, found {files} bytes of files, {runs} bytes of runs and "
            f"{num_bytes} bytes more; delete files or models (the folder of a run keeps the adapter of its model), or "
            "wait until tasks end and their checkpoints are removed",
            param=param,
            code="storage_quota_exceeded",
            headers={"Retry-After": "60", "x-should-retry": "false"},
        )


def _expiry_s(anchor: str | None, seconds: int | None) -> int | None:
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at" or seconds is None or not _LEAST_EXPIRY_S <= seconds <= _MOST_EXPIRY_S:
        raise refused(
            f"expires_after: expected the anchor 'created_at' and {_LEAST_EXPIRY_S} to {_MOST_EXPIRY_S} seconds, found "
            f"{str(anchor)[:50]!r} and {seconds}; correct it",
            "expires_after",
        )
    return seconds


def shown_filename(filename: str) -> str:
    """Return the last part of a file's name, without unprintable characters."""
    last = filename.replace("\\", "/").rpartition("/")[2]
    return "".join(char for char in last if char.isprintable())[:_MAX_NAME_CHARS] or "upload"


def _is_available(at: int) -> Any:
    return FileRow.deleted_at.is_(None) & (FileRow.expires_at.is_(None) | (FileRow.expires_at > at))
