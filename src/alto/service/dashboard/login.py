"""``/login`` and ``/logout``: the browser keeps a key of the service where no script can read it."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Form, Query, Request
from fastapi.responses import HTMLResponse, RedirectResponse
from starlette.responses import Response

from alto.service.access import caller_of
from alto.service.context import ServiceOf
from alto.service.dashboard.rendering import PageRoute, local_path, page
from alto.service.web.access import COOKIE, check_origin

_MOST_CHARS = 512

router = APIRouter(route_class=PageRoute)


@router.get("/login")
def form(request: Request, next_: Annotated[str, Query(alias="next", max_length=2000)] = "/") -> HTMLResponse:
    """Return the login form."""
    return page(request, "login.html.jinja", next=local_path(next_), fault="")


@router.post("/login")
def login(
    request: Request,
    service: ServiceOf,
    key: Annotated[str, Form(max_length=_MOST_CHARS)] = "",
    next_: Annotated[str, Form(alias="next", max_length=2000)] = "/",
) -> Response:
    """Store a valid key in a cookie, and redirect to the page that asked for it."""
    check_origin(request)
    secret, to = key.strip(), local_path(next_)
    with service.store.reading() as session:
        found = caller_of(session, secret)
    if found is None:
        fault = "This key is unknown, expired or revoked. Ask the operator of the service for a new key."
        return page(request, "login.html.jinja", status=401, next=to, fault=fault)
    answer = RedirectResponse(to, status_code=303)
    answer.set_cookie(COOKIE, secret, path="/", httponly=True, samesite="strict", secure=request.url.scheme == "https")
    return answer


@router.post("/logout")
def logout(request: Request) -> Response:
    """Delete the key's cookie."""
    check_origin(request)
    answer = RedirectResponse("/login", status_code=303)
    answer.delete_cookie(COOKIE, path="/", httponly=True, samesite="strict", secure=request.url.scheme == "https")
    return answer
