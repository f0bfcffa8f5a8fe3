"""``/v1/models``: base models and fine-tuned ones."""

from __future__ import annotations

import shutil
from typing import Any

from fastapi import APIRouter
from sqlalchemy import select

from alto.service.context import ServiceOf
from alto.service.errors import refused
from alto.service.ids import now
from alto.service.models import aliases_of, find_alias, find_model, merged_folder
from alto.service.openai.objects import alias_object, base_model_object, model_object
from alto.service.store.tables import ModelRow
from alto.service.web.access import Reader, Writer

router = APIRouter()


@router.get("/models")
def list_(service: ServiceOf, caller: Reader) -> dict[str, Any]:
    """List base models, then the tenant's own, newest first, then aliases that point to the newest of a suffix."""
    with service.store.reading() as session:
        statement = select(ModelRow).where(ModelRow.tenant == caller.tenant, ModelRow.deleted_at.is_(None))
        rows = list(session.scalars(statement.order_by(ModelRow.number.desc())))
        aliases = [alias_object(alias) for alias, _ in aliases_of(session, caller.tenant)]
    base = [base_model_object(name) for name in sorted(service.settings.models)]
    return {"object": "list", "data": [*base, *map(model_object, rows), *aliases]}


@router.get("/models/{model:path}")
def get(service: ServiceOf, caller: Reader, model: str) -> dict[str, Any]:
    """Return a model."""
    if model in service.settings.models:
        return base_model_object(model)
    with service.store.reading() as session:
        found = find_alias(session, caller.tenant, model)
        return alias_object(found[0]) if found is not None else model_object(find_model(session, caller.tenant, model))


@router.delete("/models/{model:path}")
def delete(service: ServiceOf, caller: Writer, model: str) -> dict[str, Any]:
    """Delete a fine-tuned model."""
    if model in service.settings.models:
        raise refused("model: expected a fine-tuned model, found a base model, which cannot be deleted", "model")
    with service.store.writing() as session:
        alias = find_alias(session, caller.tenant, model)
        if alias is not None:
            raise refused(
                f"model: expected a model, found an alias of the newest model; delete the model that it stands "
                f"for: {alias[1].id}",
                "model",
            )
        row = find_model(session, caller.tenant, model)
        row.deleted_at = now()
    service.artefacts.delete(row.adapter)
    service.artefacts.delete(merged_folder(row))
    shutil.rmtree(service.settings.root / "runs" / row.tenant / row.job / "best", ignore_errors=True)
    service.work.set()
    return {"id": model, "object": "model", "deleted": True}
