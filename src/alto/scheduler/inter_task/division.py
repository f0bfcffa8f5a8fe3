"""Divisions of tasks among executors: own work as even as possible, and small changes of a division."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from alto.records import Sharing
from alto.scheduler.inter_task.colocation import fits
from alto.scheduler.inter_task.problem import TaskDemand

__all__ = ["Bin", "Division", "divide", "neighbours"]

Division = tuple["Bin", ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bin:
    """An executor and the tasks planned for it.

    Attributes:
        tasks: The planned tasks, all of which may share.
        executor: The running executor that they join; empty: a new one.
        running: Sharing facts of the tasks that already run in it.
    """

    tasks: tuple[TaskDemand, ...] = ()
    executor: str = ""
    running: tuple[Sharing, ...] = ()

    def holds(self, *tasks: TaskDemand) -> bool:
        """Return whether ``tasks`` fit together with the tasks that run in it; a single task always does."""
        if len(tasks) + len(self.running) <= 1:
            return True
        return fits([*self.running, *map(_sharing, tasks)])


def divide(demands: Sequence[TaskDemand], bins: Sequence[Bin], loads_s: Sequence[float]) -> Division:
    """Put each task into the bin with the least load that can hold it, the largest own work first, and return the bins.

    A task that no bin can hold gets a new one. The steps of a bin are paid once, so only its first task counts in full.

    Args:
        demands: Tasks that may all share.
        bins: The existing bins.
        loads_s: Seconds of own work that each bin already has, or seconds until it can begin.
    """
    found, loads_s = list(bins), list(loads_s)
    heap = [(load_s, number) for number, load_s in enumerate(loads_s)]
    heapq.heapify(heap)
    for demand in sorted(demands, key=lambda demand: -_own_s(demand)):
        passed: list[tuple[float, int]] = []
        while heap and not found[heap[0][1]].holds(*found[heap[0][1]].tasks, demand):
            passed.append(heapq.heappop(heap))
        if heap:
            load_s, number = heapq.heappop(heap)
        else:
            load_s, number = 0.0, len(found)
            found.append(Bin())
        chosen = found[number]
        load_s += _own_s(demand) if chosen.tasks or chosen.running else demand.duration_s
        found[number] = replace(chosen, tasks=(*chosen.tasks, demand))
        for entry in (*passed, (load_s, number)):
            heapq.heappush(heap, entry)
    return tuple(found)


def neighbours(division: Sequence[Bin]) -> Iterator[Division]:
    """Yield the divisions in which one task moves to another bin or to a new one, or two tasks are swapped.

    Tasks of the first bins come first, and the last bins are tried first as their target.
    """
    bins = [item for item in division if item.tasks or item.executor]
    for here, item in enumerate(bins):
        for demand in item.tasks:
            left = replace(item, tasks=tuple(other for other in item.tasks if other is not demand))
            for there in reversed(range(len(bins))):
                target = bins[there]
                if there != here and target.holds(*target.tasks, demand):
                    yield _with(bins, {here: left, there: replace(target, tasks=(*target.tasks, demand))})
            if left.tasks or left.executor:
                yield (*_with(bins, {here: left}), Bin(tasks=(demand,)))
            for there in reversed(range(here + 1, len(bins))):
                for other in bins[there].tasks:
                    rest = tuple(found for found in bins[there].tasks if found is not other)
                    if left.holds(*left.tasks, other) and bins[there].holds(*rest, demand):
                        mine, theirs = (*left.tasks, other), (*rest, demand)
                        yield _with(bins, {here: replace(left, tasks=mine), there: replace(bins[there], tasks=theirs)})


def _with(bins: Sequence[Bin], changed: dict[int, Bin]) -> Division:
    return tuple(changed.get(number, item) for number, item in enumerate(bins))


def _own_s(demand: TaskDemand) -> float:
    return demand.duration_s - _sharing(demand).step_s


def _sharing(demand: TaskDemand) -> Sharing:
    assert demand.sharing is not None
    return demand.sharing
