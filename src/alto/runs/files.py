"""Writing so that a reader, or a crash at any instant, finds the old file or the new one and nothing between."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from alto.errors import AltoError, RunWriteError

__all__ = ["replace_file", "sync_folder", "writing"]


@contextlib.contextmanager
def writing(run: Path, what: Path) -> Iterator[None]:
    """Say a failure to write ``what`` in the run directory ``run`` with its remedy.

    Raises:
        RunWriteError: An `OSError` was raised inside.
    """
    try:
        yield
    except AltoError:
        raise
    except OSError as error:
        raise RunWriteError(
            f"expected to write {what}, found: {error.strerror or error}; what was committed before is safe: "
            f"make room or make the disk writable, then go on with: alto resume {run}"
        ) from error


def replace_file(path: Path, content: str) -> None:
    """Put ``content`` (UTF-8) in the place of ``path``, durably."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        with fresh.open("w", encoding="utf-8") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in ``folder`` durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
