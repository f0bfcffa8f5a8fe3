"""How many GPUs a task may ask for."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from rich.console import Console

from alto.errors import UnsupportedError
from alto.results import TaskResult
from alto.runs import Observer
from alto.spec import Task
from alto.views import open_view

STRATEGIES = ("adapter_parallel", "single")


def is_launched(task: Task, strategy: str, device: torch.device) -> bool:
    """Return whether ``task`` is trained by one process per rank instead of by this process.

    Raises:
        UnsupportedError: See :func:`check_num_gpus`.
    """
    has_gpus = device.type == "cuda"
    most = torch.cuda.device_count() if has_gpus else task.num_gpus
    check_num_gpus(task, strategy, most=most, has_gpus=has_gpus)
    return task.num_gpus > 1 and strategy != "single"


def check_num_gpus(task: Task, strategy: str, *, most: int, has_gpus: bool) -> None:
    """Check that the task can have the number of GPUs that it asks for.

    Args:
        most: GPUs of the largest machine, or slots of its CPU.
        has_gpus: False if CPU slots are used instead of GPUs; one process may then have several slots.

    Raises:
        UnsupportedError: There are not enough GPUs, or scoring the finalists or generating samples does not work on
            several GPUs.
    """
    if task.num_gpus == 1 or (strategy == "single" and not has_gpus):
        return
    if strategy == "single":
        raise UnsupportedError(
            f"num_gpus: expected 1 under the strategy 'single', found {task.num_gpus} for {task.name!r}; set it to 1, "
            "or train with the strategy 'adapter_parallel'"
        )
    if task.num_gpus > most:
        raise UnsupportedError(
            f"num_gpus: expected at most {most}, the GPUs of one machine, found {task.num_gpus} for {task.name!r}; all "
            "ranks of a task run on one machine in this version: lower num_gpus"
        )
    if task.scoring is not None:
        found = task.select_by if isinstance(task.select_by, str) else task.scoring.scorer
        raise UnsupportedError(
            f"select_by: expected 'metric' with num_gpus {task.num_gpus}, found {found!r} for {task.name!r}: "
            "one process writes the answers and needs the whole base model; remove the key, or set num_gpus to 1"
        )
    if task.num_samples:
        raise UnsupportedError(
            f"num_samples: expected 0 with num_gpus {task.num_gpus}, found {task.num_samples} for {task.name!r}: one "
            "process generates the texts and needs the whole base model; remove the key, or set num_gpus to 1"
        )


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
