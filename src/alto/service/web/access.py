"""Callers of requests, and what they may do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated
from urllib.parse import urlsplit

from fastapi import Depends, Request

from alto.service.access import DEFAULT_TENANT, SCOPES, Caller, caller_of, has_keys
from alto.service.context import service_of
from alto.service.errors import ApiError, TooManyRequestsError
from alto.service.web.answers import api_error_of

COOKIE = "alto_key"
"""Name of the cookie that holds a browser's key; set by the dashboard."""

_SAFE = ("GET", "HEAD", "OPTIONS")
_LOCAL = ("localhost", "127.0.0.1", "::1")


def caller(request: Request) -> Caller:
    """Return the caller of a request.

    Raises:
        ApiError: The request has no valid key, comes from a page of another site, or exceeds the rate limit.
    """
    known: Caller | None = getattr(request.state, "caller", None)
    if known is not None:  # determined before the body was read
        return known
    service = service_of(request)
    secret = _secret_of(request)
    with service.store.reading() as session:
        found = None if secret is None else caller_of(session, secret)
        if found is None:
            if not service.settings.is_loopback or has_keys(session):
                raise _unauthorised(secret)
            _check_local(request)
            found = Caller(tenant=DEFAULT_TENANT, scopes=frozenset(SCOPES))
    check_origin(request)
    request.state.tenant = found.tenant
    limit = found.requests_per_s
    try:
        service.rates.take(found.tenant, service.settings.requests_per_s if limit is None else limit)
    except TooManyRequestsError as error:
        raise api_error_of(error) from error
    request.state.caller = found
    return found


def _needs(scope: str) -> Callable[[Caller], Caller]:
    def allowed(found: Annotated[Caller, Depends(caller)]) -> Caller:
        if scope not in found.scopes:
            raise ApiError(
                403,
                f"expected a key with the scope {scope!r}, found one with {', '.join(sorted(found.scopes))}; use "
                "another key",
                code="insufficient_scope",
            )
        return found

    return allowed


Reader = Annotated[Caller, Depends(_needs("read"))]
Writer = Annotated[Caller, Depends(_needs("write"))]
Talker = Annotated[Caller, Depends(_needs("chat"))]


def _secret_of(request: Request) -> str | None:
    kind, _, secret = request.headers.get("authorization", "").partition(" ")
    if kind.lower() == "bearer" and secret.strip():
        return secret.strip()
    return request.cookies.get(COOKIE)


def _unauthorised(secret: str | None) -> ApiError:
    found = "none" if secret is None else "one that is unknown, expired or revoked"
    return ApiError(
        401,
        f"expected a key of this service in the header 'Authorization: Bearer …', found {found}; ask the operator of "
        "the service, who makes keys with: alto keys create",
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )


def _check_local(request: Request) -> None:
    """Check that a request without a key names this machine as its host: a page of another site could point its own
    name to this machine's address."""
    host = request.headers.get("host", "")
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:  # brackets without an address in them
        name = host
    if name not in _LOCAL:
        raise ApiError(
            403,
            f"Host: expected localhost while the service needs no key, found {name[:100]!r}; use localhost, or "
            "create keys with: alto keys create",
            code="unknown_host",
        )


def check_origin(request: Request) -> None:
    """Refuse requests from pages of other sites, which must not act for the user of this browser."""
    origin = request.headers.get("origin")
    if origin is None or request.method in _SAFE:
        return
    # Compared as text, because browsers write an origin in only one form.
    if origin.partition("://")[2] != request.headers.get("host", ""):
        raise ApiError(403, f"Origin: expected a page of this service, found {origin[:100]!r}", code="foreign_origin")
