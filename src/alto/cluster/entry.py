"""What a process of an executor is started for, and how it says that it ended."""

from __future__ import annotations

import contextlib
import importlib
import traceback
from collections.abc import Callable
from typing import TypeAlias

from alto import errors
from alto.cluster.attempt import Ending
from alto.cluster.base import Outcome
from alto.errors import (
    AltoError,
    DeviceMemoryError,
    DiskFullError,
    RankConnectionError,
    RunBusyError,
    RunWriteError,
    TaskInterruptedError,
)
from alto.runs import is_disk_full

__all__ = ["Entry", "ending_by", "ending_of", "error_class", "load_entry", "run_entry"]

Entry: TypeAlias = Callable[[str, Callable[[], bool]], "str | None"]
"""Works on the run in a folder; asks now and then whether to stop; returns what the user should know of its end."""

_TRANSIENT = (RunWriteError, RunBusyError, DeviceMemoryError, RankConnectionError)
"""Errors that the next attempt, or another machine, may not meet; a disk that is full, it does meet."""


def load_entry(name: str) -> Entry:
    """The function called ``module:function``."""
    module, _, function = name.partition(":")
    entry: Entry = getattr(importlib.import_module(module), function)
    return entry


def error_class(name: str) -> type[AltoError] | None:
    """The error of ALTO's that is called so; None for another's, and for no name."""
    found = getattr(errors, name, None) if name else None
    return found if isinstance(found, type) and issubclass(found, AltoError) else None


def run_entry(entry: str, run_dir: str, is_interrupted: Callable[[], bool]) -> Ending:
    """Do what a :class:`alto.cluster.Launch` asks for, in a process of its own; how that ended. What went wrong is
    printed.

    Args:
        entry, run_dir: Of the launch.
        is_interrupted: Whether to save and end; asked between steps.
    """
    return ending_of(lambda: load_entry(entry)(run_dir, is_interrupted))


def ending_of(work: Callable[[], str | None]) -> Ending:
    """Do ``work``; how that ended. What went wrong is printed."""
    try:
        notice = work()
    except (TaskInterruptedError, KeyboardInterrupt) as error:
        return Ending(
            outcome=Outcome.INTERRUPTED,
            reason=str(error) or "stopped as asked before it had begun",
            error=type(error).__name__,
        )
    except BaseException as error:
        with contextlib.suppress(OSError):  # the log may lie on the disk that is full
            traceback.print_exc()
        return ending_by(error)
    return Ending(outcome=Outcome.FINISHED, reason=notice or "")


def ending_by(error: BaseException) -> Ending:
    """What ``error`` makes of an executor."""
    reason = str(error) if isinstance(error, AltoError) else f"{type(error).__name__}: {error}"
    if isinstance(error, DiskFullError) or (isinstance(error, OSError) and is_disk_full(error)):
        return Ending(outcome=Outcome.FAILED, reason=reason, error=DiskFullError.__name__)
    is_lost = isinstance(error, _TRANSIENT) or not isinstance(error, AltoError)
    return Ending(outcome=Outcome.LOST if is_lost else Outcome.FAILED, reason=reason, error=type(error).__name__)
