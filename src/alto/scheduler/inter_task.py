"""In which order tasks run on one device. Pure.

On one device every order has the same makespan, so an optimal schedule is one that also has the least sum of completion
times: shortest task first. ``MILP`` and ``cp-sat`` ask for an optimum and get this one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from alto.errors import SpecError, UnsupportedError
from alto.records import Placement, Schedule

__all__ = ["METHODS", "TaskDemand", "schedule_tasks"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskDemand:
    """What the scheduler knows of a task.

    Attributes:
        num_samples: Training samples of all its jobs without early exit: the measure of its length.
    """

    task: str
    num_gpus: int
    num_samples: int


_SortKey = Callable[[TaskDemand], int]
_ORDERS: dict[str, _SortKey] = {
    "fifo": lambda demand: 0,
    "sjf": lambda demand: demand.num_samples,
    "lpt": lambda demand: -demand.num_samples,
    "cp-sat": lambda demand: demand.num_samples,
    "milp": lambda demand: demand.num_samples,
}
METHODS = tuple(_ORDERS)


def schedule_tasks(demands: Sequence[TaskDemand], *, method: str, total_gpus: int) -> Schedule:
    """An order of ``demands`` on one device; equal tasks keep the order they were given in.

    Raises:
        SpecError: The method is unknown.
        UnsupportedError: More than one device is asked for.
    """
    name = method.lower()
    if name not in _ORDERS:
        raise SpecError(f"method: expected one of {', '.join(METHODS)}, found {method!r}")
    for demand in demands:
        if demand.num_gpus > total_gpus or total_gpus > 1:
            raise UnsupportedError(
                f"task {demand.task!r}: expected num_gpus and total_gpus of 1, which is all this version schedules, "
                f"found {demand.num_gpus} and {total_gpus}; set both to 1"
            )
    order = sorted(range(len(demands)), key=lambda index: _ORDERS[name](demands[index]))
    return Schedule(
        method=name,
        placements=tuple(
            Placement(
                task=demands[index].task,
                task_index=index,
                gpus=(0,),
                order=position,
                num_samples=demands[index].num_samples,
            )
            for position, index in enumerate(order)
        ),
    )
