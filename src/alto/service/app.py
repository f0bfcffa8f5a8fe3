"""The web application: all routes, error handlers and middleware."""

from __future__ import annotations

from fastapi import FastAPI

from alto.service.api import cluster, drafts, health, streams, tasks
from alto.service.api import models as own_models
from alto.service.api.model_exports import ModelExports
from alto.service.api.streams import Followers
from alto.service.context import Service
from alto.service.coordinator import Coordinator
from alto.service.dashboard import router as dashboard
from alto.service.dashboard.rendering import error_page
from alto.service.openai import files, jobs, models, unsupported, uploads
from alto.service.serving import chat
from alto.service.web.answers import ERROR_ANSWERS, RequestIds, add_error_answers
from alto.service.web.counts import RequestCounts
from alto.service.web.document import describe_keys
from alto.service.web.limits import BodyLimits
from alto.version import __version__

__all__ = ["create_app"]


def create_app(service: Service, coordinator: Coordinator | None = None) -> FastAPI:
    """Return the application that serves ``service``; ``coordinator`` is this process's coordinator, if it has one."""
    app = FastAPI(title="ALTO", version=__version__, docs_url=None, redoc_url=None)
    app.state.service, app.state.coordinator = service, coordinator
    app.state.model_exports = ModelExports(service)
    add_error_answers(app, error_page)
    describe_keys(app)
    app.state.request_counts = RequestCounts()
    app.include_router(health.router)
    app.state.followers = Followers(service.store)
    for part in (tasks, streams, cluster, drafts, own_models):
        app.include_router(part.router, prefix="/api", responses=dict(ERROR_ANSWERS))
    for part in (files, uploads, jobs, models, chat, unsupported):
        app.include_router(part.router, prefix="/v1", responses=dict(ERROR_ANSWERS))
    app.include_router(dashboard)
    settings = service.settings
    app.add_middleware(
        BodyLimits,
        max_upload_bytes=settings.max_upload_bytes,
        max_request_bytes=settings.max_request_bytes,
    )
    app.add_middleware(RequestIds, counts=app.state.request_counts)
    return app
