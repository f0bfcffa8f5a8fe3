"""Errors of the service, answered in the form that OpenAI's clients read: ``{"error": {message, type, param, code}}``.

The store and the access checks raise a :class:`TenantError`, which knows nothing about HTTP; ``service/web`` converts
it to an :class:`ApiError`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

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
    """A tenant's request that cannot be carried out."""


class UnknownJobError(TenantError):
    """Raised when the tenant has no job of this id.

    Args:
        param: Parameter of the request that names the job.
    """

    def __init__(self, job: str, param: str = "fine_tuning_job_id") -> None:
        super().__init__(f"expected a fine-tuning job of the tenant, found none named {job[:100]!r}")
        self.job = job
        self.param = param


class JobStateError(TenantError):
    """Raised when the current state of the job does not allow the requested change."""


class ReusedKeyError(TenantError):
    """The idempotency key was already used for a different request."""


class TooManyRequestsError(TenantError):
    """The tenant sends more requests than its limit allows."""

    def __init__(self, message: str, *, wait_s: int) -> None:
        super().__init__(message)
        self.wait_s = wait_s


class ApiError(Exception):
    """A request that is answered with an HTTP error.

    Args:
        status: HTTP status; never 409, because clients retry it on their own.
        message: Sentence that says what was expected, what was found, and what to do.
        param: Key of the request that is wrong.
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
        """Return the response body as JSON values."""
        kind = _TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def refused(message: str, param: str | None = None, code: str = "invalid_value") -> ApiError:
    """Return a 400 error for a request that cannot be carried out as sent."""
    return ApiError(400, message, param=param, code=code)


def not_found(kind: str, name: str, param: str = "id", *, of_what: str = "") -> ApiError:
    """Return a 404 error for an id that does not exist or belongs to another tenant; the caller cannot tell the
    two cases apart.

    Args:
        kind: Kind of object that the id names, such as "model".
        param: Key of the request that holds the id.
        of_what: Description of the expected object, used instead of the default 'a ``kind`` of yours'.
    """
    return ApiError(
        404,
        f"{param}: expected {of_what or f'a {kind} of yours'}, found none named {name[:100]!r}",
        param=param,
        code=f"{re.sub('[ -]', '_', kind)}_not_found",
    )
