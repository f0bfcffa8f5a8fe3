"""Request bodies: read only from callers with access, and limited to values that can be stored and returned."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request
from fastapi.routing import APIRoute
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from alto.service.errors import ApiError, refused
from alto.service.web.access import caller
from alto.service.web.answers import hash_of_json, mark_of

_MOST_FILES = 1
_MOST_FIELDS = 16
_MOST_FIELD_BYTES = 64 * 1024
_MOST_DEPTH = 32
_LARGEST_INTEGER = 2**63


class BodyRoute(APIRoute):
    """A route that reads the body only after its caller is known."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler, preceded by these checks."""
        handle = super().get_route_handler()

        async def checked(request: Request) -> Response:
            if self.body_field is None:
                return await handle(request)
            kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
            is_form = kind in ("multipart/form-data", "application/x-www-form-urlencoded")
            try:
                await run_in_threadpool(caller, request)
            except ApiError as error:
                if error.status == 429 and not is_form:  # the client repeats it, which must be recognised
                    mark_of(request, request.state.tenant, hash_of_json(await request.body()))
                raise
            # The request caches both, and the framework finds them there. Reading them itself, the framework would hide
            # the error of a body that is too long.
            if is_form:
                await request.form(max_files=_MOST_FILES, max_fields=_MOST_FIELDS, max_part_size=_MOST_FIELD_BYTES)
            else:
                body = await request.body()
                request.state.body_hash = hash_of_json(body)
                if body and (kind == "application/json" or kind.endswith("+json")):
                    request._json = _parsed(body)
            return await handle(request)

        return checked


def check_values(value: object) -> None:
    """Check that JSON values can be stored and returned: limited depth, finite numbers, 64-bit integers, valid text.

    Raises:
        ApiError: A value cannot.
    """
    level: list[object] = [value]
    for _ in range(_MOST_DEPTH):
        following: list[object] = []
        for each in level:
            if isinstance(each, str):
                _check_text(each)
            elif isinstance(each, dict):
                for key in each:
                    _check_text(key)
                following.extend(each.values())
            elif isinstance(each, list):
                following.extend(each)
            elif isinstance(each, float) and not math.isfinite(each):
                raise _refused("finite numbers", str(each))
            elif isinstance(each, int) and not -_LARGEST_INTEGER <= each < _LARGEST_INTEGER:
                raise _refused("whole numbers of 64 bits", f"one of {each.bit_length()} bits")
        level = following
        if not level:
            return
    raise _refused(f"values nested at most {_MOST_DEPTH} deep", "deeper values")


def _parsed(body: bytes) -> Any:
    try:
        found = json.loads(body)
    except RecursionError:
        raise _refused(f"values nested at most {_MOST_DEPTH} deep", "deeper values") from None
    except ValueError:  # not JSON, not UTF-8, or a number with thousands of digits
        raise _refused("JSON in UTF-8", "something else") from None
    check_values(found)
    return found


def _check_text(text: str) -> None:
    if "\0" in text:
        raise _refused("text without the character NUL", "text with it")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise _refused("text of whole characters", "half of a surrogate pair") from None


def _refused(expected: str, found: str) -> ApiError:
    return refused(f"body: expected {expected}, found {found}; correct it", code="invalid_body")
