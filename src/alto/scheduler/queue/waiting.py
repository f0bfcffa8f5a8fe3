"""The waiting tasks, in the order of submission and in the order of a list method."""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterable, Iterator
from operator import attrgetter

from alto.scheduler.inter_task import LIST_ORDERS
from alto.scheduler.queue.task import QueuedTask

__all__ = ["Waiting"]

_Entry = tuple[tuple[float, ...], int, QueuedTask]
_number = attrgetter("number")


class Waiting:
    """The waiting tasks, kept in both orders as they come and go, so that a plan does not sort thousands of tasks.

    Args:
        list_method: List method of the second order.
    """

    def __init__(self, list_method: str) -> None:
        self._order = LIST_ORDERS[list_method]
        self._is_strict = list_method == "fifo"
        self._by_number: list[QueuedTask] = []
        self._shapes: dict[tuple[int, str], list[_Entry]] = {}
        self._priorities: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._by_number)

    def __iter__(self) -> Iterator[QueuedTask]:
        return iter(self._by_number)

    @property
    def has_priorities(self) -> bool:
        """Whether priorities differ."""
        return len(self._priorities) > 1

    def add(self, task: QueuedTask) -> None:
        bisect.insort(self._by_number, task, key=_number)
        bisect.insort(self._shapes.setdefault(self._shape(task), []), self._entry(task))
        self._priorities[task.demand.priority] += 1

    def remove(self, task: QueuedTask) -> None:
        """Remove ``task``, whose demand must be unchanged since it was added."""
        del self._by_number[bisect.bisect_left(self._by_number, task.number, key=_number)]
        shape = self._shapes[self._shape(task)]
        del shape[bisect.bisect_left(shape, self._entry(task))]
        self._priorities[task.demand.priority] -= 1
        if not self._priorities[task.demand.priority]:
            del self._priorities[task.demand.priority]

    def first(self, num_free: int, now_s: float) -> Iterable[Iterator[QueuedTask]]:
        """Yield, for every shape, the first tasks in the method's order that fit on ``num_free`` GPUs together.

        Tasks of one shape (GPUs and tenant) differ only in their durations, so later tasks of the shape cannot start
        now. Under ``fifo`` all tasks are of one shape. Tasks that pause or are larger than the cluster are left out.
        """
        for entries in self._shapes.values():
            yield _within((task for *_, task in entries if task.ready_s <= now_s and not task.waits_for), num_free)

    def _shape(self, task: QueuedTask) -> tuple[int, str]:
        return (0, "") if self._is_strict else (task.demand.num_gpus, task.demand.tenant)

    def _entry(self, task: QueuedTask) -> _Entry:
        return self._order(task.demand), task.number, task


def _within(tasks: Iterable[QueuedTask], num_free: int) -> Iterator[QueuedTask]:
    for task in tasks:
        num_free -= task.demand.num_gpus
        if num_free < 0:
            return
        yield task
