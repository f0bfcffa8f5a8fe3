"""How many GPUs a task may ask for."""

from __future__ import annotations

from alto.errors import UnsupportedError
from alto.spec import Task

__all__ = ["STRATEGIES", "check_num_gpus"]

STRATEGIES = ("adapter_parallel", "single")


def check_num_gpus(task: Task, strategy: str, *, most: int, has_gpus: bool) -> None:
    """Whether a task that asks for several GPUs can have them.

    Args:
        task: The task.
        strategy: Strategy of the engine.
        most: GPUs of the largest machine, or slots of its CPU.
        has_gpus: False where CPU slots stand for them: then a single process may have several.

    Raises:
        UnsupportedError: It cannot, or what chooses its winner cannot.
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
            f"num_gpus: expected at most {most}, the GPUs of one machine, found {task.num_gpus} for {task.name!r}: its "
            "ranks do not reach over machines in this version; lower it"
        )
    if task.scoring is not None:
        found = task.select_by if isinstance(task.select_by, str) else task.scoring.scorer
        raise UnsupportedError(
            f"select_by: expected 'metric' with num_gpus {task.num_gpus}, found {found!r} for {task.name!r}: "
            "answers are written by one process on a base model that it holds whole; remove the key, or set "
            "num_gpus to 1"
        )
