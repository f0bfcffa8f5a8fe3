"""Shows a task of the Python interface while it runs, and its result."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from rich.console import Console

from alto.export import open_view
from alto.results import TaskResult
from alto.runs import Observer

__all__ = ["show_result", "shown"]


@contextlib.contextmanager
def shown(progress: bool | None) -> Iterator[list[Observer]]:
    """Yield observers that show a run: the live table in a terminal, plain lines in a notebook or a file; none if
    nothing is to be shown.

    Args:
        progress: See :class:`alto.Engine`.
    """
    console = Console()
    if not _is_shown(console, progress):
        yield []
        return
    with open_view(console) as view:
        yield [view.observe]


def show_result(result: TaskResult, progress: bool | None) -> None:
    """Print the table of jobs of a task that was shown; a notebook displays the result itself."""
    console = Console()
    if _is_shown(console, progress) and not console.is_jupyter:
        console.print(result)


def _is_shown(console: Console, progress: bool | None) -> bool:
    return console.is_terminal or console.is_jupyter if progress is None else progress
