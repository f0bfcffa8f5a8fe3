"""``/v1/models``: base models and fine-tuned ones."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from sqlalchemy import select

from alto.service.context import ServiceOf
from alto.service.errors import refused
from alto.service.ids import now
from alto.service.models import find_model
from alto.service.openai.objects import base_model_object, model_object
from alto.service.store.tables import ModelRow
from alto.service.web.access import Reader, Writer

__all__ = ["router"]

router = APIRouter()


@router.get("/models")
def list_(service: ServiceOf, caller: Reader) -> dict[str, Any]:
    """Base models, then the tenant's own, newest first."""
    with service.store.reading() as session:
        statement = select(ModelRow).where(ModelRow.tenant == caller.tenant, ModelRow.deleted_at.is_(None))
        rows = list(session.scalars(statement.order_by(ModelRow.number.desc())))
    base = [base_model_object(name) for name in sorted(service.settings.models)]
    return {"object": "list", "data": [*base, *map(model_object, rows)]}


@router.get("/models/{model:path}")
def get(service: ServiceOf, caller: Reader, model: str) -> dict[str, Any]:
    """A model."""
    if model in service.settings.models:
        return base_model_object(model)
    with service.store.reading() as session:
        return model_object(find_model(session, caller.tenant, model))


@router.delete("/models/{model:path}")
def delete(service: ServiceOf, caller: Writer, model: str) -> dict[str, Any]:
    """Delete a fine-tuned model."""
    if model in service.settings.models:
        raise refused("model: expected a fine-tuned model, found a base model, which the service keeps", "model")
    with service.store.writing() as session:
        row = find_model(session, caller.tenant, model)
        row.deleted_at = now()
        adapter = row.adapter
    service.artefacts.delete(adapter)
    service.work.set()
    return {"id": model, "object": "model", "deleted": True}
