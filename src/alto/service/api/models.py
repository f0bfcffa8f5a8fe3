"""``/api/models``: fine-tuned models with their adapters, merged weights and serving state."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import Select, select
from sqlalchemy.orm import Session

from alto.service.access import Caller
from alto.service.api.model_exports import ModelExports
from alto.service.api.model_texts import texts_without_paths
from alto.service.context import Service, ServiceOf
from alto.service.errors import ApiError, not_found, refused
from alto.service.files.zips import zip_chunks
from alto.service.models import aliases_of, find_alias, find_model, merged_folder
from alto.service.openai.objects import list_object
from alto.service.openai.paging import After, Limit
from alto.service.serving.targets import serve_command
from alto.service.store.paging import page_of
from alto.service.store.tables import ModelRow
from alto.service.web.access import Reader, Writer

__all__ = ["router"]

router = APIRouter(prefix="/models")


def _exports(request: Request) -> ModelExports:
    found: ModelExports = request.app.state.model_exports
    return found


Exports = Annotated[ModelExports, Depends(_exports)]


class _Push(BaseModel):
    model_config = ConfigDict(extra="forbid")

    repository: str = Field(max_length=200, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*$")


@router.get("")
def list_(service: ServiceOf, caller: Reader, after: After = None, limit: Limit = 20) -> dict[str, Any]:
    """List the tenant's fine-tuned models, newest first."""
    with service.store.reading() as session:
        statement: Select[Any] = select(ModelRow).where(ModelRow.tenant == caller.tenant, ModelRow.deleted_at.is_(None))
        number = None
        if after is not None:
            number = session.scalar(
                select(ModelRow.number).where(ModelRow.id == after, ModelRow.tenant == caller.tenant)
            )
            if number is None:
                raise not_found("model", after, "after")
        rows: list[ModelRow]
        rows, has_more = page_of(session, statement, ModelRow.number, after=number, limit=limit)
        aliases = [(model.id, alias.name) for alias, model in aliases_of(session, caller.tenant)]
    return list_object([_object(service, row, aliases) for row in rows], has_more=has_more)


@router.get("/{model:path}/adapter")
def adapter(service: ServiceOf, caller: Reader, model: str) -> StreamingResponse:
    """Download the adapter's folder as a zip file."""
    row = _found(service, caller, model)
    names = service.artefacts.names(row.adapter)
    if not names:
        raise not_found("adapter", model, "model")
    return _zip(service, row, row.adapter, names, f"{row.job}.zip")


@router.post("/{model:path}/merged", status_code=202)
def merge(service: ServiceOf, caller: Writer, exports: Exports, model: str) -> dict[str, Any]:
    """Start writing merged weights; an event of the job reports when they are ready."""
    row = _found(service, caller, model)
    if not exports.merged_names(row):
        exports.merge(row)
    return {"id": row.id, "object": "model.merged", "status": _merged_status(exports, row)}


@router.get("/{model:path}/merged")
def merged(service: ServiceOf, caller: Reader, exports: Exports, model: str) -> StreamingResponse:
    """Download the merged weights as a zip file."""
    row = _found(service, caller, model)
    names = exports.merged_names(row)
    if not names:
        state = "weights that are still being written" if exports.is_merging(row) else "none"
        raise ApiError(
            404,
            f"model: expected merged weights, found {state}; request them with POST "
            f"/api/models/{row.id}/merged, and wait for the event of {row.job}",
            param="model",
            code="merged_not_found",
        )
    return _zip(service, row, merged_folder(row), names, f"{row.job}-merged.zip")


@router.post("/{model:path}/push", status_code=202)
def push(service: ServiceOf, caller: Writer, exports: Exports, model: str, body: _Push) -> dict[str, Any]:
    """Start uploading the adapter to the Hugging Face hub; an event of the job reports the result."""
    if not service.settings.hub_push:
        raise refused(
            "push: expected a service that uploads to the hub, found a service that does not (setting hub_push); "
            f"download the adapter from /api/models/{model[:300]}/adapter and upload it with: hf upload",
            code="hub_push_disabled",
        )
    row = _found(service, caller, model)
    exports.push(row, body.repository)
    return {"id": row.id, "object": "model.push", "repository": body.repository, "status": "running"}


@router.get("/{model:path}")
def get(service: ServiceOf, caller: Reader, exports: Exports, model: str) -> dict[str, Any]:
    """Return a fine-tuned model."""
    row = _found(service, caller, model)
    with service.store.reading() as session:
        aliases = [(found.id, alias.name) for alias, found in aliases_of(session, caller.tenant)]
        command = serve_command(service, session, row)
    return {**_object(service, row, aliases), "merged": _merged_status(exports, row), "serve_command": command}


def _found(service: Service, caller: Caller, model: str) -> ModelRow:
    """Return the model of that name, or the model that an alias of that name points to."""
    with service.store.reading() as session:
        return _find(session, caller.tenant, model)


def _find(session: Session, tenant: str, model: str) -> ModelRow:
    alias = find_alias(session, tenant, model)
    return alias[1] if alias is not None else find_model(session, tenant, model)


def _object(service: Service, row: ModelRow, aliases: Iterable[tuple[str, str]]) -> dict[str, Any]:
    return {
        "id": row.id,
        "object": "model",
        "created_at": row.created_at,
        "job": row.job,
        "base_model": row.base_model,
        "aliases": [name for model, name in aliases if model == row.id],
        "serving": row.serving,
        "serving_details": row.serving_details,
        "ready": row.serving == "ready" and service.settings.vllm is not None,
    }


def _merged_status(exports: ModelExports, row: ModelRow) -> str:
    if exports.merged_names(row):
        return "ready"
    return "running" if exports.is_merging(row) else "none"


def _zip(service: Service, row: ModelRow, folder: str, names: list[str], filename: str) -> StreamingResponse:
    texts = texts_without_paths(service, row, folder, names)
    return StreamingResponse(
        zip_chunks(service.artefacts, folder, names, texts),
        media_type="application/zip",
        headers={"Content-Disposition": f'attachment; filename="{filename}"'},
    )
