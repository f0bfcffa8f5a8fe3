"""Loads the host that an executor's process runs, and describes how a run in it ended."""

from __future__ import annotations

import contextlib
import importlib
import os
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

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


@dataclass(frozen=True, slots=True, kw_only=True)
class HostedRun:
    """A run for a host to work on.

    Attributes:
        number: Unique in the process.
        is_interrupted: Returns whether to stop; each call is a heartbeat.
    """

    number: int
    ticket: TaskTicket
    is_interrupted: Callable[[], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnd:
    """The end of a hosted run.

    Attributes:
        error: The error that ended it; None if it finished.
        notices: Other problems, such as a missing report, as sentences for the user.
    """

    error: BaseException | None = None
    notices: tuple[str, ...] = ()


class Host(Protocol):
    """Works on several runs in one process, in turns. A launch names its class, which is called without arguments."""

    def attach(self, run: HostedRun) -> None:
        """Start or resume a run in addition to the others; an error raised here stops only that run."""

    def turn(self) -> Mapping[int, RunEnd]:
        """Work on all runs for a moment; return the ends of those that have ended, by number."""

    @property
    def is_usable(self) -> bool:
        """Whether it can work on further runs; if not, its process ends after its current runs."""


_INTERRUPTIONS = (TaskInterruptedError, KeyboardInterrupt)

_TRANSIENT = (RunWriteError, RunBusyError, DeviceMemoryError, RankConnectionError)
"""Errors that may not recur in the next attempt or on another machine; a full disk does recur."""


def load_host(name: str) -> type[Host]:
    """Return the class called ``module:name``."""
    module, _, attribute = name.partition(":")
    host: type[Host] = getattr(importlib.import_module(module), attribute)
    return host


def error_class(name: str) -> type[AltoError] | None:
    """Return ALTO's error class of that name; None for any other name."""
    found = getattr(errors, name, None) if name else None
    return found if isinstance(found, type) and issubclass(found, AltoError) else None


def run_host(host: str, run_dir: str, is_interrupted: Callable[[], bool]) -> Ending:
    """Do the work of a :class:`alto.cluster.Launch` in a process of a package's cluster, which passes no ticket on;
    return how it ended, and print an error's traceback.

    Args:
        host, run_dir: See :class:`alto.cluster.Launch`.
        is_interrupted: Returns whether to save and end; called between steps.
    """
    trust_remote_code = os.environ.get(TRUST_VARIABLE) == "1"
    ticket = TaskTicket(task=Path(run_dir).name, run_dir=run_dir, host=host, trust_remote_code=trust_remote_code)
    return work_alone(ticket, is_interrupted)


def work_alone(ticket: TaskTicket, is_interrupted: Callable[[], bool]) -> Ending:
    """Work on one run to its end; arguments and result as in :func:`run_host`."""
    try:
        host = load_host(ticket.host)()
        host.attach(HostedRun(number=0, ticket=ticket, is_interrupted=is_interrupted))
        while not (ended := host.turn()):
            pass
        end = ended[0]
    except BaseException as error:
        end = RunEnd(error=error)
    return ending_of(end)


def ending_of(end: RunEnd) -> Ending:
    """Return how the attempt at a run ended; print an error's traceback."""
    if end.error is None:
        return Ending(outcome=Outcome.FINISHED, notices=end.notices)
    if not isinstance(end.error, _INTERRUPTIONS):
        with contextlib.suppress(OSError):  # the log may be on the full disk
            traceback.print_exception(end.error)
    return ending_by(end.error)


def ending_by(error: BaseException) -> Ending:
    """Return how an attempt ends that raises ``error``."""
    if isinstance(error, _INTERRUPTIONS):
        reason = str(error) or "stopped on request before it began"
        return Ending(outcome=Outcome.INTERRUPTED, reason=reason, error=type(error).__name__)
    reason = str(error) if isinstance(error, AltoError) else f"{type(error).__name__}: {error}"
    if isinstance(error, DiskFullError) or (isinstance(error, OSError) and is_disk_full(error)):
        return Ending(outcome=Outcome.FAILED, reason=reason, error=DiskFullError.__name__)
    is_lost = isinstance(error, _TRANSIENT) or not isinstance(error, AltoError)
    return Ending(outcome=Outcome.LOST if is_lost else Outcome.FAILED, reason=reason, error=type(error).__name__)
