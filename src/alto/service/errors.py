"""Errors of the service, and answers that OpenAI's clients read: ``{"error": {message, type, param, code}}``.

The store and the checks of access raise a :class:`TenantError`, which knows nothing of HTTP; ``service/web`` makes an
:class:`ApiError` of it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

__all__ = [
    "ApiError",
    "JobStateError",
    "ReusedKeyError",
    "TenantError",
    "TooManyRequestsError",
    "UnknownJobError",
    "not_found",
    "refused",
]

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    502: "server_error",
    503: "server_error",
}


class TenantError(Exception):
    """A wish of a tenant that cannot be carried out."""


class UnknownJobError(TenantError):
    """The tenant has no such job.

    Args:
        job: Its id.
        param: Parameter of the request that names the job.
    """

    def __init__(self, job: str, param: str = "fine_tuning_job_id") -> None:
        super().__init__(f"expected a fine-tuning job of the tenant, found none named {job[:100]!r}")
        self.job = job
        self.param = param


class JobStateError(TenantError):
    """A job cannot be changed in the state that it is in."""


class ReusedKeyError(TenantError):
    """An idempotency key was used for another request."""


class TooManyRequestsError(TenantError):
    """A tenant sends more requests than it may.

    Args:
        message: Expected and found.
        wait_s: Seconds after which to try again.
    """

    def __init__(self, message: str, *, wait_s: int) -> None:
        super().__init__(message)
        self.wait_s = wait_s


class ApiError(Exception):
    """A request that is answered with an error.

    Args:
        status: HTTP status. Never 409: clients repeat such a request by themselves.
        message: What was expected, what was found, and what to do.
        param: Key of the request that was wrong.
        code: A word for programs.
        headers: Of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        assert status != 409, "clients repeat it"
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The answer as JSON values."""
        kind = _TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def refused(message: str, param: str | None = None, code: str = "invalid_value") -> ApiError:
    """The error of a request that cannot be carried out as it is."""
    return ApiError(400, message, param=param, code=code)


def not_found(kind: str, name: str, param: str = "id", *, of_what: str = "") -> ApiError:
    """The error of an id that is not there, or belongs to another tenant: both look the same.

    Args:
        kind: What it is an id of.
        name: The id.
        param: Key of the request.
        of_what: What was expected, where it is not one of the tenant's own ``kind``.
    """
    return ApiError(
        404,
        f"{param}: expected {of_what or f'a {kind} of yours'}, found none named {name[:100]!r}",
        param=param,
        code=f"{re.sub('[ -]', '_', kind)}_not_found",
    )
