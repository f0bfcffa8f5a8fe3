"""Error responses in one form, and an id for each request."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import re
import secrets
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from sqlalchemy.exc import InterfaceError, OperationalError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from alto.errors import AltoError, RunWriteError
from alto.service.context import service_of
from alto.service.errors import (
    ApiError,
    JobStateError,
    ReusedKeyError,
    TenantError,
    TooManyRequestsError,
    UnknownJobError,
    not_found,
    refused,
)
from alto.service.store.store import RequestMark

_BOUNDS_S = (0.01, 0.05, 0.1, 0.5, 1.0, 5.0)


class RequestCounts:
    """Counts of requests since this process started. Thread-safe."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str, int]] = Counter()
        self._within: defaultdict[float, int] = defaultdict(int)
        self._sum_s = 0.0
        self._lock = threading.Lock()

    def add(self, method: str, route: str, status: int, duration_s: float) -> None:
        """Count a request."""
        with self._lock:
            self._counts[method, route, status] += 1
            self._sum_s += duration_s
            for bound in _BOUNDS_S:
                self._within[bound] += duration_s <= bound

    def lines(self) -> list[str]:
        """Return the counts in Prometheus' text format."""
        with self._lock:
            counts, within, sum_s = dict(self._counts), dict(self._within), self._sum_s
        total = sum(counts.values())
        name = "alto_request_duration_seconds"
        return [
            "# HELP alto_requests_total Requests by route and status.",
            "# TYPE alto_requests_total counter",
            *(
                f'alto_requests_total{{method="{method}",route="{route}",status="{status}"}} {count}'
                for (method, route, status), count in sorted(counts.items())
            ),
            f"# HELP {name} Durations of requests; a stream counts until its end, not until its first byte.",
            f"# TYPE {name} histogram",
            *(f'{name}_bucket{{le="{bound:g}"}} {within.get(bound, 0)}' for bound in _BOUNDS_S),
            f'{name}_bucket{{le="+Inf"}} {total}',
            f"{name}_sum {sum_s:.6f}",
            f"{name}_count {total}",
        ]


WITHOUT_KEY: dict[str, Any] = {"security": []}
"""Extra OpenAPI fields of an operation that needs no key."""

_SCHEME = "key"


def describe_keys(app: FastAPI) -> None:
    """Declare in the OpenAPI document of ``app`` that requests have a key in their headers."""
    openapi = app.openapi

    def described() -> dict[str, Any]:
        document = openapi()
        schemes = document.setdefault("components", {}).setdefault("securitySchemes", {})
        schemes[_SCHEME] = {
            "type": "http",
            "scheme": "bearer",
            "description": "A key of a tenant, created with: alto keys create. While a service has no keys, it needs "
            "none, and answers only requests from its own machine.",
        }
        document["security"] = [{_SCHEME: []}]
        return document

    app.openapi = described  # type: ignore[method-assign]


def mark_of(request: Request, tenant: str, body_hash: str) -> RequestMark:
    """Return the mark by which repetitions of ``request`` are recognised; also store it for :func:`forget_older`."""
    count = request.headers.get("x-stainless-retry-count", "")
    if priority := request.headers.get("alto-priority"):  # the same body with another priority asks for another job
        body_hash = hashlib.sha256(f"{body_hash} {priority}".encode()).hexdigest()
    mark = RequestMark(
        tenant=tenant,
        path=request.url.path,
        body_hash=body_hash,
        key=request.headers.get("idempotency-key", "")[:255],
        is_retry=count.isdecimal() and count.strip("0") != "",
        refusals=service_of(request).refusals,
    )
    request.state.mark = mark
    return mark


def hash_of_json(body: bytes) -> str:
    """Return the SHA-256 of the JSON value in ``body``, independent of its formatting; of its bytes if not JSON."""
    with contextlib.suppress(ValueError, RecursionError):
        body = json.dumps(json.loads(body), sort_keys=True).encode()
    return hashlib.sha256(body).hexdigest()


def forget_older(request: Request, *, has_database: bool) -> None:
    """Forget the object of an earlier request equal to ``request``, which is refused: repetitions must not find it."""
    mark: RequestMark | None = getattr(request.state, "mark", None)
    if mark is None:
        return
    store = service_of(request).store
    try:
        mark.forget_older(store, has_database=has_database)
    except SQLAlchemyError:
        mark.forget_older(store, has_database=False)


_LOG = logging.getLogger("alto.service.requests")
_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_MOST_WHERE_CHARS = 200
_SECURITY = (
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"same-origin"),
)


class _Error(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    """The body of every error response."""

    error: _Error


ERROR_ANSWERS: Mapping[int | str, dict[str, Any]] = {
    status: {"model": ErrorAnswer, "description": description}
    for status, description in (
        (400, "The request cannot be carried out as it is."),
        (401, "The key is missing, unknown, expired or revoked."),
        (403, "The key does not have the required scope, or the request comes from a page of a different site."),
        (404, "The tenant has no such object."),
        (413, "The body is too long."),
        (429, "There are too many requests, tasks or bytes; Retry-After is the number of seconds to wait."),
        ("default", "The service failed, or is not ready."),
    )
}
"""Error responses of every operation, for the OpenAPI document."""


class RequestIds:
    """Middleware that gives every request an id, in its response and in the log, and counts it. The log holds no query,
    body or key."""

    def __init__(self, app: ASGIApp, *, counts: RequestCounts) -> None:
        self._app = app
        self._counts = counts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
        name = given if _ID.fullmatch(given) else f"req_{secrets.token_hex(12)}"
        scope.setdefault("state", {})["request_id"] = name
        began, status = time.monotonic(), 0

        async def named_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message["headers"], *_headers_of(name)]}
            await send(message)

        try:
            await self._app(scope, receive, named_send)
        except Exception:
            status = status or 500  # an error handler outside of this middleware answers it
            raise
        finally:
            route = _label_of(scope)
            duration_s = time.monotonic() - began
            # A client may send any word as the method: unknown methods and unknown routes are counted as "any".
            is_known = route != "unknown" and scope["method"] in _METHODS
            self._counts.add(scope["method"] if is_known else "any", route, status, duration_s)
            _LOG.info(
                "request",
                extra={
                    "request_id": name,
                    "method": scope["method"],
                    "route": route,
                    "status": status,
                    "duration_s": round(duration_s, 4),
                    "tenant": scope.get("state", {}).get("tenant"),
                },
            )


