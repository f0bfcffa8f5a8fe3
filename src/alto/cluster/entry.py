"""Calls the entry function of an executor's process, and reports how it ended."""

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
"""Works on the run in a folder; calls the given function regularly to check whether to stop; returns notices for the
user."""

_TRANSIENT = (RunWriteError, RunBusyError, DeviceMemoryError, RankConnectionError)
"""Errors that may not recur in the next attempt or on another machine; a full disk does recur."""


def load_entry(name: str) -> Entry:
    """The function called ``module:function``."""
    module, _, function = name.partition(":")
    entry: Entry = getattr(importlib.import_module(module), function)
    return entry


def error_class(name: str) -> type[AltoError] | None:
    """ALTO's error class of that name; None for any other name."""
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
    """Run ``work`` and return how it ended; an error is printed."""
    try:
        notice = work()
    except (TaskInterruptedError, KeyboardInterrupt) as error:
        return Ending(
            outcome=Outcome.INTERRUPTED,
            reason=str(error) or "stopped as asked before it began",
            error=type(error).__name__,
        )
    except BaseException as error:
        with contextlib.suppress(OSError):  # the log may lie on the disk that is full
            traceback.print_exc()
        return ending_by(error)
    return Ending(outcome=Outcome.FINISHED, reason=notice or "")


def ending_by(error: BaseException) -> Ending:
    """How ``error`` ends an executor."""
    reason = str(error) if isinstance(error, AltoError) else f"{type(error).__name__}: {error}"
    if isinstance(error, DiskFullError) or (isinstance(error, OSError) and is_disk_full(error)):
        return Ending(outcome=Outcome.FAILED, reason=reason, error=DiskFullError.__name__)
    is_lost = isinstance(error, _TRANSIENT) or not isinstance(error, AltoError)
    return Ending(outcome=Outcome.LOST if is_lost else Outcome.FAILED, reason=reason, error=type(error).__name__)
