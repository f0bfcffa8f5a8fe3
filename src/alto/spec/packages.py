"""Calls of what installed packages register: what goes wrong in them is reported as an error of that package."""

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
    """Report an error of the code inside as one of the package that ``module`` belongs to.

    ALTO's errors pass as they are. So does everything where ``module`` is ALTO's: there it is a bug, whose traceback is
    wanted.

    Args:
        call: What is called, for the message: ``Plateau.judge``.
        module: Where that is.
        page: The page of the documentation that says what it owes.
        passes: Errors that a caller handles.

    Raises:
        UnsupportedError: The code inside raised something else.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, AltoError) or passes(error) or _top(module) == "alto":
            raise
        raise UnsupportedError(
            f"{call}: expected it to do what {page} says, found that it raises {described(error, module)}; "
            "correct that package, or do without it"
        ) from error


def described(error: BaseException, module: str) -> str:
    """Class and message of ``error``, and the last line that it came through of the package that has ``module``."""
    package, place = _top(module), ""
    traceback = error.__traceback__
    while traceback is not None:
        if _top(str(traceback.tb_frame.f_globals.get("__name__", ""))) == package:
            place = f", in {Path(traceback.tb_frame.f_code.co_filename).name}:{traceback.tb_lineno} of {package}"
        traceback = traceback.tb_next
    return type(error).__name__ + (f": {error}" if str(error) else "") + place


def _top(module: str) -> str:
    return module.partition(".")[0]
