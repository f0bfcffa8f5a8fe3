"""Detection of repeated requests, and what is forgotten when a request is refused."""

from __future__ import annotations

import contextlib
import hashlib
import json

from fastapi import Request
from sqlalchemy.exc import SQLAlchemyError

from alto.service.context import service_of
from alto.service.store.replays import RequestMark

__all__ = ["forget_older", "hash_of_json", "mark_of"]


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
