"""The output of commands: progress while a task runs, and results as strict JSON."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.text import Text

from alto.errors import AltoError
from alto.runs import JournalEntry, Observer, QueueProgress, resume_command

if TYPE_CHECKING:
    from alto.cli.interrupt import Interrupt
    from alto.results import TaskResult

__all__ = [
    "print_error",
    "print_interrupted",
    "print_json",
    "print_notices",
    "print_stop",
    "progress",
    "queue_progress",
    "result_facts",
]


@contextlib.contextmanager
def progress(console: Console, interrupt: Interrupt, *, silent: bool) -> Iterator[list[Observer]]:
    """Yield observers that show a run: the live table on a terminal, plain lines elsewhere, none when ``silent``.

    Args:
        interrupt: Tells the user what a signal does, inside the live table while there is one.
    """
    if silent:
        yield []
        return
    from alto.export import open_view

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
    from alto.export import open_queue_view

    if silent:
        yield [known.apply]
        return
    with open_queue_view(console, known) as view, _announced_in(view, interrupt):
        yield [_until_pipe_closes(view.observe)]


@contextlib.contextmanager
def _announced_in(view: object, interrupt: Interrupt) -> Iterator[None]:
    """Show messages about signals in the live table inside the block: a line on stderr could scroll away above it."""
    from alto.export import LiveQueueView, LiveView

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
    from alto.export.preview import visible

    # Text, not markup: rich would read rows.jsonl:100: as an emoji.
    Console(stderr=True).print(Text(visible(f"{type(error).__name__}: {error}")), soft_wrap=True)


def print_stop(how_to_continue: str) -> None:
    """Print on stderr that the work was stopped at once, and how to continue it; a command is not wrapped."""
    from alto.export.preview import visible

    Console(stderr=True).print(Text(visible(f"Stopped at once; {how_to_continue}")), soft_wrap=True)


def print_interrupted(console: Console, root: Path) -> None:
    """Print that no process works on the run or queue in ``root``, and the command that resumes it, unwrapped."""
    from alto.export.preview import visible

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
