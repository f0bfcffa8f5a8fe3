"""The dashboard: web pages that use the same API as programs and the same drawing code as reports."""

from fastapi import APIRouter

from alto.service.dashboard import assets, cluster, login, new_task, task, task_list

__all__ = ["router"]

router = APIRouter(include_in_schema=False)
for part in (assets, login, task_list, task, cluster, new_task):
    router.include_router(part.router)
