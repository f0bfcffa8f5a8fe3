"""Lower bounds of the makespan, by counting."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from alto.scheduler.inter_task.lists import fewest_nodes, running_counts
from alto.scheduler.inter_task.problem import SchedulingProblem, TaskDemand

_MAX_RELEASES = 20
"""Number of releases for which the area bound is computed; more hardly tighten the bound."""


def makespan_bound(problem: SchedulingProblem) -> float:
    """Return a lower bound of the makespan of every schedule of the waiting tasks, for any priorities.

    It is the largest of these, in the unit of the problem:

    - **longest**: a task's release, or the time at which the running tasks leave as many free GPUs as it needs, plus
      its duration;
    - **area**: for every number ``k`` of GPUs, each task of ``k`` or more GPUs needs a share of ``k`` GPUs of a node,
      and a node with ``f`` free GPUs has ``f // k`` such shares; ``k = 1`` counts GPU seconds. It is computed for the
      tasks of each release and later;
    - **pigeonhole**: of the ``h * n + 1`` longest tasks of ``k`` or more GPUs, ``h + 1`` must run on the same of ``n``
      shares;
    - the same bounds for every tenant within its quota.
    """
    held_on = _held_by_node(problem)
    rooms = [_FreeGpus(len(node.gpus), held_on.get(node.name, ())) for node in problem.nodes]
    bounds = list(_bounds(problem.pending, rooms, lambda demand: fewest_nodes(problem.nodes, demand.num_gpus)))
    for tenant, quota in problem.quotas.items():
        theirs = [demand for demand in problem.pending if demand.tenant == tenant]
        held = [(task.remaining_s, len(task.gpus)) for task in problem.running if task.tenant == tenant]
        bounds += _bounds(theirs, [_FreeGpus(quota, held)], lambda _: 1)
    return max(bounds, default=0.0)


class _FreeGpus:
    """The GPUs of a node, or of a quota, that running tasks leave free, by time."""

    def __init__(self, size: int, held: Iterable[tuple[float, int]]) -> None:
        free = size - sum(count for _, count in held)
        self.steps = [(0.0, max(free, 0))]
        for end, count in sorted(held):
            free += count
            if free > 0:
                self.steps.append((end, free))

    def free_from(self, count: int) -> float:
        return next((time for time, free in self.steps if free >= count), float("inf"))


def _held_by_node(problem: SchedulingProblem) -> dict[str, list[tuple[float, int]]]:
    held: dict[str, list[tuple[float, int]]] = {}
    for task in problem.running:
        for name, count in running_counts(problem, task.gpus).items():
            held.setdefault(name, []).append((task.remaining_s, count))
    return held


def _bounds(
    demands: Sequence[TaskDemand], rooms: Sequence[_FreeGpus], num_rooms: Callable[[TaskDemand], int]
) -> Iterator[float]:
    inside = [demand for demand in demands if num_rooms(demand) == 1]
    sizes = sorted({demand.num_gpus for demand in inside})
    free_from = {size: min(room.free_from(size) for room in rooms) for size in sizes}
    earliest = {demand.task: max(demand.release_s, free_from.get(demand.num_gpus, 0.0)) for demand in demands}
    yield from (earliest[demand.task] + demand.duration_s for demand in demands)
    for share in sorted({1, *sizes}):
        # A task on several nodes may hold fewer GPUs of a node than one share, so it counts only if a share is one GPU.
        counted = [demand for demand in (demands if share == 1 else inside) if demand.num_gpus >= share]
        shares = [[(time, free // share) for time, free in room.steps] for room in rooms]
        work = [
            (earliest[demand.task], demand.duration_s * (demand.num_gpus // share), demand.duration_s)
            for demand in counted
        ]
        yield from _area_bounds(work, shares)
        yield from _pigeonhole_bounds([duration for *_, duration in work], sum(steps[-1][1] for steps in shares))


def _area_bounds(
    work: Sequence[tuple[float, float, float]], shares: Sequence[Sequence[tuple[float, int]]]
) -> Iterator[float]:
    """Yield, for each start time, the earliest time by which all work that starts then or later can be done."""
    additions = sorted(
        (time, number - before)
        for steps in shares
        for (time, number), before in zip(steps, (0, *(number for _, number in steps)), strict=False)
    )
    starts = sorted({earliest for earliest, *_ in work})
    for start in starts[:: max(1, len(starts) // _MAX_RELEASES)]:
        left = sum(area for earliest, area, _ in work if earliest >= start)
        now, number = start, 0
        for time, added in additions:
            if time > now:
                if left <= number * (time - now):
                    break
                left -= number * (time - now)
                now = time
            number += added
        yield now + left / number


def _pigeonhole_bounds(durations: Sequence[float], num_shares: int) -> Iterator[float]:
    if not num_shares:
        return
    longest = sorted(durations, reverse=True)
    for last in range(num_shares, len(longest), num_shares):
        together = last // num_shares + 1
        yield sum(longest[last - together + 1 : last + 1])
