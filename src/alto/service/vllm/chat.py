"""``/v1/chat/completions`` and ``/v1/completions``, forwarded to the vLLM server for models of the tenant."""

from __future__ import annotations

import asyncio
import json
import logging
import shlex
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import StreamingResponse
from sqlalchemy import select
from sqlalchemy.orm import Session
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from alto.service.access import Caller
from alto.service.context import Service, ServiceOf
from alto.service.errors import ApiError, refused
from alto.service.models import find_alias, find_model, public_base
from alto.service.store.tables import JobRow, ModelRow
from alto.service.vllm.adapters import message_of
from alto.service.vllm.upstream import Reply, Upstream, UpstreamError, UpstreamTimeoutError
from alto.service.web.access import Talker
from alto.spec import VLLM_RANKS

NOT_READY = "model_not_ready"


def target_of(service: Service, session: Session, tenant: str, name: str) -> str:
    """Return the name under which the vLLM server serves the model ``name`` of a tenant.

    Raises:
        ApiError: There is no such model or no server, or the server does not serve the model now.
    """
    settings = service.settings
    if name in settings.models:
        if settings.vllm is None:
            raise _no_server(f"serve the model by hand: {shlex.join(['vllm', 'serve', public_base(settings, name)])}")
        if not settings.is_served(name):
            raise ApiError(
                400,
                f"model: expected a model that the vLLM server has, found {name}; use {settings.vllm.base_model}, or a "
                "model that was fine-tuned on it",
                param="model",
                code=NOT_READY,
            )
        return settings.vllm.base_model
    alias = find_alias(session, tenant, name)
    model = alias[1] if alias is not None else find_model(session, tenant, name)
    if settings.vllm is None:
        raise _no_server(
            f"download the adapter from /api/models/{model.id}/adapter, unpack it into a folder named adapter, and "
            f"serve it by hand: {serve_command(service, session, model)}"
        )
    if model.serving != "ready":
        raise _not_ready(model)
    return model.id


def serve_command(service: Service, session: Session, model: ModelRow) -> str:
    """Return the vLLM command that serves the adapter of a model from a folder named ``adapter``."""
    result = session.scalar(select(JobRow.result).where(JobRow.id == model.job))
    rank = (result or {}).get("hyperparameters", {}).get("r")
    allowed = [found for found in VLLM_RANKS if isinstance(rank, int) and found >= rank]
    limit = ["--max-lora-rank", str(allowed[0])] if allowed else []
    base = public_base(service.settings, model.base_model)
    return shlex.join(["vllm", "serve", base, "--enable-lora", *limit, "--lora-modules", f"{model.id}=adapter"])


def _no_server(remedy: str) -> ApiError:
    return ApiError(
        400,
        f"model: expected a service with a vLLM server, found one without (setting vllm); {remedy}",
        param="model",
        code="no_serving",
    )


def _not_ready(model: ModelRow) -> ApiError:
    because = f" ({model.serving_details})" if model.serving_details else ""
    remedy = {
        "failed": "correct the cause; the service tries again automatically",
        "none": "wait until it is registered, or use a model of the base model that the server has",
    }.get(model.serving, "wait until it is registered")
    return ApiError(
        400,
        f"model: expected a model that answers, found {model.id} {_WORDS[model.serving]}{because}; {remedy}: "
        f"/api/models/{model.id} says when it is ready",
        param="model",
        code=NOT_READY,
    )


_WORDS = {"none": "not registered", "pending": "being registered", "failed": "failed"}


_LOG = logging.getLogger("alto.service.vllm")

T = TypeVar("T")

_STREAM = "text/event-stream"
_REQUEST_FAULTS = (400, 413, 422)
"""Statuses by which vLLM refuses a caller's request."""
_CLOSED = 499

router = APIRouter()


@router.post("/chat/completions")
async def chat(request: Request, service: ServiceOf, caller: Talker) -> Response:
    """Return a model's reply to a conversation."""
    return await _pass_on(request, service, caller, "/v1/chat/completions")


