"""Runs the entry of an executor's process, and records how that ended."""

from __future__ import annotations

import contextlib
import importlib
import os
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from alto import errors
from alto.base import is_disk_full
from alto.cluster.base import Ending, Outcome, TaskTicket
from alto.errors import (
    AltoError,
    DeviceMemoryError,
    DiskFullError,
    RankConnectionError,
    RunBusyError,
    RunWriteError,
    TaskInterruptedError,
)

TRUST_VARIABLE = "ALTO_TRUST_REMOTE_CODE"
"""Environment variable; ``1`` in a process whose user allows code of base models."""

Entry: TypeAlias = Callable[[str, Callable[[], bool]], "str | None"]
"""Works on the run in a folder; calls the given function regularly to check whether to stop; returns notices for the
user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostedRun:
    """A run for a host to work on.

    Attributes:
        number: Unique in the process.
        is_interrupted: Returns whether to stop; each call is a sign of life.
    """

    number: int
    ticket: TaskTicket
    is_interrupted: Callable[[], bool]


class Host(Protocol):
    """Works on several runs in one process, in turns. If a launch names a class as its entry, the class is called
    without arguments to make a host."""

    def attach(self, run: HostedRun) -> None:
        """Start or resume a run in addition to the others; an error raised here stops only that run."""

    def turn(self) -> Mapping[int, str | BaseException]:
        """Work on all runs for a moment.

        Returns:
            The runs that have ended, by number, each with notices for the user or the error that ended it.
        """

    @property
    def is_usable(self) -> bool:
        """Whether it can work on further runs; if not, its process ends after its current runs."""


_TRANSIENT = (RunWriteError, RunBusyError, DeviceMemoryError, RankConnectionError)
"""Errors that may not recur in the next attempt or on another machine; a full disk does recur."""


def load_entry(name: str) -> Entry | type[Host]:
    """Return the function or class called ``module:name``."""
    module, _, attribute = name.partition(":")
    entry: Entry | type[Host] = getattr(importlib.import_module(module), attribute)
    return entry


def error_class(name: str) -> type[AltoError] | None:
    """Return ALTO's error class of that name; None for any other name."""
    found = getattr(errors, name, None) if name else None
    return found if isinstance(found, type) and issubclass(found, AltoError) else None


def run_entry(entry: str, run_dir: str, is_interrupted: Callable[[], bool]) -> Ending:
    """Do the work of a :class:`alto.cluster.Launch`; return how it ended, and print an error's traceback.

    Args:
        entry, run_dir: See :class:`alto.cluster.Launch`.
        is_interrupted: Returns whether to save and end; called between steps.
    """
    return ending_of(lambda: work_alone(load_entry(entry), run_dir, is_interrupted))


def work_alone(entry: Entry | type[Host], run_dir: str, is_interrupted: Callable[[], bool]) -> str | None:
    """Work on one run to its end; return notices for the user, or raise the error that ended it."""
    if not isinstance(entry, type):
        return entry(run_dir, is_interrupted)
    host = entry()
    ticket = TaskTicket(task=run_dir, run_dir=run_dir, entry=entry.__name__, trust_remote_code=trusts_remote_code())
    host.attach(HostedRun(number=0, ticket=ticket, is_interrupted=is_interrupted))
    while not (ended := host.turn()):
        pass
    return notices_of(ended[0])


def notices_of(ended: str | BaseException) -> str:
    """Return the notices of a run that has ended in :meth:`Host.turn`, or raise the error that ended it."""
    if isinstance(ended, BaseException):
        raise ended
    return ended


def trusts_remote_code() -> bool:
    """Return whether the user who started this process allows code of base models."""
    return os.environ.get(TRUST_VARIABLE) == "1"


def ending_of(work: Callable[[], str | None]) -> Ending:
    """Run ``work`` and return how it ended; print an error's traceback."""
    try:
        notice = work()
    except (TaskInterruptedError, KeyboardInterrupt) as error:
        return Ending(
            outcome=Outcome.INTERRUPTED,
            reason=str(error) or "stopped on request before it began",
            error=type(error).__name__,
        )
    except BaseException as error:
        with contextlib.suppress(OSError):  # the log may be on the full disk
            traceback.print_exc()
        return ending_by(error)
    return Ending(outcome=Outcome.FINISHED, reason=notice or "")


def ending_by(error: BaseException) -> Ending:
    """Return how an executor ends that raises ``error``."""
    reason = str(error) if isinstance(error, AltoError) else f"{type(error).__name__}: {error}"
    if isinstance(error, DiskFullError) or (isinstance(error, OSError) and is_disk_full(error)):
        return Ending(outcome=Outcome.FAILED, reason=reason, error=DiskFullError.__name__)
    is_lost = isinstance(error, _TRANSIENT) or not isinstance(error, AltoError)
    return Ending(outcome=Outcome.LOST if is_lost else Outcome.FAILED, reason=reason, error=type(error).__name__)
