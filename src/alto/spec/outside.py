"""Reads untrusted files, which may be damaged or replaced: without blocking, and up to a size limit."""

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
"""Largest size of a JSON file beside a run's journal; they have some kilobytes."""


def open_regular(path: Path) -> BufferedReader:
    """``path`` for reading, if it is a regular file: opening a pipe would block, and a device may never end.

    Raises:
        OSError: There is none, it cannot be read, or it is something else.
    """
    # Without waiting for a writer of a pipe; on a regular file it changes nothing.
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
    """All of a regular file.

    Raises:
        OSError: As of :func:`open_regular`, or it has more than ``max_bytes`` bytes.
    """
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size > max_bytes:
            raise OSError(errno.EFBIG, f"more than {max_bytes:,} bytes", str(path))
        return file.read()


def read_json(path: Path, max_bytes: int = MAX_JSON_BYTES) -> Any:
    """The value in a JSON file.

    Raises:
        OSError: As of :func:`read_bytes`.
        ValueError: It is not strict JSON in UTF-8.
    """
    return strict_json(read_bytes(path, max_bytes))


def strict_json(data: bytes | str) -> Any:
    """The value of the JSON text ``data``.

    Raises:
        ValueError: It is not JSON in UTF-8, holds NaN or an infinity, or has more levels than can be read.
    """
    try:
        return json.loads(data, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("too many levels of lists and objects in each other") from None


def is_number(value: object, *, least: float, most: float) -> bool:
    """Whether ``value`` is a number from ``least`` to ``most``; NaN and truth values are none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant}, which is no JSON number")
