"""The processes of a session, found and killed through Linux's ``/proc``; the cores that they share."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

HELD_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Signals that ask a process to end. They are blocked in a new executor until its handlers are installed, so that an
early signal still stops it."""

_DEAD = ("Z", "X")


def session_members(leader: int) -> list[int]:
    """Return the living processes of the session that ``leader`` started; the leader itself may be dead."""
    pids = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
    return [pid for pid in pids if _is_alive_in(leader, pid)]


def kill_session(leader: int, *, spare: int | None = None) -> bool:
    """Send SIGKILL to every process of a session except ``spare``.

    Returns:
        Whether none was left. A killed process takes a moment to die, and may have just started another one.
    """
    others = [pid for pid in session_members(leader) if pid != spare]
    for pid in others:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return not others


def _is_alive_in(session: int, pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return False
    # The name before the last bracket may hold any text; after it come state, parent, process group, session.
    state, _, _, found, *_ = stat.rpartition(")")[2].split()
    return state not in _DEAD and int(found) == session


def num_cores() -> int:
    """Return the number of cores that this process may use, at most ``OMP_NUM_THREADS`` if the user has set it."""
    available = len(os.sched_getaffinity(0))
    limit = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()  # further numbers are for nested regions
    return min(available, int(limit)) if limit.isdecimal() and int(limit) > 0 else available
