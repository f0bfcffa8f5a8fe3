"""Requests to the vLLM server: only to its address, without redirects, and with a limit on every wait.

Built on ``asyncio`` and ``h11``, so that streams that wait for their next token occupy no thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import ssl
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

import h11

from alto.errors import ServiceError
from alto.service.settings import VllmSettings

_PIECE_BYTES = 64 * 1024
_MOST_BYTES = 32 * 2**20
"""Maximum size of an answer that is read completely into memory."""


class UpstreamError(ServiceError):
    """The vLLM server cannot be reached, or its answer is not valid HTTP."""


class UpstreamTimeoutError(UpstreamError):
    """The vLLM server did not answer in time."""


class Upstream:
    """A client of the vLLM server. Every request uses a separate connection."""

    def __init__(self, settings: VllmSettings) -> None:
        self._settings = settings
        self._address = urlsplit(settings.url)
        self._is_encrypted = self._address.scheme == "https"

    async def send(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Reply:
        """Send a request and wait for the head of its answer. The caller closes the reply after reading it.

        Args:
            path: Path below the server's address, such as ``/v1/models``.
            body: Sent as JSON; None sends no body.

        Raises:
            UpstreamError: There is no connection, or no HTTP answer.
            UpstreamTimeoutError: The answer takes too long.
        """
        content = b"" if body is None else json.dumps(body).encode()
        target = self._address.path.rstrip("/").removesuffix("/v1") + path
        request = h11.Request(method=method, target=target, headers=self._headers(len(content)))
        reader, writer = await self._connect()
        reply = Reply(reader, writer, self._settings.timeout_s)
        try:
            await reply.begin(request, content)
        except BaseException:
            await reply.close()
            raise
        return reply

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        host = self._address.hostname or ""
        port = self._address.port or (443 if self._is_encrypted else 80)
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                return await asyncio.open_connection(host, port, ssl=_tls() if self._is_encrypted else None)
        except TimeoutError as error:
            raise _too_slow(self._settings.timeout_s) from error
        except OSError as error:
            raise UpstreamError(
                f"expected a vLLM server that can be reached, found none ({error.strerror or type(error).__name__}); "
                "start it, or correct vllm.url"
            ) from error

    def _headers(self, num_bytes: int) -> list[tuple[str, str]]:
        key = self._settings.api_key
        host = self._address.netloc.rpartition("@")[2]
        return [
            ("Host", host),
            ("Accept-Encoding", "identity"),
            ("Connection", "close"),
            ("Content-Type", "application/json"),
            ("Content-Length", str(num_bytes)),
            *([] if key is None else [("Authorization", f"Bearer {key}")]),
        ]


class Reply:
    """An answer of the vLLM server.

    Attributes:
        content_type: Content type in lower case, without parameters.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, timeout_s: float) -> None:
        self._reader = reader
        self._writer = writer
        self._timeout_s = timeout_s
        self._connection = h11.Connection(h11.CLIENT)
        self.status = 0
        self.content_type = ""

    async def begin(self, request: h11.Request, content: bytes) -> None:
        """Send a request and read the head of the answer.

        Raises:
            UpstreamError: See :meth:`Upstream.send`.
        """
        events: tuple[h11.Event, ...] = (request, h11.Data(data=content), h11.EndOfMessage())
        with _translated(self._timeout_s):
            async with asyncio.timeout(self._timeout_s):
                self._writer.write(b"".join(self._connection.send(event) or b"" for event in events))
                await self._writer.drain()
        head = await self._next()
        while isinstance(head, h11.InformationalResponse):
            head = await self._next()
        if not isinstance(head, h11.Response):
            raise UpstreamError("expected an answer of the vLLM server, found a closed connection; see its log")
        kinds = [value for name, value in head.headers if name == b"content-type"]
        self.status = head.status_code
        self.content_type = b"".join(kinds[:1]).decode("latin-1").partition(";")[0].strip().lower()

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the pieces of the body as they arrive.

        Raises:
            UpstreamError: The body ends too early.
            UpstreamTimeoutError: The next piece takes too long.
        """
        while isinstance(event := await self._next(), h11.Data):
            yield bytes(event.data)

    async def read(self) -> bytes:
        """Return the complete body.

        Raises:
            UpstreamError: The body ends too early, or is longer than an answer of a model can be.
            UpstreamTimeoutError: The next piece takes too long.
        """
        found, num_bytes = list[bytes](), 0
        async for piece in self.pieces():
            found.append(piece)
            num_bytes += len(piece)
            if num_bytes > _MOST_BYTES:
                raise UpstreamError(f"the answer of the vLLM server is longer than {_MOST_BYTES} bytes")
        return b"".join(found)

    async def close(self) -> None:
        """Close the connection in any state; the server then stops computing the answer."""
        self._writer.transport.abort()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    async def _next(self) -> object:
        with _translated(self._timeout_s):
            while (event := self._connection.next_event()) is h11.NEED_DATA:
                async with asyncio.timeout(self._timeout_s):
                    self._connection.receive_data(await self._reader.read(_PIECE_BYTES))
            return event


@contextlib.contextmanager
def _translated(timeout_s: float) -> Iterator[None]:
    try:
        yield
    except TimeoutError as error:
        raise _too_slow(timeout_s) from error
    except (OSError, h11.ProtocolError) as error:
        raise UpstreamError(
            "the connection to the vLLM server failed before the answer was complete; see the vLLM log"
        ) from error


def _too_slow(timeout_s: float) -> UpstreamTimeoutError:
    return UpstreamTimeoutError(
        f"the vLLM server did not answer within {timeout_s:g} s; see the vLLM log, or increase vllm.timeout_s"
    )


@functools.cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()
