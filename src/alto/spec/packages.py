"""Calls into code that installed packages register; their errors are reported as errors of that package."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from alto.errors import AltoError, UnsupportedError

__all__ = ["described", "naming_errors"]


@contextlib.contextmanager
def naming_errors(
    call: str, module: str, *, page: str, passes: Callable[[BaseException], bool] = lambda error: False
) -> Iterator[None]:
    """Report an error raised in the ``with`` block as an error of the package that ``module`` belongs to.

    ALTO's own errors pass unchanged. If ``module`` is ALTO's, every error passes: it is a bug, and its traceback is
    needed.

    Args:
        call: The function that is called, for the message: ``Plateau.judge``.
        module: Module of that function.
        page: The page of the documentation that says what the function must do.
        passes: Whether an error passes unchanged, because a caller handles it.

    Raises:
        UnsupportedError: The block raised any other error.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, AltoError) or passes(error) or _top(module) == "alto":
            raise
        raise UnsupportedError(
            f"{call}: expected it to work as {page} says, found that it raises {described(error, module)}; correct "
            "that package, or do not use it"
        ) from error


def described(error: BaseException, module: str) -> str:
    """Describe ``error`` by its class, its message, and the last traceback line in the package of ``module``."""
    package, place = _top(module), ""
    traceback = error.__traceback__
    while traceback is not None:
        if _top(str(traceback.tb_frame.f_globals.get("__name__", ""))) == package:
            place = f", in {Path(traceback.tb_frame.f_code.co_filename).name}:{traceback.tb_lineno} of {package}"
        traceback = traceback.tb_next
    return type(error).__name__ + (f": {error}" if str(error) else "") + place


def _top(module: str) -> str:
    return module.partition(".")[0]
