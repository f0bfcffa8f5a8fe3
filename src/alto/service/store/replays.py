"""Repeated requests: a repetition finds the object that the first attempt created; refused requests leave no record.

Clients repeat a request if its answer was lost, or if it was refused for now (429, 503). They mark repetitions with the
header ``x-stainless-retry-count``; some send an ``Idempotency-Key``. The record of a request is written in the same
transaction as the object that it creates. A request without a key is identified by its body alone. So if such a request
is refused at its first attempt, the record of an earlier equal request is forgotten: repetitions of the refused request
must create their own object.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from dataclasses import dataclass, field

from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session

from alto.service.errors import ReusedKeyError
from alto.service.ids import now
from alto.service.store.store import Store
from alto.service.store.tables import ReplayRow

__all__ = ["WINDOW_S", "Refusals", "RequestMark", "forget_old_replays"]

WINDOW_S = 24 * 3600
"""Seconds for which an idempotency key is remembered."""
RETRY_WINDOW_S = 600
"""Seconds after a request within which a repetition without a key is recognised."""
_MOST_REFUSALS = 10_000


class Refusals:
    """Requests whose older records could not be deleted because the database did not answer. Thread-safe."""

    def __init__(self) -> None:
        self._created: OrderedDict[str, str] = OrderedDict()
        self._lock = threading.Lock()

    def add(self, digest: str, created: str) -> None:
        """Hide all records of ``digest`` except the record of ``created``, which may have been committed."""
        with self._lock:
            self._created[digest] = created
            self._created.move_to_end(digest)
            if len(self._created) > _MOST_REFUSALS:
                self._created.popitem(last=False)

    def settle(self, digest: str, created: str) -> None:
        """Show the record of ``created``, which is newer than the hidden ones."""
        with self._lock:
            if digest in self._created:
                self._created[digest] = created

    def hides(self, digest: str, created: str) -> bool:
        """Return whether the record of ``created`` is hidden."""
        with self._lock:
            return self._created.get(digest, created) != created


@dataclass(slots=True, kw_only=True)
class RequestMark:
    """Properties that distinguish a repeated request from a new one.

    Attributes:
        body_hash: SHA-256 of the body, as hexadecimal digits.
        key: Its idempotency key; empty if it has none.
        is_retry: Whether the client says that it repeats a request.
        refusals: Refused requests of the service.
        created: Id of the object that this request creates; empty before :meth:`note`.
    """

    tenant: str
    path: str
    body_hash: str
    key: str = ""
    is_retry: bool = False
    refusals: Refusals = field(default_factory=Refusals)
    created: str = ""

    @property
    def digest(self) -> str:
        """A hash that is the same for a request and its repetitions."""
        own = f"key\0{self.key}" if self.key else f"body\0{self.body_hash}"
        return hashlib.sha256(f"{self.tenant}\0{self.path}\0{own}".encode()).hexdigest()

    def find(self, session: Session) -> str | None:
        """Return the id of the object that the request has created before; None if the request is new.

        Raises:
            ReusedKeyError: The key was used for another request.
        """
        if session.get_bind().dialect.name == "postgresql":
            # An equal request that comes before the end of this transaction waits until then.
            session.execute(select(func.pg_advisory_xact_lock(int(self.digest[:15], 16))))
        if not (self.key or self.is_retry):
            return None
        found = session.get(ReplayRow, self.digest, with_for_update=True)
        if found is None or found.created_at < now() - (WINDOW_S if self.key else RETRY_WINDOW_S):
            return None
        if self.refusals.hides(self.digest, found.id):
            return None
        if found.body_hash != self.body_hash:
            raise ReusedKeyError(
                "expected a unique key for every request, found a key that was used with a different body; send a new "
                "key"
            )
        return found.id

    def note(self, session: Session, kind: str, created: str) -> None:
        """Record the object that the request creates."""
        self.created = created
        self.refusals.settle(self.digest, created)
        session.merge(ReplayRow(digest=self.digest, body_hash=self.body_hash, kind=kind, id=created, created_at=now()))

    def forget_older(self, store: Store, *, has_database: bool) -> None:
        """Forget the object of an earlier equal request, because this one was refused. Repetitions and requests with a
        key forget nothing.

        Args:
            has_database: Whether the database answers. If not, only this process remembers to hide the record.

        Raises:
            SQLAlchemyError: The database cannot be used.
            SQLAlchemyError: The database cannot be used.
        """
        if self.key or self.is_retry:
            return
        if not has_database:
            self.refusals.add(self.digest, self.created)
            return
        with store.reading() as session:
            found = session.get(ReplayRow, self.digest)
        if found is not None and found.id != self.created:
            with store.writing() as session:
                session.execute(delete(ReplayRow).where(ReplayRow.digest == self.digest, ReplayRow.id == found.id))


def forget_old_replays(session: Session) -> None:
    """Delete the records that are too old to count."""
    session.execute(delete(ReplayRow).where(ReplayRow.created_at < now() - WINDOW_S))
