"""Rendering of pages and error pages from templates, and updates of open pages."""

from __future__ import annotations

import functools
import gzip
import hashlib
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.resources import files
from typing import Any
from urllib.parse import quote, urlsplit

from fastapi import APIRouter, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, RedirectResponse
from fastapi.routing import APIRoute
from jinja2 import Environment
from starlette.responses import Response

from alto.errors import AltoError
from alto.report import page_environment, plotly_bundle
from alto.service.access import Caller
from alto.service.errors import ApiError, TenantError, not_found
from alto.service.web.access import COOKIE
from alto.service.web.answers import api_error_of

_NAMES = ("plotly.js", "report.js", "gantt.js", "page.js", "dashboard.js", "report.css", "dashboard.css")
_OWN = ("dashboard.js", "dashboard.css")
_TYPES = {"js": "text/javascript; charset=utf-8", "css": "text/css; charset=utf-8"}

router = APIRouter(prefix="/dashboard/assets")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asset:
    content: bytes
    compressed: bytes
    digest: str


@router.head("/{digest}/{name}")
@router.get("/{digest}/{name}")
def get(request: Request, digest: str, name: str) -> Response:
    """Return a script or a style sheet."""
    if name not in _NAMES:
        raise not_found("asset", name, "name")
    asset = _asset(name)
    # While servers are updated, a page of another server version must not keep this version's file.
    keep = "public, max-age=31536000, immutable" if digest == asset.digest else "no-store"
    headers = {"Cache-Control": keep, "Vary": "Accept-Encoding"}
    content = asset.content
    if "gzip" in request.headers.get("accept-encoding", ""):
        content, headers["Content-Encoding"] = asset.compressed, "gzip"
    return Response(content, media_type=_TYPES[name.rpartition(".")[2]], headers=headers)


def asset_url(name: str) -> str:
    """Return the address of a script or style sheet for pages."""
    return f"/dashboard/assets/{_asset(name).digest}/{name}"


@functools.cache
def _asset(name: str) -> _Asset:
    if name == "plotly.js":
        text = plotly_bundle()
    elif name in _OWN:
        text = files("alto.service.dashboard").joinpath("static", name).read_text(encoding="utf-8")
    else:
        text = page_environment().get_template(name).render()
    content = text.encode()
    return _Asset(
        content=content, compressed=gzip.compress(content, 6, mtime=0), digest=hashlib.sha256(content).hexdigest()[:16]
    )


_HEADERS = {
    # plotly.js positions its drawings with style attributes. Scripts are files of this server; none is inline.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
        "connect-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
    ),
    "Cache-Control": "no-store",
}


_MOST_ID_CHARS = 8


def page(
    request: Request, template: str, caller: Caller | None = None, *, status: int = 200, **context: Any
) -> HTMLResponse:
    """Return a page rendered from a template of this package.

    Args:
        caller: The viewer; None if not known, as on the login page.
    """
    text = (
        _environment()
        .get_template(template)
        .render(
            **context,
            caller=caller,
            has_session=COOKIE in request.cookies,
            path=request.url.path,
        )
    )
    return HTMLResponse(text, status_code=status, headers=_HEADERS)


def live_answer(seen: str, fragments: Iterable[str], *, data: dict[str, Any], **context: Any) -> Response:
    """Return what an open page shows now: its changing parts, rendered, and data for its script.

    Args:
        seen: Version that the page shows; if it is still current, the answer is empty.
        fragments: Names of the parts, which are files of ``templates/live``.
        data: Figures and other values for the script.
    """
    rendered = {
        name: _environment().get_template(f"live/{name}.html.jinja").render(**context).strip() for name in fragments
    }
    answer = JSONResponse({**data, "fragments": rendered})
    version = hashlib.sha256(answer.body).hexdigest()[:16]
    headers = {"Cache-Control": "no-store", "X-Version": version}
    if version == seen:
        return Response(status_code=204, headers=headers)
    answer.headers.update(headers)
    return answer


class PageRoute(APIRoute):
    """A route to a page. Errors are answered with pages, callers without a key are sent to the login, and HEAD is
    answered like GET, without the page."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **settings: Any) -> None:
        super().__init__(path, endpoint, **settings)
        if self.methods is not None and "GET" in self.methods:
            self.methods.add("HEAD")

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler, which shows errors as pages."""
        answer = super().get_route_handler()

        async def shown(request: Request) -> Response:
            try:
                return await answer(request)
            except ApiError as error:
                return error_page(request, error)
            except TenantError as error:
                return error_page(request, api_error_of(error))
            except RequestValidationError as error:
                first = error.errors()[0]
                return error_page(request, ApiError(400, f"{first['loc'][-1]}: {first['msg']}"))
            except AltoError as error:
                return error_page(request, ApiError(500, str(error)))

        return shown


def error_page(request: Request, error: ApiError) -> Response:
    """Return the page of an error, or a redirect to the login if a key is missing."""
    if error.status == 401 and request.method in ("GET", "HEAD"):
        return _to_login(request)
    found = page(request, "error.html.jinja", status=error.status, error_status=error.status, message=error.message)
    found.headers.update(error.headers)
    return found


def local_path(path: str) -> str:
    """Return ``path`` if it belongs to this server, else the first page: a login link must not lead to another site."""
    split = urlsplit(path)
    is_local = path.startswith("/") and not path.startswith("//") and not (split.scheme or split.netloc)
    return path if is_local and path.isprintable() and "\\" not in path else "/"


def _to_login(request: Request) -> Response:
    path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
    return RedirectResponse(
        f"/login?next={quote(path, safe='')}", status_code=303, headers={"Cache-Control": "no-store"}
    )


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, tz=UTC).strftime("%d %b %Y, %H:%M UTC")


def _short_id(name: str) -> str:
    """Return the first characters of a long id, for a table; the link and its title have the whole id."""
    kind, dash, rest = name.partition("-")
    return name if len(rest) <= _MOST_ID_CHARS else f"{kind}{dash}{rest[:_MOST_ID_CHARS]}…"


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, tz=UTC).isoformat()


@functools.cache
def _environment() -> Environment:
    environment = page_environment("alto.service.dashboard")
    environment.globals["asset_url"] = asset_url
    environment.filters |= {"time": _time, "iso": _iso, "short_id": _short_id}
    return environment
