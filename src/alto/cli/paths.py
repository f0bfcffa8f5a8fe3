"""Paths on the command line that the operating system cannot look up."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from alto.errors import RunNotFoundError

__all__ = ["Run", "reachable"]


def reachable(path: Path | None) -> Path | None:
    """``path`` unchanged, whether or not it exists.

    Raises:
        RunNotFoundError: A name is too long, a link leads to itself, or a parent folder cannot be read.
    """
    try:
        if path is not None:
            path.resolve().exists()
    except (OSError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "a link that leads to itself"
        raise RunNotFoundError(f"expected a path that can be looked up, found {path} ({reason}); correct it") from None
    return path


Run = Annotated[Path, typer.Argument(help="Run directory.", callback=reachable)]
