"""Atomic creation of a folder: it is complete, or it does not exist."""

from __future__ import annotations

import contextlib
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError

from alto.errors import AltoError, RunExistsError
from alto.runs import sync_folder, write_error

__all__ = ["check_free", "new_folder"]


def check_free(folder: Path) -> None:
    """Check that ``folder`` does not exist or is an empty folder.

    Raises:
        RunExistsError: It is a file, or a folder with files.
    """
    if not folder.exists():
        return
    if not folder.is_dir():
        raise RunExistsError(
            f"{folder}: expected a folder that does not exist yet, or an empty one, found a file; name a folder; "
            "ALTO names the files in it"
        )
    count = sum(1 for _ in folder.iterdir())
    if count:
        raise RunExistsError(
            f"{folder}: expected a folder that does not exist yet, or an empty one, found a folder with {count} "
            f"file{'' if count == 1 else 's'}; name another folder, or remove this one"
        )


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder; rename it to ``folder`` when the block ends, or remove it on an error.

    Raises:
        RunExistsError: ``folder`` has files.
        RunWriteError: The disk is full or cannot be written.
    """
    check_free(folder)
    fresh = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}.new")
    try:
        fresh.mkdir(parents=True)
        yield fresh
        check_free(folder)
        if folder.is_dir():
            folder.rmdir()
        fresh.rename(folder)
        sync_folder(folder.parent)
    except AltoError:
        raise
    except (OSError, SafetensorError) as error:  # safetensors wraps OS errors in its own class
        failure = error if isinstance(error, OSError) else OSError(str(error))
        raise write_error(folder, failure, "free disk space, or name another folder") from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
