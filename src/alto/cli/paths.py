"""Runs on the command line: paths that the operating system cannot look up, and the latest run where none is named."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from alto.cli.completion import RUNS, complete_run
from alto.errors import RunNotFoundError
from alto.runs import QueueDir, RunState, latest_run, resume_command, summarise

__all__ = ["AnyRun", "InterruptedRun", "Run", "interrupted_run", "reachable", "run_to_evaluate", "run_to_show"]


def reachable(path: Path | None) -> Path | None:
    """``path`` unchanged, whether or not it exists.

    Raises:
        RunNotFoundError: A name is too long, a link leads to itself, or a parent folder cannot be read.
    """
    try:
        if path is not None:
            path.resolve().exists()
    except (OSError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "a link that leads to itself"
        raise RunNotFoundError(f"expected a path that can be looked up, found {path} ({reason}); correct it") from None
    return path


Run = Annotated[Path, typer.Argument(help="Run directory.", callback=reachable, autocompletion=complete_run)]

AnyRun = Annotated[
    Path | None,
    typer.Argument(
        help="Run directory; by default the latest in ./runs.", callback=reachable, autocompletion=complete_run
    ),
]
"""A run, or None where the user names none."""


InterruptedRun = Annotated[
    Path | None,
    typer.Argument(
        help="Run directory, or that of a queue; by default the latest in ./runs that is interrupted.",
        callback=reachable,
        autocompletion=complete_run,
    ),
]
"""A run to resume, or None where the user names none."""


def run_to_show(run: Path | None, command: str) -> Path:
    """``run``, or the latest run or queue in ``runs``.

    Args:
        run: As the user names it; None where that is left to the command.
        command: Its name, for the message.

    Raises:
        RunNotFoundError: None is named, and there is none.
    """
    return run or _taken(latest_run(RUNS), "run", f"alto {command} RUN")


def run_to_evaluate() -> Path:
    """The latest run in ``runs``; a queue has no adapter of its own.

    Raises:
        RunNotFoundError: There is none.
    """
    found = latest_run(RUNS, lambda root: not QueueDir.exists(root))
    return _taken(found, "run", "alto eval RUN")


def interrupted_run(run: Path | None) -> Path:
    """``run``, or the latest run or queue in ``runs`` that is interrupted.

    Raises:
        RunNotFoundError: None is named, and there is none.
    """
    if run is not None:
        return run
    found = latest_run(RUNS, lambda root: summarise(root).state is RunState.INTERRUPTED)
    return _taken(found, "interrupted run", resume_command("RUN"))


def _taken(found: Path | None, what: str, command: str) -> Path:
    """The run that is taken, which is said on stderr."""
    if found is None:
        raise RunNotFoundError(
            f"expected a run, found that none is named and that {RUNS.resolve()} has no {what}; name one ({command}), "
            "or begin one with: alto tune FILE"
        )
    typer.echo(f"latest {what}: {found}", err=True)
    return found
