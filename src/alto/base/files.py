"""Files: atomic and durable writes, locks, safe reading of files from outside, the cache folder."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import json
import math
import os
import re
import shlex
import shutil
import stat
import tempfile
import time
import uuid
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any, NoReturn

from alto.errors import AltoError, DiskFullError, RunWriteError


def resume_command(root: str | Path) -> str:
    """Return the shell command that resumes the run or queue in ``root``, with the path quoted for the shell."""
    return f"alto resume {shlex.quote(str(root))}"


def note_resumption(error: BaseException, root: str | Path) -> None:
    """Add the command that resumes the run or queue in ``root`` to a `KeyboardInterrupt`, as a note of the exception.

    Other errors are not changed: their messages already contain the command.
    """
    if isinstance(error, KeyboardInterrupt) and not getattr(error, "__notes__", None):
        error.add_note(f"continue with: {resume_command(root)}")


_RETRY_S = 0.02

_SCRATCH_LOCK = "alto.lock"

_NEW_S = 60.0
"""Seconds after which an unlocked scratch folder counts as left over. A younger folder may be locked in a moment."""


class LockFile:
    """The lock of one folder.

    The kernel releases the lock when the process that holds it exits, even after a crash. The lock belongs to the file,
    not to its name: if the file is removed, another process creates a new file and locks that one. Therefore the holder
    calls :meth:`is_held` before it writes.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    def acquire(self, timeout_s: float) -> bool:
        """Take the lock; return whether this succeeded within ``timeout_s``.

        Raises:
            OSError: The file cannot be opened or created.
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
        """Return whether this object holds the lock, and the path still refers to the locked file."""
        if self._descriptor is None:
            return False
        held = os.fstat(self._descriptor)
        try:
            named = os.stat(self._path, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return (held.st_dev, held.st_ino) == (named.st_dev, named.st_ino)

    def write(self, text: str) -> None:
        """Write the holder's process id into the file, for processes that find the lock taken.

        Raises:
            OSError: The file cannot be written.
        """
        assert self._descriptor is not None
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, text.encode(), 0)

    def release(self) -> None:
        """Release the lock. The lock file is not deleted."""
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


MAX_JSON_BYTES = 16 * 1024**2
"""Maximum size of a JSON file in a run directory; typical files have a few kilobytes."""


def open_regular(path: Path) -> BufferedReader:
    """Open ``path`` for reading if it is a regular file: opening a pipe would block, and reading a device may never
    end.

    Raises:
        OSError: The file does not exist, cannot be read, or is not a regular file.
    """
    # O_NONBLOCK: opening a pipe must not wait for a writer; it has no effect on a regular file.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, "a folder, not a file", str(path))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "a pipe, socket or device, not a regular file", str(path))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_bytes(path: Path, max_bytes: int) -> bytes:
    """Read all bytes of a regular file.

    Raises:
        OSError: See :func:`open_regular`; or the file has more than ``max_bytes`` bytes.
    """
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size > max_bytes:
            raise OSError(errno.EFBIG, f"more than {max_bytes:,} bytes", str(path))
        return file.read()


def read_json(path: Path, max_bytes: int = MAX_JSON_BYTES) -> Any:
    """Read the value in a JSON file.

    Raises:
        OSError: See :func:`read_bytes`.
        ValueError: See :func:`strict_json`.
    """
    return strict_json(read_bytes(path, max_bytes))


def strict_json(data: bytes | str) -> Any:
    """Parse the JSON text ``data``.

    Raises:
        ValueError: ``data`` is not JSON in UTF-8, contains NaN or an infinity, or is nested too deeply.
    """
    try:
        return json.loads(data, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("too many levels of nested lists and objects") from None


def is_number(value: object, *, least: float, most: float) -> bool:
    """Return whether ``value`` is a number from ``least`` to ``most``; NaN and booleans do not count."""
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most


def finite(value: float | None) -> float | None:
    """Return ``value``; None if it is not a finite number."""
    return value if value is not None and math.isfinite(value) else None


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant}, which is not a JSON number")


def cache_home() -> Path:
    """Return ``$ALTO_CACHE``, or ``alto`` in the user's cache folder (``$XDG_CACHE_HOME`` or ``~/.cache``)."""
    given = os.environ.get("ALTO_CACHE")
    return Path(given or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "alto")


_LOCK_TIMEOUT_S = 1.0
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextlib.contextmanager
def writing(run: Path, what: Path) -> Iterator[None]:
    """Translate a failure to write ``what`` in the run directory ``run`` into an error with a remedy.

    Raises:
        RunWriteError: An `OSError` was raised inside.
    """
    try:
        yield
    except AltoError:
        raise
    except OSError as error:
        remedy = "what was committed before is safe: free disk space or make the disk writable, then continue with:"
        raise write_error(what, error, f"{remedy} {resume_command(run)}") from error


def write_error(what: Path, error: OSError, remedy: str) -> RunWriteError:
    """Return ALTO's error for ``error``, which was raised while ``what`` was written.

    Args:
        what: Name of the file or folder, for the message.
        error: The operating system's error.
        remedy: Remedy for the user, for the message.
    """
    kind = DiskFullError if is_disk_full(error) else RunWriteError
    return kind(f"expected to write {what}, found: {error.strerror or error}; {remedy}")


def is_disk_full(error: OSError) -> bool:
    """Return whether the only problem is that disk space is missing.

    `shutil.copytree` and safetensors give the operating system's error number only in the text of their errors.
    """
    if error.errno is not None:
        return error.errno in _FULL
    return any(int(number) in _FULL for number in re.findall(r"(?:Errno|os error) (\d+)", str(error)))


def replace_file(path: Path, content: str | bytes) -> None:
    """Replace ``path`` by ``content`` (text as UTF-8), durably.

    A failed attempt leaves nothing behind; files left by a killed process are removed by the next attempt.
    """
    _remove_abandoned(path)
    fresh = path.with_name(f".{path.name}.{uuid.uuid4().hex}.new")
    lock = LockFile(fresh)  # held for as long as this process lives and writes
    try:
        lock.acquire(_LOCK_TIMEOUT_S)
        with fresh.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise
    finally:
        lock.release()
    sync_folder(path.parent)


def _remove_abandoned(path: Path) -> None:
    """Remove temporary files of ``path`` that no living process writes."""
    for fresh in path.parent.glob(f".{glob.escape(path.name)}.*.new"):
        lock = LockFile(fresh)
        with contextlib.suppress(OSError):  # another user's file stays
            if lock.acquire(0):
                fresh.unlink(missing_ok=True)
        lock.release()


def sync_folder(folder: Path) -> None:
    """Make the file names in ``folder`` durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
