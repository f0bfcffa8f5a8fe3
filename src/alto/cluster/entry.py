"""What a process of an executor is started for, and how it says that it ended."""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Callable
from typing import TypeAlias

from alto import errors
from alto.cluster.attempt import Ending
from alto.cluster.base import Outcome
from alto.errors import AltoError, DeviceMemoryError, RunBusyError, RunWriteError, TaskInterruptedError

__all__ = ["Entry", "ending_of", "error_class", "load_entry"]

Entry: TypeAlias = Callable[[str, Callable[[], bool]], None]
"""Works on the run in a folder; asks now and then whether to stop."""

_TRANSIENT = (RunWriteError, RunBusyError, DeviceMemoryError)
"""Errors that the next attempt, or another machine, may not meet."""


def load_entry(name: str) -> Entry:
    """The function called ``module:function``."""
    module, _, function = name.partition(":")
    entry: Entry = getattr(importlib.import_module(module), function)
    return entry


def error_class(name: str) -> type[AltoError] | None:
    """The error of ALTO's that is called so; None for another's, and for no name."""
    found = getattr(errors, name, None) if name else None
    return found if isinstance(found, type) and issubclass(found, AltoError) else None


def ending_of(work: Callable[[], None]) -> Ending:
    """Do ``work``; how that ended. What went wrong is printed."""
    try:
        work()
    except (TaskInterruptedError, KeyboardInterrupt) as error:
        return Ending(
            outcome=Outcome.INTERRUPTED,
            reason=str(error) or "stopped as asked before it had begun",
            error=type(error).__name__,
        )
    except BaseException as error:
        traceback.print_exc()
        is_known = isinstance(error, AltoError)
        return Ending(
            outcome=Outcome.FAILED if is_known and not isinstance(error, _TRANSIENT) else Outcome.LOST,
            reason=str(error) if is_known else f"{type(error).__name__}: {error}",
            error=type(error).__name__,
        )
    return Ending(outcome=Outcome.FINISHED)
