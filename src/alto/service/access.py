"""Access control: bearer keys, the tenants that they belong to, and limits on requests."""

from __future__ import annotations

import hashlib
import math
import re
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import or_, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from alto.errors import ServiceError
from alto.service.errors import TooManyRequestsError
from alto.service.ids import new_id, now
from alto.service.store.tables import KeyRow, Tenant

SCOPES = ("read", "write", "chat")
"""``read`` sees files, jobs and models; ``write`` creates, changes and deletes them; ``chat`` talks to models."""

DEFAULT_TENANT = "default"

_PREFIX = "alto-"
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """The tenant and the permissions of a request.

    Attributes:
        key: Id of the key; empty if the service needs none.
        requests_per_s: The tenant's own limit; None if it has none.
    """

    tenant: str
    scopes: frozenset[str]
    key: str = ""
    requests_per_s: float | None = None


def create_tenant(session: Session, name: str, limits: Mapping[str, Any] | None = None) -> Tenant:
    """Return the tenant ``name``, creating it if necessary; ``limits`` replace its current limits.

    Raises:
        ServiceError: The name is invalid.
    """
    if _NAME.fullmatch(name) is None:
        raise ServiceError(
            f"tenant: expected at most 64 lower-case letters, digits, '-' and '_', the first a letter or digit, found "
            f"{name[:80]!r}; choose another name"
        )
    tenant = session.get(Tenant, name)
    if tenant is None:
        tenant = Tenant(name=name, created_at=now(), shares_executors=False)
        try:
            with session.begin_nested():
                session.add(tenant)
        except IntegrityError:  # made by another process meanwhile
            found = session.get(Tenant, name, populate_existing=True)
            assert found is not None
            tenant = found
    for key, value in (limits or {}).items():
        setattr(tenant, key, value)
    return tenant


def create_key(
    session: Session, tenant: str, *, name: str = "", scopes: Collection[str] = SCOPES, expires_at: int | None = None
) -> tuple[KeyRow, str]:
    """Create a key for a tenant. Return its row and its secret, which is not stored and cannot be shown again.

    Raises:
        ServiceError: The tenant's name or a scope is invalid.
    """
    unknown = sorted(set(scopes).difference(SCOPES))
    if unknown or not scopes:
        raise ServiceError(
            f"scopes: expected one or more of {', '.join(SCOPES)}, found {', '.join(unknown) or 'none'}; correct them"
        )
    create_tenant(session, tenant)
    secret = _PREFIX + secrets.token_urlsafe(32)
    row = KeyRow(
        id=new_id("key"),
        tenant=tenant,
        name=name[:100],
        secret_hash=_hash(secret),
        scopes=[scope for scope in SCOPES if scope in scopes],
        created_at=now(),
        expires_at=expires_at,
    )
    session.add(row)
    return row, secret


def list_keys(session: Session, tenant: str | None = None) -> list[KeyRow]:
    """Return all keys, or only the keys of a tenant, oldest first."""
    statement = select(KeyRow).order_by(KeyRow.created_at, KeyRow.id)
    return list(session.scalars(statement if tenant is None else statement.where(KeyRow.tenant == tenant)))


def limits_of_tenants(session: Session) -> dict[str, dict[str, float | None]]:
    """Return the own limits of all tenants by their names; None where the settings of the service hold."""
    names = ("max_gpus", "max_tasks", "max_bytes", "requests_per_s")
    return {row.name: {name: getattr(row, name) for name in names} for row in session.scalars(select(Tenant))}


def revoke_key(session: Session, key: str) -> KeyRow:
    """Revoke a key.

    Raises:
        ServiceError: There is no such key.
    """
    row = session.get(KeyRow, key)
    if row is None:
        raise ServiceError(f"key: expected the id of a key, found {key[:80]!r}; list them with: alto keys list")
    row.revoked_at = row.revoked_at or now()
    return row


def has_keys(session: Session) -> bool:
    """Return whether requests need keys because one was ever created. Revoked and expired keys count, so that the
    service does not become open when the last key ends."""
    return session.scalar(select(KeyRow.id).limit(1)) is not None


def caller_of(session: Session, secret: str) -> Caller | None:
    """Return the caller that owns the key ``secret``; None if the key is unknown, expired or revoked."""
    at = now()
    found = session.execute(
        select(KeyRow, Tenant)
        .join(Tenant, Tenant.name == KeyRow.tenant)
        .where(
            KeyRow.secret_hash == _hash(secret),
            KeyRow.revoked_at.is_(None),
            or_(KeyRow.expires_at.is_(None), KeyRow.expires_at > at),
        )
    ).first()
    if found is None:
        return None
    key, tenant = found
    return Caller(tenant=tenant.name, scopes=frozenset(key.scopes), key=key.id, requests_per_s=tenant.requests_per_s)


def _hash(secret: str) -> str:
    # Secrets are 256 random bits, so a slow hash, which protects passwords, is not needed.
    return hashlib.sha256(secret.encode()).hexdigest()


_BURST_S = 5.0
_MOST_BUCKETS = 10_000


class RateLimiter:
    """A token bucket for each tenant. It fills at the tenant's rate and holds up to five seconds' worth of tokens.

    Args:
        clock: Monotonic clock, in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()
        self._lock = threading.Lock()

    def take(self, name: str, requests_per_s: float | None) -> None:
        """Take a token from the bucket ``name``; a rate of None means unlimited.

        Raises:
            TooManyRequestsError: The bucket is empty; the error says when to try again.
        """
        if requests_per_s is None:
            return
        now, most = self._clock(), max(1.0, _BURST_S * requests_per_s)
        with self._lock:
            tokens, since = self._buckets.pop(name, (most, now))
            tokens = min(most, tokens + (now - since) * requests_per_s)
            has_one = tokens >= 1.0
            self._buckets[name] = (tokens - has_one, now)
            if len(self._buckets) > _MOST_BUCKETS:
                self._buckets.popitem(last=False)
        if not has_one:
            wait_s = min(60, max(1, math.ceil((1.0 - tokens) / requests_per_s)))
            raise TooManyRequestsError(
                f"expected at most {requests_per_s:g} requests a second, found more; try again in {wait_s} s",
                wait_s=wait_s,
            )
