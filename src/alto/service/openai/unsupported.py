"""Parts of OpenAI's API that this service refuses, each with its reason."""

from __future__ import annotations

from fastapi import APIRouter

from alto.service.errors import ApiError, refused
from alto.service.web.access import Reader
from alto.service.web.bodies import BodyRoute

__all__ = ["router"]

router = APIRouter(prefix="/fine_tuning", route_class=BodyRoute)


@router.get("/checkpoints/{checkpoint:path}/permissions")
def list_permissions(caller: Reader, checkpoint: str) -> None:
    """Projects with which a checkpoint is shared."""
    raise _not_shared()


@router.post("/checkpoints/{checkpoint:path}/permissions")
def create_permissions(caller: Reader, checkpoint: str) -> None:
    """Share a checkpoint with other projects."""
    raise _not_shared()


@router.delete("/checkpoints/{checkpoint:path}/permissions/{permission}")
def delete_permission(caller: Reader, checkpoint: str, permission: str) -> None:
    """Share a checkpoint no longer."""
    raise _not_shared()


def _not_shared() -> ApiError:
    return refused(
        "permissions: expected no shared checkpoints, as tenants are kept apart, found a request for them; download "
        "the adapter from /api/models and pass it on",
        "checkpoint",
        "unsupported",
    )


@router.post("/alpha/graders/{action}")
def graders(caller: Reader, action: str) -> None:
    """Graders of reinforcement fine-tuning."""
    raise refused(
        "grader: expected a supervised or dpo job, found a request for a grader, which this service does not run",
        "grader",
        "unsupported",
    )
