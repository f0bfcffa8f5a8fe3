"""Election of one leader among all servers that share a database.

Leadership is a lease in the database, which its holder renews. Only the database's clock decides whether the lease has
expired, so the clocks, hosts and process ids of the servers do not matter: servers in two containers may have the same
host name and process id. Every leader gets a larger number than the previous one, its epoch. A transaction of a
previous leader finds a newer epoch and is refused; the leases of the runs keep its executors from writing.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from sqlalchemy import select, update
from sqlalchemy.exc import IntegrityError, InterfaceError, OperationalError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.orm import Session

from alto import errors
from alto.errors import AltoError, DataError, ModelError, RunWriteError, ServiceError
from alto.service.errors import ApiError
from alto.service.store import Store
from alto.service.store.store import database_time
from alto.service.store.tables import LeaderRow

LEASE_S = 15.0
_RENEWALS = 7
"""Renewals per duration of a lease, so that some may be late."""

_ID = 1


class LostLeadershipError(ServiceError):
    """Another server has become the leader."""


class Leadership:
    """This server's claim to leadership.

    Args:
        lease_s: Seconds without a renewal after which another server may lead.
        clock: Monotonic clock, in seconds. It only decides how often the lease is renewed.
    """

    def __init__(self, store: Store, *, lease_s: float = LEASE_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._lease_s = lease_s
        self._clock = clock
        self._server = secrets.token_hex(16)
        self._epoch: int | None = None
        self._renew_at = 0.0

    @property
    def epoch(self) -> int:
        """Epoch of this server; only valid while it leads."""
        assert self._epoch is not None, "it does not lead"
        return self._epoch

    @property
    def is_held(self) -> bool:
        """Whether this server leads, as far as it knows."""
        return self._epoch is not None

    def acquire(self) -> bool:
        """Become the leader if there is none; return whether this server leads now."""
        with self._store.writing() as session:
            if self._epoch is not None:
                with contextlib.suppress(LostLeadershipError):
                    self.check(session)
                    return True
            row = session.scalar(select(LeaderRow).where(LeaderRow.id == _ID).with_for_update())
            if row is None:
                row = LeaderRow(id=_ID, epoch=0, holder="", renewed_at=0.0)
                try:
                    with session.begin_nested():
                        session.add(row)
                except IntegrityError:
                    return False
            now_s = database_time(session)
            # A renewal in the future means that the database's clock was set back.
            if row.holder not in ("", self._server) and abs(now_s - row.renewed_at) < self._lease_s:
                return False
            row.epoch, row.holder, row.renewed_at = row.epoch + 1, self._server, now_s
            epoch = row.epoch
        self._epoch, self._renew_at = epoch, self._clock() + self._lease_s / _RENEWALS
        return True

    def renew(self) -> None:
        """Renew the lease if it is due.

        Raises:
            LostLeadershipError: Another server leads.
        """
        if self._clock() < self._renew_at:
            return
        with self._store.writing() as session:
            self.check(session)
            session.execute(update(LeaderRow).where(LeaderRow.id == _ID).values(renewed_at=database_time(session)))
        self._renew_at = self._clock() + self._lease_s / _RENEWALS

    @contextlib.contextmanager
    def renewed(self) -> Iterator[None]:
        """Renew the lease on a separate thread while the block runs, which may take longer than the lease.

        If that fails, or another server leads, the next renewal after the block reports it.
        """
        has_ended = threading.Event()

        def renew() -> None:
            with contextlib.suppress(LostLeadershipError):
                while not has_ended.wait(self._lease_s / _RENEWALS):
                    with contextlib.suppress(SQLAlchemyError):  # the database may answer again in time
                        self.renew()

        thread = threading.Thread(target=renew, name="alto-lease", daemon=True)
        thread.start()
        try:
            yield
        finally:
            has_ended.set()
            thread.join()

    def check(self, session: Session) -> None:
        """Check that this server leads, and keep it the leader until the transaction ends.

        Raises:
            LostLeadershipError: Another server leads.
        """
        epoch = session.scalar(select(LeaderRow.epoch).where(LeaderRow.id == _ID).with_for_update())
        if epoch is None or epoch != self._epoch:
            self._epoch = None
            raise LostLeadershipError(
                "expected this server to lead, found that a different server leads; "
                "this server now only answers requests"
            )

    def release(self) -> None:
        """Give up leadership, so that another server can lead without waiting for the lease to end."""
        if self._epoch is None:
            return
        with self._store.writing() as session:
            session.execute(
                update(LeaderRow).where(LeaderRow.id == _ID, LeaderRow.epoch == self._epoch).values(holder="")
            )
        self._epoch = None


def is_of_service(error: Exception) -> bool:
    """Return whether no job can be worked on: the database does not answer, or another server leads."""
    return isinstance(error, LostLeadershipError | OperationalError | InterfaceError | PoolTimeoutError)


def code_of(error: Exception, code: str) -> tuple[str, str | None]:
    """Return the error code and request parameter for an error of a job; ``code`` is the default."""
    if isinstance(error, ApiError):
        return error.code or code, error.param
    return _code_of_class(type(error), code)


def code_of_end(error: str, code: str) -> tuple[str, str | None]:
    """Return the error code and request parameter for an executor that ended with an error whose class is called
    ``error``."""
    found = getattr(errors, error, None)
    return _code_of_class(found if isinstance(found, type) else Exception, code)


def _code_of_class(kind: type, code: str) -> tuple[str, str | None]:
    if issubclass(kind, DataError):
        return "invalid_training_file", "training_file"
    if issubclass(kind, ModelError):
        return "invalid_model", "model"
    return code, None


def is_of_storage(error: Exception) -> bool:
    """Return whether a disk or the artifact store failed, so that the job may succeed later (unless a file is gone)."""
    return isinstance(error, RunWriteError) or (
        isinstance(error, OSError) and not isinstance(error, AltoError | FileNotFoundError)
    )


def missing_file(error: FileNotFoundError) -> str:
    """Return a message for the user that names the missing file of a job."""
    name = Path(str(error.filename)).name if error.filename else str(error)
    return f"expected all files of the job, found that {name} is gone; create the job again"
