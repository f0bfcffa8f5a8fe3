"""One leader among all servers on a database.

The leader counts a number up. Others watch it, and take over once it has stood still for :data:`PATIENCE_S` on their
own monotonic clocks, so that no clock of another machine and no jump of a clock matters. A leader that was only slow
finds its epoch over in its next transaction, and what it has started is fenced by the leases of the runs.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

from sqlalchemy import select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from alto.errors import ServiceError
from alto.service.store import Store
from alto.service.store.tables import LeaderRow

__all__ = ["PATIENCE_S", "Leadership", "LostLeadershipError"]

PATIENCE_S = 15.0
BEAT_S = 2.0

_ID = 1


class LostLeadershipError(ServiceError):
    """Another server leads now."""


class Leadership:
    """The claim of this process to lead.

    Args:
        store: The common database.
        clock: In seconds; never runs backwards.
    """

    def __init__(self, store: Store, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._clock = clock
        self._holder = f"{socket.gethostname()} {os.getpid()} {_start_of(os.getpid())}"
        self._epoch: int | None = None
        self._beat_at = 0.0
        self._seen: tuple[int, int] | None = None
        self._seen_at = 0.0

    @property
    def is_held(self) -> bool:
        """Whether this process leads, as far as it knows."""
        return self._epoch is not None

    @property
    def epoch(self) -> int:
        """Number of the present leader; only where this process leads."""
        assert self._epoch is not None, "it does not lead"
        return self._epoch

    def acquire(self) -> bool:
        """Lead, where nobody does; returns whether this process leads now."""
        with self._store.writing() as session:
            if self._epoch is not None:
                with contextlib.suppress(LostLeadershipError):
                    self.check(session)
                    return True
            row = session.scalar(select(LeaderRow).where(LeaderRow.id == _ID).with_for_update())
            if row is None:
                row = LeaderRow(id=_ID, epoch=0, beat=0, holder="")
                try:
                    with session.begin_nested():
                        session.add(row)
                except IntegrityError:
                    return False
            elif not self._is_over(row):
                return False
            row.epoch, row.beat, row.holder = row.epoch + 1, row.beat + 1, self._holder
            epoch = row.epoch
        self._epoch, self._beat_at = epoch, self._clock()
        return True

    def beat(self) -> None:
        """Show that this process lives, where it is time.

        Raises:
            LostLeadershipError: Another process leads.
        """
        if self._clock() - self._beat_at < BEAT_S:
            return
        with self._store.writing() as session:
            self.check(session)
            session.execute(update(LeaderRow).where(LeaderRow.id == _ID).values(beat=LeaderRow.beat + 1))
        self._beat_at = self._clock()

    def check(self, session: Session) -> None:
        """Check that this process leads until the end of a transaction.

        Raises:
            LostLeadershipError: Another process leads.
        """
        epoch = session.scalar(select(LeaderRow.epoch).where(LeaderRow.id == _ID).with_for_update())
        if epoch is None or epoch != self._epoch:
            self._epoch = None
            raise LostLeadershipError("expected this server to lead, found that another one does; it only answers now")

    def release(self) -> None:
        """Lead no longer, so that another server may at once."""
        if self._epoch is None:
            return
        with self._store.writing() as session:
            session.execute(
                update(LeaderRow).where(LeaderRow.id == _ID, LeaderRow.epoch == self._epoch).values(holder="")
            )
        self._epoch = None

    def _is_over(self, row: LeaderRow) -> bool:
        """Whether the leader of ``row`` has ended, or has stood still for long."""
        if not row.holder or _has_ended(row.holder):
            return True
        if self._seen != (row.epoch, row.beat):
            self._seen, self._seen_at = (row.epoch, row.beat), self._clock()
        return self._clock() - self._seen_at >= PATIENCE_S


def _has_ended(holder: str) -> bool:
    """Whether a process of this machine is surely gone."""
    host, pid, start = holder.split(" ")
    return host == socket.gethostname() and start != "" and _start_of(int(pid)) != start


def _start_of(pid: int) -> str:
    """When a process of this machine began, in ticks since its boot, and the boot; empty where there is none."""
    try:
        ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except (OSError, IndexError):
        return ""
    return f"{boot}:{ticks}"
