"""The service's database: opening, migrations and transactions."""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Engine, create_engine, delete, event, func, make_url, select, text
from sqlalchemy.engine import URL, Connection
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from alto.base import first_line
from alto.errors import ServiceError
from alto.service.errors import ReusedKeyError
from alto.service.ids import now
from alto.service.store.tables import ReplayRow

MIGRATIONS = Path(__file__).parent / "migrations"
BUSY_S = 30.0
"""Longest wait for another writer of an SQLite file."""
STALLED_S = 30.0
"""Seconds of inactivity after which PostgreSQL aborts a transaction. Otherwise, if the leader hangs or its machine is
lost, the leader's row would stay locked, and no other server could lead."""

_WRITES = "alto_writes"
_COMMON: Mapping[str, Any] = {"hide_parameters": True}
"""Engine options. Database errors are logged, and must not contain what users sent."""


class Store:
    """Transactions on the service's database. Thread-safe.

    Args:
        url: SQLAlchemy address: ``sqlite:///FILE`` or ``postgresql+psycopg://…``.
    """

    def __init__(self, url: str) -> None:
        self.url = _checked(url)
        self._engine = _engine(self.url)
        self._writing = self._engine.execution_options(**{_WRITES: True})
        self.is_new = False
        """Whether :meth:`migrate` found an empty database."""

    @property
    def is_sqlite(self) -> bool:
        """Whether the database is an SQLite file, which allows one writer at a time."""
        return self.url.get_backend_name() == "sqlite"

    @property
    def place(self) -> str:
        """The database's file, or its address without the password."""
        return str(self.url.database) if self.is_sqlite else self.url.render_as_string(hide_password=True)

    def migrate(self) -> None:
        """Upgrade the tables of any older version to this version.

        Raises:
            ServiceError: The database cannot be reached, or was written by a newer version.
        """
        config = Config()
        config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
        script = ScriptDirectory.from_config(config)
        try:
            with self._writing.begin() as connection:
                found = MigrationContext.configure(connection).get_current_revision()
                if found is not None and found not in {each.revision for each in script.walk_revisions()}:
                    raise ServiceError(
                        f"database: expected revision {script.get_current_head()} or older, found {found}, "
                        "which a newer version of ALTO has written; upgrade ALTO, or restore a backup"
                    )
                self.is_new = found is None
                config.attributes["connection"] = connection
                command.upgrade(config, "head")
        except SQLAlchemyError as error:
            cause = first_line(getattr(error, "orig", None) or error)
            raise ServiceError(
                f"database: cannot connect to or write to {self.place}: {cause}. Check the URL and that the database "
                "server is running"
            ) from error

    @contextlib.contextmanager
    def reading(self) -> Iterator[Session]:
        """Yield a transaction that only reads."""
        with Session(self._engine, expire_on_commit=False) as session:
            yield session

    @contextlib.contextmanager
    def writing(self) -> Iterator[Session]:
        """Yield a transaction that is committed at the end of the block, or rolled back if the block fails."""
        with Session(self._writing, expire_on_commit=False) as session, session.begin():
            yield session

    def close(self) -> None:
        """Close all connections."""
        self._engine.dispose()


def database_time(session: Session) -> float:
    """Return the current time of the database's clock, in unix seconds; all servers share this clock."""
    # The time of this call: `now()` is when the transaction began, which may have waited for a lock since.
    clocks = {
        "postgresql": "SELECT CAST(extract(epoch FROM clock_timestamp()) AS double precision)",
        "sqlite": "SELECT (julianday('now') - 2440587.5) * 86400.0",
    }
    return float(session.execute(text(clocks[session.get_bind().dialect.name])).scalar_one())


def _checked(url: str) -> URL:
    try:
        found = make_url(url)
        name = found.get_backend_name()
    except (SQLAlchemyError, ValueError):
        name = ""
    if name not in ("sqlite", "postgresql"):
        raise ServiceError(
            "database: expected sqlite:///FILE or postgresql+psycopg://USER:PASSWORD@HOST/NAME, found a different "
            "address; correct it"
        )
    return found


def _engine(url: URL) -> Engine:
    if url.get_backend_name() != "sqlite":
        engine = create_engine(url, pool_pre_ping=True, pool_size=20, max_overflow=20, **_COMMON)
        event.listen(engine, "connect", _on_connect_to_server)
        return engine
    engine = create_engine(
        url, connect_args={"timeout": BUSY_S, "check_same_thread": False}, pool_size=20, max_overflow=30, **_COMMON
    )
    event.listen(engine, "connect", _on_connect)
    event.listen(engine, "begin", _on_begin)
    return engine


def _on_connect_to_server(connection: Any, _: object) -> None:
    connection.execute(f"SET idle_in_transaction_session_timeout = {int(1000 * STALLED_S)}")
    connection.commit()


def _on_connect(connection: Any, _: object) -> None:
    connection.isolation_level = None  # `_on_begin` begins transactions, not the first statement
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=FULL")  # accepted requests survive a power failure
    cursor.execute("PRAGMA foreign_keys=ON")
    cursor.close()


def _on_begin(connection: Connection) -> None:
    # Without IMMEDIATE, a transaction that first reads and then writes fails if another one wrote in between.
    immediate = connection.get_execution_options().get(_WRITES, False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if immediate else "BEGIN")


# Repeated requests: a repetition finds the object that the first attempt created; refused requests leave no record.
#
# Clients repeat a request if its answer was lost, or if it was refused for now (429, 503). They mark repetitions with
# the header ``x-stainless-retry-count``; some send an ``Idempotency-Key``. The record of a request is written in the
# same transaction as the object that it creates. A request without a key is identified by its body alone. So if such a
# request is refused at its first attempt, the record of an earlier equal request is forgotten: repetitions of the
# refused request must create their own object.

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
            has_database: Whether the database answers. Otherwise only this process remembers to hide the record.

        Raises:
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
