"""Completions for the shell: folders of runs and queues, and keys after ``--set``."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from alto.runs import QueueDir, find_runs
from alto.spec import EarlyExit, JobConfig, Search, Simulation, Task
from alto.spec.method import OWN_METHODS, find_method

__all__ = ["complete_job_key", "complete_queue", "complete_run", "complete_simulation_key", "complete_task_key"]

RUNS = Path("runs")
"""Folder of runs, unless the user names another."""


def complete_run(incomplete: str) -> list[str]:
    """Return folders of runs and queues that begin with ``incomplete``, newest first, from the folder that it names or
    else from ``runs``."""
    return [path for path, _ in _found(incomplete)]


def complete_queue(incomplete: str) -> list[str]:
    """Return the folders of queues that begin with ``incomplete``, newest first."""
    return [path for path, root in _found(incomplete) if QueueDir.exists(root)]


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


def _found(incomplete: str) -> list[tuple[str, Path]]:
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
