"""Safe reading of untrusted files, which may be damaged or replaced: it never blocks and has a size limit."""

from __future__ import annotations

import errno
import json
import os
import stat
from io import BufferedReader
from pathlib import Path
from typing import Any, NoReturn

__all__ = ["MAX_JSON_BYTES", "is_number", "open_regular", "read_bytes", "read_json", "strict_json"]

MAX_JSON_BYTES = 16 * 1024**2
"""Maximum size of a JSON file beside a run's journal; typical files have a few kilobytes."""


def open_regular(path: Path) -> BufferedReader:
    """Open ``path`` for reading if it is a regular file: opening a pipe would block, and a device may never end.

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
        ValueError: ``data`` is not JSON in UTF-8, holds NaN or an infinity, or is nested too deeply.
    """
    try:
        return json.loads(data, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("too many levels of nested lists and objects") from None


def is_number(value: object, *, least: float, most: float) -> bool:
    """Return whether ``value`` is a number from ``least`` to ``most``; NaN and booleans do not count."""
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant}, which is not a JSON number")
