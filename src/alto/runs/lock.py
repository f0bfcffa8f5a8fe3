"""A lock file that one process holds at a time. It detects that the file was removed or replaced."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

__all__ = ["LockFile", "scratch_folder"]

_RETRY_S = 0.02

_SCRATCH_LOCK = "alto.lock"

_NEW_S = 60.0
"""Age in seconds below which the process that made an unlocked scratch folder may still be about to lock it."""


class LockFile:
    """The lock of one folder.

    The kernel releases the lock when its process ends, in any way. The lock belongs to the file, not to its name: if
    the file is removed, another process makes a new one and locks that. So the holder calls :meth:`is_held` before it
    writes.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    def acquire(self, timeout_s: float) -> bool:
        """Take the lock; return whether this succeeded within ``timeout_s``.

        Raises:
            OSError: The file cannot be opened or made.
        """
        assert self._descriptor is None
        deadline = time.monotonic() + timeout_s
        while True:
            flags = os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
            self._descriptor = os.open(self._path, flags, 0o644)
            # The lock is not valid if the file was removed between opening and locking.
            if _lock(self._descriptor) and self.is_held():
                return True
            self.release()
            if time.monotonic() >= deadline:
                return False
            time.sleep(_RETRY_S)

    def is_held(self) -> bool:
        """Return whether this object holds the lock, and the path still names the locked file."""
        if self._descriptor is None:
            return False
        held = os.fstat(self._descriptor)
        try:
            named = os.stat(self._path, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return (held.st_dev, held.st_ino) == (named.st_dev, named.st_ino)

    def write(self, text: str) -> None:
        """Write the holder's process id into the file, for processes that find it taken.

        Raises:
            OSError: The file cannot be written.
        """
        assert self._descriptor is not None
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, text.encode(), 0)

    def release(self) -> None:
        """Release the lock; the file stays."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def is_free(self) -> bool:
        """Return whether no process holds the lock; never create the file.

        Raises:
            OSError: The file cannot be opened, not even for reading.
        """
        try:
            descriptor, how = self._open_to_ask()
        except FileNotFoundError:
            return True
        try:
            return _lock(descriptor, how)
        finally:
            os.close(descriptor)

    def _open_to_ask(self) -> tuple[int, int]:
        """Return a descriptor and the kind of lock to test with: a shared lock if the file can only be read."""
        flags = os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            return os.open(self._path, os.O_RDWR | flags), fcntl.LOCK_EX
        except FileNotFoundError:
            raise
        except OSError:  # another user's file, or a read-only file system
            return os.open(self._path, os.O_RDONLY | flags), fcntl.LOCK_SH


def _lock(descriptor: int, how: int = fcntl.LOCK_EX) -> bool:
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # some file systems raise PermissionError
        return False
    return True


@contextlib.contextmanager
def scratch_folder(prefix: str) -> Iterator[Path]:
    """Make a temporary folder that exists as long as the context, and remove abandoned ones.

    Abandoned folders have the same prefix and belong to killed processes of this user.
    """
    for path in Path(tempfile.gettempdir()).glob(f"{prefix}*/{_SCRATCH_LOCK}"):
        with contextlib.suppress(OSError):  # another process may remove it at the same time
            status = path.stat(follow_symlinks=False)
            is_old = time.time() - status.st_mtime > _NEW_S
            if status.st_uid == os.getuid() and is_old and LockFile(path).is_free():
                shutil.rmtree(path.parent)
    with tempfile.TemporaryDirectory(prefix=prefix) as folder:
        lock = LockFile(Path(folder) / _SCRATCH_LOCK)
        lock.acquire(timeout_s=0.0)
        try:
            yield Path(folder)
        finally:
            lock.release()