def _label_of(scope: Scope) -> str:
    """Return the route of a request, with parameter names instead of ids."""
    path = getattr(scope.get("route"), "path", None)
    if path is None:
        return "unknown"
    prefix = "/" + scope["path"].split("/", 2)[1]
    path = str(path)
    return path if path.startswith(prefix) or prefix not in ("/v1", "/api") else prefix + path


def add_error_answers(app: FastAPI, error_page: Callable[[Request, ApiError], Response]) -> None:
    """Answer every error of ``app`` in OpenAI's form, or with ``error_page`` if a browser asks for a page."""
    app.state.error_page = error_page
    app.add_exception_handler(ApiError, _answering(lambda error: error))
    app.add_exception_handler(TenantError, _answering(api_error_of))
    app.add_exception_handler(RequestValidationError, _answering(_of_invalid))
    app.add_exception_handler(HTTPException, _answering(_of_http_error))
    app.add_exception_handler(AltoError, _answering(lambda error: ApiError(400, str(error), code="invalid_value")))
    for of_database in (OperationalError, InterfaceError, PoolTimeoutError):
        app.add_exception_handler(of_database, _on_database_error)
    for of_storage in (OSError, RunWriteError):
        app.add_exception_handler(of_storage, _on_storage_error)
    app.add_exception_handler(Exception, _on_error)


def _answer(request: Request, error: ApiError, *, has_database: bool = True) -> Response:
    forget_older(request, has_database=has_database)
    if "text/html" in request.headers.get("accept", ""):
        found: Response = request.app.state.error_page(request, error)
        return found
    return JSONResponse(error.body(), status_code=error.status, headers=error.headers)


def _answering(api_error: Callable[[Any], ApiError]) -> Callable[[Request, Exception], Response]:
    """Return the handler of errors that are answered with the result of ``api_error``."""
    return lambda request, error: _answer(request, api_error(error))


def api_error_of(error: TenantError) -> ApiError:
    """Return the HTTP error for a request that failed with ``error``."""
    match error:
        case UnknownJobError():
            return not_found("fine-tuning job", error.job, error.param)
        case JobStateError():
            return refused(f"fine_tuning_job_id: {error}", "fine_tuning_job_id", "invalid_state")
        case ReusedKeyError():
            return refused(f"Idempotency-Key: {error}", "Idempotency-Key", "idempotency_key_reused")
        case TooManyRequestsError():
            return ApiError(429, str(error), code="rate_limit_exceeded", headers={"Retry-After": str(error.wait_s)})
        case _:
            return refused(str(error))


def _of_invalid(error: RequestValidationError) -> ApiError:
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"] if part not in ("body", "query", "path", "header"))
    where = where[:_MOST_WHERE_CHARS]
    return ApiError(400, f"{where or 'body'}: {first['msg']}", param=where or None, code="invalid_value")


def _of_http_error(error: HTTPException) -> ApiError:
    code = {404: "unknown_url", 405: "method_not_allowed"}.get(error.status_code)
    return ApiError(error.status_code, str(error.detail), code=code, headers=error.headers)


def _on_database_error(request: Request, error: Exception) -> Response:
    _LOG.error("the database refused a transaction", extra={"request_id": _id_of(request)}, exc_info=error)
    return _answer(
        request,
        ApiError(
            503,
            "expected a database that can be written, found one that is busy, full or gone; nothing was changed, try "
            "again",
            code="database_unavailable",
            headers={"Retry-After": "2"},
        ),
        has_database=False,
    )


def _on_storage_error(request: Request, error: Exception) -> Response:
    _LOG.error("a disk or the store of artefacts failed", extra={"request_id": _id_of(request)}, exc_info=error)
    return _answer(
        request,
        ApiError(
            503,
            "expected files that can be read and written, found a disk or a store of artefacts that is full or gone; "
            "try again",
            code="storage_unavailable",
            headers={"Retry-After": "10"},
        ),
    )


def _on_error(request: Request, error: Exception) -> Response:
    _LOG.error("a request failed", extra={"request_id": _id_of(request)}, exc_info=error)
    message = f"the service failed to answer request {_id_of(request)}; see its log for the cause"
    # This response is sent outside of `RequestIds`, which would add these headers.
    headers = {key.decode(): value.decode() for key, value in _headers_of(_id_of(request))}
    headers["connection"] = "close"  # because the server closes it after an exception
    return _answer(request, ApiError(500, message, code="internal_error", headers=headers))


def _headers_of(name: str) -> list[tuple[bytes, bytes]]:
    """Return the headers that are added to the response of the request ``name``."""
    return [(b"x-request-id", name.encode()), *_SECURITY]


def _id_of(request: Request) -> str:
    return str(getattr(request.state, "request_id", ""))
