"""Repeated requests: what was created once is found again.

Clients repeat a request whose answer was lost, and say so by the header ``x-stainless-retry-count``; some send an
``Idempotency-Key``. The record of a request is written with what it creates, in one transaction.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session

from alto.service.errors import ReusedKeyError
from alto.service.ids import now
from alto.service.store.tables import ReplayRow

__all__ = ["WINDOW_S", "RequestMark", "forget_old_replays"]

WINDOW_S = 24 * 3600
"""How long an idempotency key is remembered."""
RETRY_WINDOW_S = 600
"""How long after a request its repetition without a key may come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestMark:
    """What tells a repeated request from a new one.

    Attributes:
        tenant, path: Whose request it is, and to what.
        body_hash: SHA-256 of the body, as hexadecimal digits.
        key: Its idempotency key; empty where it has none.
        is_retry: Whether the client says that it repeats a request.
    """

    tenant: str
    path: str
    body_hash: str
    key: str = ""
    is_retry: bool = False

    @property
    def digest(self) -> str:
        """Equal for a request and its repetitions."""
        own = f"key\0{self.key}" if self.key else f"body\0{self.body_hash}"
        return hashlib.sha256(f"{self.tenant}\0{self.path}\0{own}".encode()).hexdigest()

    def find(self, session: Session) -> str | None:
        """Id of what the request has created before; None where it is a new one.

        Raises:
            ReusedKeyError: The key was used for another request.
        """
        if session.get_bind().dialect.name == "postgresql":
            # An equal request that comes before the end of this transaction waits for it.
            session.execute(select(func.pg_advisory_xact_lock(int(self.digest[:15], 16))))
        if not (self.key or self.is_retry):
            return None
        found = session.get(ReplayRow, self.digest, with_for_update=True)
        if found is None or found.created_at < now() - (WINDOW_S if self.key else RETRY_WINDOW_S):
            return None
        if found.body_hash != self.body_hash:
            raise ReusedKeyError(
                "expected one of its own for every request, found one that was used for another body; send a new key"
            )
        return found.id

    def note(self, session: Session, kind: str, created: str) -> None:
        """Note what the request creates."""
        session.merge(ReplayRow(digest=self.digest, body_hash=self.body_hash, kind=kind, id=created, created_at=now()))


def forget_old_replays(session: Session) -> None:
    """Remove the records that are too old to count."""
    session.execute(delete(ReplayRow).where(ReplayRow.created_at < now() - WINDOW_S))
