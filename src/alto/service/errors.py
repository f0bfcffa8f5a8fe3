"""Errors of requests, as OpenAI's clients read them: ``{"error": {message, type, param, code}}``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

__all__ = ["ApiError", "not_found", "refused"]

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    502: "server_error",
    503: "server_error",
}


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
