"""Names of base models and fine-tuned models in requests."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from alto.service.errors import ApiError, not_found
from alto.service.settings import ServiceSettings
from alto.service.store.tables import AliasRow, ModelRow

_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")


def base_model_of(settings: ServiceSettings, name: str) -> dict[str, Any]:
    """Return the task keys for the base model that a request names.

    Raises:
        ApiError: The service offers no model of that name.
    """
    model = settings.models.get(name)
    # If a local folder has that name, it would be loaded instead of the hub's model.
    if model is None and settings.hub_models and _HUB_ID.fullmatch(name) and not Path(name).exists():
        model = name
    if model is None:
        raise ApiError(
            404,
            f"model: expected one of {', '.join(sorted(settings.models))}"
            f"{' or a model of the Hugging Face hub' if settings.hub_models else ''}, found {name[:100]!r}; list them "
            "with client.models.list()",
            param="model",
            code="model_not_found",
        )
    trusts = {"trust_remote_code": True} if name in settings.trust_remote_code else {}
    return {"model": model, **trusts}


def public_base(settings: ServiceSettings, name: str) -> str:
    """Return the base model that requests call ``name``; this name itself if the model is a folder of the service."""
    base = settings.models.get(name, name)
    return name if Path(base).is_dir() else base


def fine_tuned_name(base: str, tenant: str, suffix: str | None, job: str) -> str:
    """Return the unique, stable name of the model that a job returns."""
    return f"ft:{base}:{tenant}:{suffix or ''}:{job.rpartition('-')[2][:12]}"


def alias_name(base: str, tenant: str, suffix: str) -> str:
    """Return the name that points to the newest model of a tenant, base model and suffix."""
    return f"ft:{base}:{tenant}:{suffix}"


def merged_folder(model: ModelRow) -> str:
    """Return the artifact folder for the weights of the base model merged with the adapter of ``model``."""
    return f"merged/{model.tenant}/{model.job}"


def find_model(session: Session, tenant: str, name: str) -> ModelRow:
    """Return a fine-tuned model of a tenant.

    Raises:
        ApiError: There is no such model.
    """
    row = session.scalar(
        select(ModelRow).where(ModelRow.id == name, ModelRow.tenant == tenant, ModelRow.deleted_at.is_(None))
    )
    if row is None:
        raise not_found("model", name, "model")
    return row


def find_alias(session: Session, tenant: str, name: str) -> tuple[AliasRow, ModelRow] | None:
    """Return an alias of a tenant and its model; None if there is no such alias or its model was deleted."""
    statement = _aliases(tenant).where(AliasRow.name == name)
    found = session.execute(statement).first()
    return None if found is None else (found[0], found[1])


def aliases_of(session: Session, tenant: str) -> list[tuple[AliasRow, ModelRow]]:
    """Return all aliases of a tenant with their models, sorted by name, without aliases of deleted models."""
    return [(row[0], row[1]) for row in session.execute(_aliases(tenant).order_by(AliasRow.name))]


def _aliases(tenant: str) -> Any:
    return (
        select(AliasRow, ModelRow)
        .join(ModelRow, ModelRow.id == AliasRow.model)
        .where(AliasRow.tenant == tenant, ModelRow.tenant == tenant, ModelRow.deleted_at.is_(None))
    )
