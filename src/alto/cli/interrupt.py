"""Ctrl-C, SIGTERM and a closed terminal: the first lets the running task stop cleanly, the second stops at once."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

import typer

from alto.runs import JournalEntry, events

__all__ = ["Interrupt", "catching_signals"]

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupt:
    """Whether the user wants the task to stop.

    Attributes:
        exit_code: 128 and the signal's number, as shells have it.
    """

    def __init__(self) -> None:
        self.exit_code = 0
        self._is_asked = False
        self._has_ended = False

    def requested(self) -> bool:
        """Whether a signal came while the task trained. Training calls this, so from its first call on it can stop
        cleanly."""
        self._is_asked = True
        return self.exit_code != 0

    def observe(self, entry: JournalEntry) -> None:
        """Detect from events that nothing is left to stop cleanly. That there is something is known from the calls of
        training: events arrive a moment later, on another thread."""
        match entry.event:
            case events.TaskCompleted() | events.TaskInterrupted():
                self._has_ended = True
            case events.QueueCompleted() | events.QueueInterrupted():
                self._has_ended = True
            case events.TaskResumed() | events.QueueResumed():  # earlier entries are of an earlier process
                self._has_ended = False

    def handle(self, number: int, _: FrameType | None) -> None:
        """The signal handler."""
        at_once = self.exit_code != 0 or not self._is_asked or self._has_ended
        self.exit_code = 128 + number
        if at_once:
            raise KeyboardInterrupt
        with contextlib.suppress(OSError):  # a closed terminal cannot be written to
            typer.echo("Stopping after this step; once more stops at once.", err=True)


@contextlib.contextmanager
def catching_signals() -> Iterator[Interrupt]:
    """Handle signals within the block."""
    interrupt = Interrupt()
    # Ignored signals stay ignored: nohup, a shell's background jobs.
    heeded = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, interrupt.handle) for number in heeded}
    try:
        yield interrupt
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
