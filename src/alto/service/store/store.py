"""The service's database: opening, migrations and transactions."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Engine, create_engine, event, make_url, text
from sqlalchemy.engine import URL, Connection
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from alto.errors import ServiceError

__all__ = ["Store", "database_time"]

MIGRATIONS = Path(__file__).parent / "migrations"
BUSY_S = 30.0
"""Longest wait for another writer of an SQLite file."""
STALLED_S = 30.0
"""Seconds of silence after which PostgreSQL ends a transaction. Otherwise a leader that hangs, or whose machine is
gone, would keep the leader's row locked, and no server could lead."""

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

    @property
    def is_sqlite(self) -> bool:
        """Whether the database is an SQLite file, which allows one writer at a time."""
        return self.url.get_backend_name() == "sqlite"

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
                config.attributes["connection"] = connection
                command.upgrade(config, "head")
        except SQLAlchemyError as error:
            raise ServiceError(
                f"database: expected a database that can be reached and written, found {_shown(self.url)}: "
                f"{_first_line(error)}; check the address, and that its server runs"
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


def _shown(url: URL) -> str:
    return url.render_as_string(hide_password=True)


def _first_line(error: SQLAlchemyError) -> str:
    return str(getattr(error, "orig", None) or error).partition("\n")[0]
