"""Locks of this machine's GPUs between the processes of this user, with one lock file per GPU.

The kernel releases a lock when the process that holds it exits, even after a crash. CPU slots have no locks: a CPU slot
is a part of the cores, which several processes may use at the same time.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from alto.base import LockFile, cache_home, write_error
from alto.errors import DeviceBusyError

TIMEOUT_S = 1.0
"""Retry time for a lock: a process that only tests whether it is free holds it for an instant."""


class DeviceLocks:
    """Locks of GPUs, held until :meth:`release`.

    Args:
        names: UUIDs of the GPUs, which are the same in every process.
        folder: Folder of the lock files; None takes ``locks/`` in ALTO's cache (``$ALTO_CACHE``).

    Raises:
        DeviceBusyError: Another process holds one of the GPUs; this process then holds none.
        RunWriteError: A lock file cannot be written.
    """

    def __init__(self, names: Sequence[str], folder: Path | None = None) -> None:
        self._folder = folder if folder is not None else cache_home() / "locks"
        self._held: list[LockFile] = []
        try:
            for name in sorted(names):  # in the same order in every process, to avoid deadlock
                self._acquire(name)
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Release the locks. Idempotent."""
        while self._held:
            self._held.pop().release()

    def _acquire(self, name: str) -> None:
        path = self._folder / f"gpu-{name}.lock"
        lock = LockFile(path)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            if not lock.acquire(TIMEOUT_S):
                raise DeviceBusyError(
                    f"GPU {name} is in use by ALTO process {_holder(path)} on this machine. Wait for that process to "
                    "finish, stop it, or select other GPUs with CUDA_VISIBLE_DEVICES"
                )
            self._held.append(lock)
            lock.write(f"{os.getpid()}\n")
        except DeviceBusyError:
            raise
        except OSError as error:
            remedy = "set ALTO_CACHE to a folder on this machine that can be written"
            raise write_error(path, error, remedy) from error


def _holder(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip() or "(unknown id)"
    except OSError:
        return "(unknown id)"
