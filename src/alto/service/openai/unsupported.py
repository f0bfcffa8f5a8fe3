"""Parts of OpenAI's API that this service refuses, each with its reason, or supports only to check a request."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel

from alto.service.context import ServiceOf
from alto.service.errors import ApiError, refused
from alto.service.openai.graders import check_grader
from alto.service.web.access import Reader
from alto.service.web.bodies import BodyRoute

router = APIRouter(prefix="/fine_tuning", route_class=BodyRoute)


@router.get("/checkpoints/{checkpoint:path}/permissions")
def list_permissions(caller: Reader, checkpoint: str) -> None:
    """List the projects that share a checkpoint; always refused."""
    raise _not_shared()


@router.post("/checkpoints/{checkpoint:path}/permissions")
def create_permissions(caller: Reader, checkpoint: str) -> None:
    """Share a checkpoint with other projects; always refused."""
    raise _not_shared()


@router.delete("/checkpoints/{checkpoint:path}/permissions/{permission}")
def delete_permission(caller: Reader, checkpoint: str, permission: str) -> None:
    """End the sharing of a checkpoint; always refused."""
    raise _not_shared()


def _not_shared() -> ApiError:
    return refused(
        "permissions: expected no request to share a checkpoint, found one; tenants of this service are isolated: "
        "download the adapter from /api/models, and pass it on",
        "checkpoint",
        "unsupported",
    )


class _GraderRequest(BaseModel):
    grader: dict[str, Any]


@router.post("/alpha/graders/validate")
def validate_grader(service: ServiceOf, caller: Reader, body: _GraderRequest) -> dict[str, Any]:
    """Check a grader of a job."""
    check_grader(body.grader, service.settings.graders)
    return {"grader": body.grader}


@router.post("/alpha/graders/{action}")
def graders(caller: Reader, action: str) -> None:
    """Run a grader by itself; always refused."""
    raise refused(
        "grader: expected a request to validate a grader, found a request to run one; give the grader to a job with "
        "the method reinforcement, or as select_by in the hyperparameters of another job",
        "grader",
        "unsupported",
    )
