"""Atomic and durable writes: a reader, or a crash at any instant, finds either the old file or the new one."""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import re
import uuid
from collections.abc import Iterator
from pathlib import Path

from alto.errors import AltoError, DiskFullError, RunWriteError
from alto.runs.commands import resume_command
from alto.runs.lock import LockFile

__all__ = ["is_disk_full", "replace_file", "sync_folder", "write_error", "writing"]

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