@router.post("/completions")
async def complete(request: Request, service: ServiceOf, caller: Talker) -> Response:
    """Return a model's continuation of a text."""
    return await _pass_on(request, service, caller, "/v1/completions")


async def _pass_on(request: Request, service: Service, caller: Caller, path: str) -> Response:
    body = _body_of(await request.body())
    target = await run_in_threadpool(_target, service, caller.tenant, body["model"])
    assert service.settings.vllm is not None, "a target is on a server"
    upstream = Upstream(service.settings.vllm)
    try:
        found = await _while_connected(request, _answered(upstream, path, {**body, "model": target}))
    except UpstreamError as error:
        _LOG.warning("a request could not be forwarded: %s", error)
        raise _bad_gateway(error) from error
    return Response(status_code=_CLOSED) if found is None else found


def _target(service: Service, tenant: str, name: str) -> str:
    with service.store.reading() as session:
        return target_of(service, session, tenant, name)


def _body_of(content: bytes) -> dict[str, Any]:
    try:
        body = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise refused(f"body: expected a JSON object, found invalid JSON ({str(error)[:100]})") from error
    if not isinstance(body, dict):
        raise refused(f"body: expected a JSON object, found a {type(body).__name__}")
    if not isinstance(body.get("model"), str) or not body["model"]:
        raise refused("model: expected the name of a model, found none; list them with client.models.list()", "model")
    return body


async def _answered(upstream: Upstream, path: str, body: dict[str, Any]) -> Response:
    """Return the answer of the vLLM server with its content type, but without its other headers.

    Raises:
        UpstreamError: There is no answer, or it is not the answer of a model.
        ApiError: The server refuses the request, or does not have the model now.
    """
    reply = await upstream.send("POST", path, body)
    is_stream = False
    try:
        if reply.status == 200 and reply.content_type == _STREAM:
            is_stream = True
            return _Stream(reply)
        content = await reply.read()
    finally:
        if not is_stream:
            await reply.close()
    if reply.status == 200 and reply.content_type == "application/json":
        return Response(content, media_type="application/json")
    if reply.status in _REQUEST_FAULTS:
        message = message_of(content) or "expected a request that vLLM accepts, found a request that it refuses"
        raise ApiError(400, message, code="invalid_request")
    if reply.status == 404:
        raise ApiError(
            400,
            "model: expected a model that answers, found that the vLLM server has lost it, perhaps by a restart. It is "
            "registered again automatically; try again soon",
            param="model",
            code=NOT_READY,
        )
    raise UpstreamError(f"expected an answer of a model from the vLLM server, found status {reply.status}; see its log")


class _Stream(StreamingResponse):
    """Server-sent events, forwarded as they arrive. The connection to the server is closed with the caller's."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(_events(reply), media_type=_STREAM, headers={"Cache-Control": "no-cache"})
        self._reply = reply

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._reply.close()


async def _events(reply: Reply) -> AsyncIterator[bytes]:
    try:
        async for piece in reply.pieces():
            yield piece
    except UpstreamError as error:
        # The status is sent already, so clients read the error in the stream.
        _LOG.warning("a streamed answer was interrupted: %s", error)
        yield b"data: " + json.dumps(_bad_gateway(error).body()).encode() + b"\n\n"


def _bad_gateway(error: UpstreamError) -> ApiError:
    is_late = isinstance(error, UpstreamTimeoutError)
    # A retry would make the server compute a long answer once more.
    headers = {"x-should-retry": "false"} if is_late else {}
    return ApiError(502, str(error), code="upstream_timeout" if is_late else "upstream_error", headers=headers)


async def _while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T | None:
    """Return the result of ``work``; if the caller disconnects first, cancel ``work`` and return None."""
    task, gone = asyncio.create_task(work), asyncio.create_task(_wait_for_disconnect(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
