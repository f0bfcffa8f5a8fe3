"""The dashboard: web pages built on the public HTTP API and on the plotting code of the reports."""

from fastapi import APIRouter

from alto.service.dashboard import cluster, login, new_task, rendering, task

__all__ = ["router"]

router = APIRouter(include_in_schema=False)
for part in (rendering, login, task, cluster, new_task):
    router.include_router(part.router)
