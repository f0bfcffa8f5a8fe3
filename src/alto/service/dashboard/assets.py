"""Scripts and styles of the pages. Their addresses contain a hash of the content, so browsers can keep them."""

from __future__ import annotations

import functools
import gzip
import hashlib
from dataclasses import dataclass
from importlib.resources import files

from fastapi import APIRouter, Request
from starlette.responses import Response

from alto.export import page_environment, plotly_bundle
from alto.service.errors import not_found

__all__ = ["asset_url", "router"]

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
