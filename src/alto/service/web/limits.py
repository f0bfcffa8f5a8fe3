"""Limits on request bodies: the size, the longest wait for the next part, and the lowest average speed."""

from __future__ import annotations

import asyncio
import json

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from alto.service.errors import ApiError, refused

_IDLE_S = 30.0
"""Longest wait for a piece of a body, in seconds."""
_LEAST_BYTES_PER_S = 1024.0
"""Minimum average rate of a body after the first `_IDLE_S` seconds; slower clients hold connections."""
_UPLOADS = ("/v1/files", "/v1/uploads/")
_OVERHEAD_BYTES = 64 * 1024
"""Allowance for a multipart body besides the file itself."""


class BodyLimits:
    """Middleware that ends requests whose bodies are too long or too slow.

    Args:
        max_request_bytes: Largest body of any other request.
    """

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
                    f"Content-Encoding: expected a body as it is, found {value.decode('latin-1')[:50]!r}; send it "
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
