"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from alto.base import resume_command
from alto.errors import RunNotFoundError
from alto.runs import QueueDir, RunState, find_runs, latest_run, summarise
from alto.spec import OWN_METHODS, EarlyExit, JobConfig, Search, Simulation, Task, find_method

RUNS = Path("runs")
"""Folder of runs, unless the user names another."""

DEFAULT_MODEL = "alto-tiny"
"""Base model that ships with ALTO."""


def complete_run(incomplete: str) -> list[str]:
    """Return the folders of runs and queues with paths that begin with ``incomplete``, newest first. If ``incomplete``
    contains no folder, the folder is ``runs``."""
    return [path for path, _ in _matching_runs(incomplete)]


def complete_queue(incomplete: str) -> list[str]:
    """Return the folders of queues that begin with ``incomplete``, newest first."""
    return [path for path, root in _matching_runs(incomplete) if QueueDir.exists(root)]


def complete_task_key(incomplete: str) -> list[str]:
    """Return keys of a task file with ``=``, and keys of its mappings after their name, such as ``search_space.``."""
    of_job = _job_keys()
    keys = [*Task.model_fields, *of_job]
    inner = {"search_space": of_job, "early_exit": EarlyExit.model_fields, "search": Search.model_fields}
    dotted = [f"{name}.{key}" for name, keys_of in inner.items() for key in keys_of]
    return _beginning(incomplete, [*keys, *(dotted if "." in incomplete else ())])


def complete_job_key(incomplete: str) -> list[str]:
    """Return keys of a job's configuration, with ``=``."""
    return _beginning(incomplete, _job_keys())


def complete_simulation_key(incomplete: str) -> list[str]:
    """Return keys of a simulation file, with ``=``."""
    return _beginning(incomplete, Simulation.model_fields)


def _matching_runs(incomplete: str) -> list[tuple[str, Path]]:
    parent, slash, _ = incomplete.rpartition("/")
    folder = f"{parent}/" if slash else f"{RUNS}/"
    found = ((f"{folder}{root.name}", root) for root in find_runs(folder))
    return [(path, root) for path, root in found if path.startswith(incomplete)]


def _job_keys() -> list[str]:
    of_methods = (find_method(name).entry.settings.model_fields for name in OWN_METHODS)
    fields = (key for key in JobConfig.model_fields if key != "objective")
    return list(dict.fromkeys([*fields, *(key for fields in of_methods for key in fields)]))


def _beginning(incomplete: str, keys: Iterable[str]) -> list[str]:
    return sorted({f"{key}=" for key in keys if key.startswith(incomplete)})


OutputDir = Annotated[Path, typer.Option("--output-dir", "-o", help="Folder in which run directories are made.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the file.", autocompletion=complete_task_key),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON and nothing else.")]
Strategy = Annotated[
    str, typer.Option("--strategy", help="How a task uses several GPUs: adapter_parallel, or single for one process.")
]
TrustRemoteCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code",
        help="Allow the Python code that comes with the base model to run; the files of a run cannot allow it.",
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")]


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
        RunNotFoundError: There is no run.
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
