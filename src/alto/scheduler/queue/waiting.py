"""Finds the tasks that start now: a small problem, whose size does not depend on the number of waiting and running
tasks.
"""

from __future__ import annotations

import bisect
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter

from alto.records import Node, Schedule
from alto.scheduler.inter_task import LIST_ORDERS, SchedulingProblem, TaskDemand, fewest_nodes, schedule_tasks
from alto.scheduler.queue.task import ScheduledTask

_Entry = tuple[tuple[float, ...], int, ScheduledTask]
_number = attrgetter("number")


class Waiting:
    """The waiting tasks, always sorted by submission and by the list method, so that a plan need not sort thousands of
    tasks.

    Args:
        list_method: The list method that sorts them.
    """

    def __init__(self, list_method: str) -> None:
        self._order = LIST_ORDERS[list_method]
        self._is_strict = list_method == "fifo"
        self._by_number: list[ScheduledTask] = []
        self._shapes: dict[tuple[int, str], list[_Entry]] = {}
        self._priorities: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._by_number)

    def __iter__(self) -> Iterator[ScheduledTask]:
        return iter(self._by_number)

    @property
    def has_priorities(self) -> bool:
        """Whether priorities differ."""
        return len(self._priorities) > 1

    def add(self, task: ScheduledTask) -> None:
        bisect.insort(self._by_number, task, key=_number)
        bisect.insort(self._shapes.setdefault(self._shape(task), []), self._entry(task))
        self._priorities[task.demand.priority] += 1

    def remove(self, task: ScheduledTask) -> None:
        """Remove ``task``, whose demand must be unchanged since it was added."""
        del self._by_number[bisect.bisect_left(self._by_number, task.number, key=_number)]
        shape = self._shapes[self._shape(task)]
        del shape[bisect.bisect_left(shape, self._entry(task))]
        self._priorities[task.demand.priority] -= 1
        if not self._priorities[task.demand.priority]:
            del self._priorities[task.demand.priority]

    def first(self, num_free: int, now_s: float) -> Iterable[Iterator[ScheduledTask]]:
        """Yield, for every shape, the first tasks in the method's order that fit on ``num_free`` GPUs together.

        Tasks of one shape (GPUs and tenant) differ only in their durations, so later tasks of the shape cannot start
        now. Under ``fifo`` all tasks are of one shape. Tasks that pause or are larger than the cluster are left out.
        """
        for entries in self._shapes.values():
            yield _that_fit((task for *_, task in entries if task.ready_s <= now_s and not task.waits_for), num_free)

    def _shape(self, task: ScheduledTask) -> tuple[int, str]:
        return (0, "") if self._is_strict else (task.demand.num_gpus, task.demand.tenant)

    def _entry(self, task: ScheduledTask) -> _Entry:
        return self._order(task.demand), task.number, task


def _that_fit(tasks: Iterable[ScheduledTask], num_free: int) -> Iterator[ScheduledTask]:
    for task in tasks:
        num_free -= task.demand.num_gpus
        if num_free < 0:
            return
        yield task


def schedule_of_now(
    waiting: Waiting,
    *,
    method: str,
    nodes: Sequence[Node],
    free: tuple[Node, ...],
    quotas: Mapping[str, int],
    in_use: Counter[str],
    now_s: float,
) -> Schedule | None:
    """Return the tasks of the list schedule that start now. All waiting tasks must have the same priority.

    A list schedule is greedy: the tasks that start now depend only on the free GPUs, the quotas and the order of the
    tasks, not on later starts or ends. So only the free GPUs and the first tasks of each shape are considered.

    Args:
        free: The free GPUs of ``nodes``.
        in_use: GPUs that each tenant holds.

    Returns:
        The schedule without later starts; None if no task can start.
    """
    left = {tenant: max(0, quota - in_use[tenant]) for tenant, quota in quotas.items()}
    sizes = sorted((len(node.gpus) for node in free), reverse=True)
    fitting: dict[int, bool] = {}

    def can_start(demand: TaskDemand) -> bool:
        count = demand.num_gpus
        if count not in fitting:
            # A task spans as few nodes as it would in an idle cluster, not more nodes with a few free GPUs each.
            fitting[count] = sum(sizes[: fewest_nodes(nodes, count)]) >= count
        return fitting[count] and count <= left.get(demand.tenant, count)

    # A task that cannot start also blocks later tasks of its shape. No task shares an executor: with so many waiting
    # tasks every GPU is busy, and the first tasks alone do not show which tasks should share.
    pending = [
        task.demand if task.demand.sharing is None else replace(task.demand, sharing=None)
        for tasks in waiting.first(sum(sizes), now_s)
        for task in itertools.takewhile(lambda task: can_start(task.demand), tasks)
    ]
    if not pending:
        return None
    problem = SchedulingProblem(nodes=free, pending=tuple(pending), quotas={name: n for name, n in left.items() if n})
    plan = schedule_tasks(problem, method=method)
    placements = tuple(placement for placement in plan.placements if placement.start_s == 0)
    return replace(
        plan,
        placements=placements,
        status="heuristic",
        bound_s=0.0,
        notice=f"only the {len(placements)} tasks that start now, of {len(waiting)} waiting tasks",
    )
