"""Request bodies: read only from callers with access, and limited in size, time, and the values that they may
contain."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request
from fastapi.routing import APIRoute
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

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
        ApiError: A value cannot be stored.
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
                raise _refused("integers from -2**63 to 2**63 - 1", f"an integer of {each.bit_length()} bits")
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
        raise _refused("text without NUL characters", "text with a NUL character")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise _refused("valid Unicode text", "an unpaired surrogate") from None


def _refused(expected: str, found: str) -> ApiError:
    return refused(f"body: expected {expected}, found {found}; correct it", code="invalid_body")


_IDLE_S = 30.0
"""Longest wait for a piece of a body, in seconds."""
_LEAST_BYTES_PER_S = 1024.0
"""Minimum average rate of a body after the first `_IDLE_S` seconds; slower clients hold connections."""
_UPLOADS = ("/v1/files", "/v1/uploads/")
_OVERHEAD_BYTES = 64 * 1024
"""Additional bytes that a multipart body may have, next to the file itself."""


class BodyLimits:
    """Middleware that aborts requests whose bodies are too long or too slow."""

    def __init__(self, app: ASGIApp, *, max_upload_bytes: int, max_request_bytes: int) -> None:
        self._app = app
        self._max_upload_bytes = max_upload_bytes
        self._max_request_bytes = max_request_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        is_upload = scope["path"].startswith(_UPLOADS) and scope["method"] == "POST"
        most = self._max_upload_bytes + _OVERHEAD_BYTES if is_upload else self._max_request_bytes
        body = _Body(receive, most)
        has_started = False

        async def watched_send(message: Message) -> None:
            nonlocal has_started
            has_started = True
            await send(message)

        try:
            _check_address(scope)
            body.check_declared(scope)
            await self._app(scope, body.receive, watched_send)
        except ApiError as error:
            if has_started:
                raise
            await _answer(error, send)


def _check_address(scope: Scope) -> None:
    if "\0" in scope["path"] or b"%00" in scope["query_string"]:
        raise refused("url: expected text without the character NUL, found text with it; correct it", "url")


class _Body:
    """The body of a request, counted while it is received."""

    def __init__(self, receive: Receive, most: int) -> None:
        self._receive = receive
        self._most = most
        self._num_bytes = 0
        self._since: float | None = None
        self._is_whole = False

    def check_declared(self, scope: Scope) -> None:
        for name, value in scope["headers"]:
            if name == b"content-length" and value.isdigit() and int(value) > self._most:
                raise self._too_long()
            if name == b"content-encoding" and value.strip().lower() not in (b"", b"identity"):
                raise ApiError(
                    415,
                    f"Content-Encoding: expected an uncompressed body, found {value.decode('latin-1')[:50]!r}; send it "
                    "without compression",
                    code="unsupported_encoding",
                )

    async def receive(self) -> Message:
        if self._is_whole:
            return await self._receive()
        loop = asyncio.get_running_loop()
        self._since = loop.time() if self._since is None else self._since
        try:
            async with asyncio.timeout(_IDLE_S):
                message = await self._receive()
        except TimeoutError:
            raise self._too_slow() from None
        if message["type"] == "http.disconnect":
            raise ApiError(400, "expected the whole body, found that the client closed the connection; send it again")
        if message["type"] == "http.request":
            self._num_bytes += len(message.get("body", b""))
            self._is_whole = not message.get("more_body", False)
            took_s = loop.time() - self._since
            if self._num_bytes > self._most:
                raise self._too_long()
            if not self._is_whole and took_s > _IDLE_S and self._num_bytes < took_s * _LEAST_BYTES_PER_S:
                raise self._too_slow()
        return message

    def _too_long(self) -> ApiError:
        return ApiError(
            413, f"expected a body of at most {self._most} bytes, found more; send less", code="request_too_large"
        )

    def _too_slow(self) -> ApiError:
        return ApiError(
            400, f"expected a body without pauses of {_IDLE_S:g} s, found a slower one; send it again", code="too_slow"
        )


async def _answer(error: ApiError, send: Send) -> None:
    body = json.dumps(error.body()).encode()
    headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
