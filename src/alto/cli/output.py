"""The output of commands: progress while a task runs, and results as strict JSON."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TextIO, cast

import typer
from rich.console import Console
from rich.text import Text

from alto.base import resume_command
from alto.errors import AltoError
from alto.runs import JournalEntry, Observer, QueueProgress, events

if TYPE_CHECKING:
    from alto.results import TaskResult

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
        self._is_polled = False
        self._has_begun = what == "run"  # before a queue begins, its tasks are measured
        self._has_ended = False

    def requested(self) -> bool:
        """Return whether a signal has come. Training calls this method; from the first call on, it can stop cleanly."""
        self._is_polled = True
        return self.exit_code != 0

    def observe(self, entry: JournalEntry) -> None:
        """Detect from events that the work has ended, so there is nothing to stop cleanly. The start of training is
        detected by :meth:`requested` instead, because events arrive later, on another thread."""
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
        """Tell the user the effect of the latest signal."""
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
        """Return the advice for the user after an immediate stop: the command that resumes the work, if it had begun.

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
        return self._is_polled and not self._has_ended


WIDTH_OF_FILES = 200
"""Width of output that goes to a file or pipe, in characters; no terminal can be widened there."""


def output_console() -> Console:
    """Return a console for standard output: as wide as its terminal, or else wide enough for all columns of tables.

    Rich would assume 80 characters for a file, and fill the lines of tables with spaces. The variable ``COLUMNS`` sets
    another width.
    """
    console = Console()
    if console.is_terminal or console.is_jupyter:
        return console
    return Console(file=cast("TextIO", _Unpadded()), width=None if "COLUMNS" in os.environ else WIDTH_OF_FILES)


class _Unpadded:
    """Standard output without spaces at the ends of lines."""

    def write(self, text: str) -> int:
        return sys.stdout.write(re.sub(r" +(?=\n)", "", text))

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stdout, name)


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
    handled = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    with _announcing(interrupt, handled):
        before = {number: signal.signal(number, interrupt.handle) for number in handled}
        try:
            yield interrupt
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


@contextlib.contextmanager
def _announcing(interrupt: Interrupt, numbers: Collection[int]) -> Iterator[None]:
    """Start a thread that calls :meth:`Interrupt.on_signal` as soon as one of the signals ``numbers`` arrives
    inside the block.

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


@contextlib.contextmanager
def progress(console: Console, interrupt: Interrupt, *, silent: bool) -> Iterator[list[Observer]]:
    """Yield observers that show a run: the live table on a terminal, plain lines elsewhere, none when ``silent``.

    Args:
        interrupt: Tells the user what a signal does, inside the live table while there is one.
    """
    if silent:
        yield []
        return
    from alto.views import open_view

    with open_view(console) as view, _announced_in(view, interrupt):
        yield [_until_pipe_closes(view.observe)]


@contextlib.contextmanager
def queue_progress(
    console: Console, interrupt: Interrupt, known: QueueProgress, *, silent: bool
) -> Iterator[list[Observer]]:
    """Yield observers that keep and show the progress of a queue, as :func:`progress` does for a run.

    Args:
        interrupt: See :func:`progress`.
        known: The progress before the first observed entry; it is updated.
        silent: Whether nothing is shown.
    """
    from alto.views import open_queue_view

    if silent:
        yield [known.apply]
        return
    with open_queue_view(console, known) as view, _announced_in(view, interrupt):
        yield [_until_pipe_closes(view.observe)]


@contextlib.contextmanager
def _announced_in(view: object, interrupt: Interrupt) -> Iterator[None]:
    """Show messages about signals in the live table inside the block: a line on stderr could scroll away above it."""
    from alto.views import LiveQueueView, LiveView

    if not isinstance(view, LiveView | LiveQueueView):
        yield
        return
    before, interrupt.announce = interrupt.announce, view.announce
    try:
        yield
    finally:
        interrupt.announce = before


def _until_pipe_closes(observe: Observer) -> Observer:
    """Return an observer that lets the run continue when the pipe of its output closes (``alto tune FILE | head``)."""

    def observe_if_read(entry: JournalEntry) -> None:
        try:
            observe(entry)
        except BrokenPipeError:
            # Discard all later output, including that at the interpreter's exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    return observe_if_read


def print_error(error: AltoError) -> None:
    """Print an error on stderr; terminal escapes in names of files and columns are removed."""
    from alto.views.plan import visible

    # Text, not markup: rich would read rows.jsonl:100: as an emoji.
    Console(stderr=True).print(Text(visible(f"{type(error).__name__}: {error}")), soft_wrap=True)


def print_stop(how_to_continue: str) -> None:
    """Print on stderr that the work was stopped immediately, and how to continue it. A command is not wrapped."""
    from alto.views.plan import visible

    Console(stderr=True).print(Text(visible(f"Stopped at once; {how_to_continue}")), soft_wrap=True)


def print_interrupted(console: Console, root: Path) -> None:
    """Print that no process works on the run or queue in ``root``, and the command that resumes it, unwrapped."""
    from alto.views.plan import visible

    text = f"no process works on it; continue with: {resume_command(root)}"
    console.print(Text(visible(text)), soft_wrap=True)


def print_notices(results: Sequence[TaskResult]) -> None:
    """Print the notices of results on stderr."""
    for result in results:
        for notice in result.notices:
            Console(stderr=True).print(f"{result.task}: {notice}", soft_wrap=True, highlight=False, markup=False)


def print_json(facts: Mapping[str, Any]) -> None:
    """Print ``facts`` as strict JSON; numbers that are not finite become null."""
    typer.echo(json.dumps(_strict(facts), indent=2, allow_nan=False))


def result_facts(result: TaskResult) -> dict[str, Any]:
    """Return a task's result as plain values."""
    return {
        **dataclasses.asdict(result.outcome),
        "notes": result.notes,
        "samples_saved": result.samples_saved,
        "samples_cut_off": result.samples_cut_off,
    }


def _strict(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    return value
