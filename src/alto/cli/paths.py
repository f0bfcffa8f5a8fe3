"""Arguments that name runs: refuses paths that cannot be looked up, and takes the latest run if none is named."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from alto.cli.completion import RUNS, complete_run
from alto.errors import RunNotFoundError
from alto.runs import QueueDir, RunState, latest_run, resume_command, summarise

__all__ = ["AnyRun", "InterruptedRun", "Run", "interrupted_run", "reachable", "run_to_evaluate", "run_to_show"]


def reachable(path: Path | None) -> Path | None:
    """Return ``path`` unchanged, whether or not it exists.

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
"""A run; None if the user names none."""


InterruptedRun = Annotated[
    Path | None,
    typer.Argument(
        help="Directory of a run or of a queue; by default the latest interrupted one in ./runs.",
        callback=reachable,
        autocompletion=complete_run,
    ),
]
"""A run to resume; None if the user names none."""


def run_to_show(run: Path | None, command: str) -> Path:
    """Return ``run``, or the latest run or queue in ``runs``.

    Args:
        run: The run that the user names, if any.
        command: Name of the command, for the message.

    Raises:
        RunNotFoundError: No run is named, and there is none.
    """
    return run or _taken(latest_run(RUNS), "run", f"alto {command} RUN")


def run_to_evaluate() -> Path:
    """Return the latest run in ``runs``; queues are skipped because they have no adapter of their own.

    Raises:
        RunNotFoundError: There is none.
    """
    found = latest_run(RUNS, lambda root: not QueueDir.exists(root))
    return _taken(found, "run", "alto eval RUN")


def interrupted_run(run: Path | None) -> Path:
    """Return ``run``, or the latest interrupted run or queue in ``runs``.

    Raises:
        RunNotFoundError: No run is named, and none is interrupted.
    """
    if run is not None:
        return run
    found = latest_run(RUNS, lambda root: summarise(root).state is RunState.INTERRUPTED)
    return _taken(found, "interrupted run", resume_command("RUN"))


def _taken(found: Path | None, what: str, command: str) -> Path:
    """Return the found run, and print it on stderr."""
    if found is None:
        raise RunNotFoundError(
            f"expected a run, found that none is named and that {RUNS.resolve()} has no {what}; name one ({command}), "
            "or begin one with: alto tune FILE"
        )
    typer.echo(f"latest {what}: {found}", err=True)
    return found
