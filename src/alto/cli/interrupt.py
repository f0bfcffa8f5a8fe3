"""Ctrl-C, SIGTERM and a closed terminal: the first lets the running task stop cleanly, the second stops it at once."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from types import FrameType

import typer

from alto.runs import JournalEntry, events, resume_command

__all__ = ["Interrupt", "catching_signals"]

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupt:
    """Records whether the user wants the work to stop, and tells the user what a signal does.

    Args:
        what: The thing that can be resumed: ``run`` or ``queue``.

    Attributes:
        exit_code: 128 plus the signal's number, as in shells; 0 before a signal came.
        announce: Called on its own thread with a sentence for the user when a signal came; writes to stderr, unless a
            live table replaces it.
    """

    def __init__(self, what: str = "run") -> None:
        self.exit_code = 0
        self.announce: Callable[[str], None] = _write
        self._what = what
        self._num_announced = 0
        self._is_asked = False
        self._has_begun = what == "run"  # before a queue begins, its tasks are measured
        self._has_ended = False

    def requested(self) -> bool:
        """Return whether a signal has come. Training calls this, so from the first call on it can stop cleanly."""
        self._is_asked = True
        return self.exit_code != 0

    def observe(self, entry: JournalEntry) -> None:
        """Detect from events that nothing is left to stop cleanly. The start of training is not detected here, because
        events arrive a moment later, on another thread; :meth:`requested` shows it."""
        match entry.event:
            case events.TaskCompleted() | events.TaskInterrupted():
                self._has_ended = True
            case events.QueueCompleted() | events.QueueInterrupted():
                self._has_ended = True
            case events.QueueStarted():
                self._has_begun = True
            case events.TaskResumed() | events.QueueResumed():  # earlier entries come from an earlier process
                self._has_begun = True
                self._has_ended = False

    def handle(self, number: int, _: FrameType | None) -> None:
        """Handle a signal."""
        at_once = self.exit_code != 0 or not self._can_stop_cleanly
        self.exit_code = 128 + number
        if at_once:
            raise KeyboardInterrupt

    def on_signal(self) -> None:
        """Tell the user what the signal that has just come does."""
        self._num_announced += 1
        if self._num_announced > 1:
            text = f"Stopping at once; what the {self._what} trained since its last checkpoint will be trained again."
        elif not self._can_stop_cleanly:
            text = "Stopping at once."
        elif not self._has_begun:
            text = "Stopping after this measurement; nothing was trained yet. Press Ctrl-C again to stop at once."
        else:
            text = f"Stopping after this step; the {self._what} can be resumed. Press Ctrl-C again to stop at once."
        with contextlib.suppress(OSError, ValueError):  # the terminal or stream may be closed
            self.announce(text)

    def how_to_continue(self, stop: KeyboardInterrupt, root: Path | None) -> str:
        """Return what to tell the user after a stop at once: the whole command that resumes the work, if it had begun.

        Args:
            stop: The exception; the engine adds a note with the command if a run or queue had begun.
            root: The run or queue that was being resumed; None for a new one.
        """
        notes = getattr(stop, "__notes__", ())
        if notes:
            return str(notes[0])
        if root is not None:
            return f"continue with: {resume_command(root)}"
        return f"the {self._what} had not begun, so there is nothing to resume"

    @property
    def _can_stop_cleanly(self) -> bool:
        return self._is_asked and not self._has_ended


def _write(text: str) -> None:
    typer.echo(text, err=True)


@contextlib.contextmanager
def catching_signals(what: str = "run") -> Iterator[Interrupt]:
    """Handle signals inside the block.

    Args:
        what: The thing that can be resumed: ``run`` or ``queue``.
    """
    interrupt = Interrupt(what)
    # Ignored signals stay ignored, as with nohup or in a shell's background jobs.
    heeded = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    with _announcing(interrupt, heeded):
        before = {number: signal.signal(number, interrupt.handle) for number in heeded}
        try:
            yield interrupt
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


@contextlib.contextmanager
def _announcing(interrupt: Interrupt, numbers: Collection[int]) -> Iterator[None]:
    """Start a thread that calls :meth:`Interrupt.on_signal` as soon as one of these signals comes inside the block.

    The signal handler itself runs only between two Python instructions of the main thread, which may be inside one long
    call of torch. The interpreter writes to its wake-up file descriptor before that.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def watch() -> None:
        while number := os.read(reader, 1)[0]:
            if number in numbers:
                interrupt.on_signal()

    watcher = threading.Thread(target=watch, name="alto-signals", daemon=True)
    watcher.start()
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.write(writer, b"\0")  # ends the watcher; no signal has this number
        watcher.join()
        os.close(reader)
        os.close(writer)
