"""Ctrl-C, SIGTERM and a closed terminal: the first asks the running task to stop cleanly, the second stops at once."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

import typer

from alto.runs import Event

__all__ = ["Interrupt", "catching_signals"]

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupt:
    """Whether the user wants the task to stop.

    Attributes:
        exit_code: 128 and the signal's number, as shells have it.
    """

    def __init__(self) -> None:
        self.exit_code = 0
        self._is_training = False

    def requested(self) -> bool:
        """Whether a signal came while the task trained."""
        return self.exit_code != 0

    def observe(self, event: Event) -> None:
        """Events say whether there is anything to stop cleanly."""
        if event["event"] in ("task_started", "task_resumed", "queue_started", "queue_resumed"):
            self._is_training = True
        elif event["event"] in ("task_completed", "task_interrupted", "queue_completed", "queue_interrupted"):
            self._is_training = False

    def handle(self, number: int, _: FrameType | None) -> None:
        """The signal handler."""
        at_once = self.requested() or not self._is_training
        self.exit_code = 128 + number
        if at_once:
            raise KeyboardInterrupt
        with contextlib.suppress(OSError):  # a closed terminal takes no words
            typer.echo("Stopping after this step; once more stops at once.", err=True)


@contextlib.contextmanager
def catching_signals() -> Iterator[Interrupt]:
    """Handle signals within the block."""
    interrupt = Interrupt()
    # What is ignored stays so: nohup, a shell's background jobs.
    heeded = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, interrupt.handle) for number in heeded}
    try:
        yield interrupt
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
