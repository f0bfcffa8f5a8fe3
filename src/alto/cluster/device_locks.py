"""Which process of this user has which GPU of this machine: a lock file for each.

The kernel gives a lock back when its process ends, however that ends. CPU slots have none: they are shares of cores,
which any number of processes may take at a time.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from alto.errors import DeviceBusyError
from alto.runs import LockFile, cache_home, write_error

__all__ = ["DeviceLocks"]

TIMEOUT_S = 1.0
"""Whoever asks whether a lock is free holds it for an instant."""


class DeviceLocks:
    """Locks of GPUs, held from now on until :meth:`release`.

    Args:
        names: Of the GPUs, the same in every process that may want them: UUIDs.
        folder: Where the lock files are; None takes ``locks/`` in ALTO's cache (``$ALTO_CACHE``).

    Raises:
        DeviceBusyError: Another process has one of them; none is held then.
        RunWriteError: A lock file cannot be written.
    """

    def __init__(self, names: Sequence[str], folder: Path | None = None) -> None:
        self._folder = folder if folder is not None else cache_home() / "locks"
        self._held: list[LockFile] = []
        try:
            for name in sorted(names):  # in one order everywhere, so that two processes cannot each get a half
                self._acquire(name)
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Give them back; doing it twice changes nothing."""
        while self._held:
            self._held.pop().release()

    def _acquire(self, name: str) -> None:
        path = self._folder / f"gpu-{name}.lock"
        lock = LockFile(path)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            if not lock.acquire(TIMEOUT_S):
                raise DeviceBusyError(
                    f"expected GPU {name} to be free, found that process {_holder(path)} of this machine has it for "
                    "its own tasks; wait until it has ended, end it, or name other GPUs in CUDA_VISIBLE_DEVICES"
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
        return path.read_text(encoding="utf-8").strip() or "of an unknown number"
    except OSError:
        return "of an unknown number"
