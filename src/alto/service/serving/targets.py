"""Names on the vLLM server for the models of requests, and what users can do if there is none."""

from __future__ import annotations

import shlex

from sqlalchemy import select
from sqlalchemy.orm import Session

from alto.service.context import Service
from alto.service.errors import ApiError
from alto.service.models import find_alias, find_model
from alto.service.store.tables import JobRow, ModelRow

__all__ = ["NOT_READY", "serve_command", "target_of"]

NOT_READY = "model_not_ready"
_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM's ``--max-lora-rank`` accepts."""


def target_of(service: Service, session: Session, tenant: str, name: str) -> str:
    """Return the name under which the vLLM server serves the model ``name`` of a tenant.

    Raises:
        ApiError: There is no such model or no server, or the server does not serve the model now.
    """
    settings = service.settings
    if name in settings.models:
        if settings.vllm is None:
            raise _no_server(f"serve the model by hand: {shlex.join(['vllm', 'serve', settings.models[name]])}")
        if not settings.is_served(name):
            raise ApiError(
                400,
                f"model: expected a model that the vLLM server has, found {name}; use {settings.vllm.base_model}, or a "
                "model that was fine-tuned on it",
                param="model",
                code=NOT_READY,
            )
        return settings.vllm.base_model
    alias = find_alias(session, tenant, name)
    model = alias[1] if alias is not None else find_model(session, tenant, name)
    if settings.vllm is None:
        raise _no_server(
            f"download the adapter from /api/models/{model.id}/adapter, unpack it into a folder named adapter, and "
            f"serve it by hand: {serve_command(service, session, model)}"
        )
    if model.serving != "ready":
        raise _not_ready(model)
    return model.id


def serve_command(service: Service, session: Session, model: ModelRow) -> str:
    """Return the vLLM command that serves the adapter of a model from a folder named ``adapter``."""
    result = session.scalar(select(JobRow.result).where(JobRow.id == model.job))
    rank = (result or {}).get("hyperparameters", {}).get("r")
    allowed = [found for found in _RANKS if isinstance(rank, int) and found >= rank]
    limit = ["--max-lora-rank", str(allowed[0])] if allowed else []
    base = service.settings.models.get(model.base_model, model.base_model)
    return shlex.join(["vllm", "serve", base, "--enable-lora", *limit, "--lora-modules", f"{model.id}=adapter"])


def _no_server(remedy: str) -> ApiError:
    return ApiError(
        400,
        f"model: expected a service with a vLLM server, found one without (setting vllm); {remedy}",
        param="model",
        code="no_serving",
    )


def _not_ready(model: ModelRow) -> ApiError:
    because = f" ({model.serving_details})" if model.serving_details else ""
    remedy = {
        "failed": "correct the cause; the service tries again automatically",
        "none": "wait until it is registered, or use a model of the base model that the server has",
    }.get(model.serving, "wait until it is registered")
    return ApiError(
        400,
        f"model: expected a model that answers, found {model.id} {_WORDS[model.serving]}{because}; {remedy}: "
        f"/api/models/{model.id} says when it is ready",
        param="model",
        code=NOT_READY,
    )


_WORDS = {"none": "not registered", "pending": "being registered", "failed": "failed"}
