"""List scheduling: tasks in a fixed order, each on the first GPUs that become free."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from alto.records import Gpu, Node, Placement
from alto.scheduler.inter_task.problem import SchedulingProblem, TaskDemand


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """When one task runs, and how many GPUs it has on which nodes.

    The specific GPUs can be chosen at the end: if intervals never need more GPUs than a node has, and are taken in the
    order of their starts, each finds enough free GPUs.

    Attributes:
        start: Start, in the time unit of its problem.
        counts: Number of GPUs by node name.
    """

    demand: TaskDemand
    start: float
    counts: Mapping[str, int]

    @property
    def end(self) -> float:
        return self.start + self.demand.duration_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Solved:
    """The result of a solver: ``reservations`` is empty if it found none, ``bound`` is the bound of its objective."""

    reservations: tuple[Reservation, ...]
    bound: float
    is_optimal: bool


def fewest_nodes(nodes: Iterable[Node], num_gpus: int) -> int:
    """Return how many nodes a task spans: 1 if any node is large enough, else as few of the largest nodes as can hold
    it."""
    held = 0
    for number, size in enumerate(sorted((len(node.gpus) for node in nodes), reverse=True), start=1):
        held += size
        if held >= num_gpus:
            return number
    raise AssertionError(f"{num_gpus} GPUs requested, {held} available")


def running_counts(problem: SchedulingProblem, gpus: Iterable[Gpu]) -> dict[str, int]:
    """Count the ``gpus`` on each node of the problem; a lost GPU is on none."""
    counts: dict[str, int] = {}
    for gpu in gpus:
        if gpu.index in problem.gpus_by_node.get(gpu.node, ()):
            counts[gpu.node] = counts.get(gpu.node, 0) + 1
    return counts


def place(
    problem: SchedulingProblem, reservations: Iterable[Reservation], *, keeps_starts: bool = False
) -> tuple[Placement, ...]:
    """Make placements that keep the order and the nodes of ``reservations``, without idle time that the order does not
    need.

    Only the order of the reservations' starts is used; times come from ``problem``. So if the reservations were made
    for rounded-up durations, the placements end no later than the reservations.

    Args:
        keeps_starts: Whether no task starts before its reservation does. Idle time is then kept, for methods in which
            no task may overtake another. Reservations must be in seconds.
    """
    free_at = {node.name: dict.fromkeys(node.gpus, 0.0) for node in problem.nodes}
    quota_free_at = {tenant: [0.0] * quota for tenant, quota in problem.quotas.items()}
    for task in problem.running:
        for gpu in task.gpus:
            if gpu.index in free_at.get(gpu.node, {}):
                free_at[gpu.node][gpu.index] = task.remaining_s
    for tenant, times in quota_free_at.items():
        theirs = (task for task in problem.running if task.tenant == tenant)
        held = [task.remaining_s for task in theirs for _ in task.gpus]
        # A tenant may hold more GPUs than its quota if the quota was lowered; then the last to end count.
        times[: len(held)] = sorted(held)[-len(times) :]
    demands = {demand.task: demand for demand in problem.pending}
    placements = []
    for reservation in sorted(reservations, key=lambda reservation: (reservation.start, reservation.demand.task)):
        demand = demands[reservation.demand.task]
        gpus = [gpu for name, count in reservation.counts.items() for gpu in _first_free(name, free_at[name], count)]
        times = sorted(quota_free_at.get(demand.tenant, ()))
        start_s = max(demand.release_s, *(free_at[gpu.node][gpu.index] for gpu in gpus), *times[: demand.num_gpus][-1:])
        if keeps_starts:
            start_s = max(start_s, reservation.start)
        end_s = start_s + demand.duration_s
        for gpu in gpus:
            free_at[gpu.node][gpu.index] = end_s
        if times:
            quota_free_at[demand.tenant] = times[demand.num_gpus :] + [end_s] * demand.num_gpus
        placements.append(
            Placement(task=demand.task, gpus=tuple(sorted(gpus)), start_s=start_s, duration_s=demand.duration_s)
        )
    return tuple(sorted(placements, key=lambda placement: placement.start_s))


def _first_free(node: str, free_at: Mapping[int, float], count: int) -> list[Gpu]:
    return [Gpu(node, index) for index in sorted(free_at, key=lambda index: (free_at[index], index))[:count]]


_SortKey = Callable[[TaskDemand], tuple[float, ...]]
LIST_ORDERS: Mapping[str, _SortKey] = {
    "fifo": lambda demand: (demand.release_s,),
    "sjf": lambda demand: (demand.duration_s, demand.num_gpus),
    "lpt": lambda demand: (-demand.duration_s, -demand.num_gpus),
}
"""Sort key of tasks by method; equal tasks keep the order of submission."""

LIST_METHODS = tuple(LIST_ORDERS)


def list_reservations(problem: SchedulingProblem, method: str) -> list[Reservation]:
    """Make reservations by ``fifo`` (no task overtakes another), ``sjf`` or ``lpt`` (the first task in the order that
    fits starts).

    Priorities are placed one after the other, the highest first, each on the GPUs that higher ones leave free. So the
    reservations of one priority do not depend on lower ones. Equal tasks keep the order in which they were given.
    """
    reservations: list[Reservation] = []
    for demands in priority_classes(problem):
        order = sorted(demands, key=LIST_ORDERS[method])
        reservations += reservations_in_order(problem, order, taken=reservations, is_strict=method == "fifo")
    return reservations


def priority_classes(problem: SchedulingProblem) -> list[tuple[TaskDemand, ...]]:
    """Group the waiting tasks by priority, highest first."""
    priorities = sorted({demand.priority for demand in problem.pending}, reverse=True)
    return [tuple(demand for demand in problem.pending if demand.priority == priority) for priority in priorities]


def reservations_in_order(
    problem: SchedulingProblem,
    order: Sequence[TaskDemand],
    *,
    taken: Iterable[Reservation] = (),
    is_strict: bool = False,
) -> list[Reservation]:
    """Make reservations for ``order``, on the GPUs that running tasks and the reservations ``taken`` leave free.

    Args:
        order: Tasks in the order of their starts.
        is_strict: Whether no task starts before one that is earlier in the order.
    """
    return _Machine(problem, taken, is_strict=is_strict).run(order)


class _GpuPool:
    """GPUs of a node, or of a tenant's quota, under a clock."""

    __slots__ = ("_ends", "_reserved", "free")

    def __init__(self, size: int, reserved: Iterable[tuple[float, float, int]]) -> None:
        self.free = size
        self._ends: list[tuple[float, int]] = []
        self._reserved = sorted(reserved, reverse=True)
        self.advance(0.0)

    def advance(self, now: float) -> None:
        """Release the GPUs of ended tasks, and take the GPUs whose reservation begins now."""
        while self._ends and self._ends[0][0] <= now:
            self.free += heapq.heappop(self._ends)[1]
        while self._reserved and self._reserved[-1][0] <= now:
            _, end, count = self._reserved.pop()
            if end > now:
                self.take(count, end)

    def take(self, count: int, end: float) -> None:
        self.free -= count
        heapq.heappush(self._ends, (end, count))

    def free_for(self, count: int, now: float) -> float:
        """Return how long from now ``count`` GPUs are free; 0 if they are not."""
        if self.free < count:
            return 0.0
        if not self._reserved:
            return math.inf
        changes = [(end, taken) for end, taken in self._ends]
        changes += [change for start, end, taken in self._reserved for change in ((start, -taken), (end, taken))]
        free = self.free
        # At equal times, ends come first.
        for time, change in sorted(changes, key=lambda change: (change[0], -change[1])):
            free += change
            if free < count:
                return time - now
        return math.inf


class _Machine:
    """The cluster under a clock that jumps from one change to the next."""

    def __init__(self, problem: SchedulingProblem, taken: Iterable[Reservation], *, is_strict: bool) -> None:
        self._problem = problem
        self._is_strict = is_strict
        self._now = 0.0
        self._fewest_nodes: dict[int, int] = {}
        reserved: dict[tuple[str, str], list[tuple[float, float, int]]] = {}
        for task in problem.running:
            for name, count in running_counts(problem, task.gpus).items():
                reserved.setdefault(("node", name), []).append((0.0, task.remaining_s, count))
            reserved.setdefault(("tenant", task.tenant), []).append((0.0, task.remaining_s, len(task.gpus)))
        for reservation in taken:
            for name, count in reservation.counts.items():
                reserved.setdefault(("node", name), []).append((reservation.start, reservation.end, count))
            span = (reservation.start, reservation.end, reservation.demand.num_gpus)
            reserved.setdefault(("tenant", reservation.demand.tenant), []).append(span)
        self._nodes = {
            node.name: _GpuPool(len(node.gpus), reserved.get(("node", node.name), ())) for node in problem.nodes
        }
        self._tenants = {
            name: _GpuPool(quota, reserved.get(("tenant", name), ())) for name, quota in problem.quotas.items()
        }
        self._rooms = [*self._nodes.values(), *self._tenants.values()]
        self._changes = sorted(
            {time for spans in reserved.values() for start, end, _ in spans for time in (start, end)}
        )

    def run(self, order: Sequence[TaskDemand]) -> list[Reservation]:
        heapq.heapify(self._changes)
        for demand in order:
            heapq.heappush(self._changes, demand.release_s)
        # Tasks of one shape differ only in duration and release, so the first one that fits gets a free place.
        shapes: dict[tuple[int, str], list[tuple[int, TaskDemand]]] = {}
        for position, demand in enumerate(order):
            shape = (0, "") if self._is_strict else (demand.num_gpus, demand.tenant)
            shapes.setdefault(shape, []).append((position, demand))
        reservations: list[Reservation] = []
        while len(reservations) < len(order):
            self._advance()
            self._start_all(list(shapes.values()), reservations)
        return reservations

    def _advance(self) -> None:
        self._now = heapq.heappop(self._changes)
        while self._changes and self._changes[0] <= self._now:
            heapq.heappop(self._changes)
        for room in self._rooms:
            room.advance(self._now)

    def _start_all(self, queues: list[list[tuple[int, TaskDemand]]], reservations: list[Reservation]) -> None:
        """Start every task that can start now, in order."""
        heads = [(*found, queue) for queue in queues if (found := self._first(queue)) is not None]
        while heads:
            head = min(heads, key=lambda head: head[0])
            heads.remove(head)
            _, index, counts, queue = head
            reservations.append(self._start(queue.pop(index)[1], counts))
            # Fewer GPUs are free now, so only queues that had a task to start can still have one.
            queues = [queue, *(other for *_, other in heads)]
            heads = [(*found, queue) for queue in queues if (found := self._first(queue)) is not None]

    def _first(self, queue: Sequence[tuple[int, TaskDemand]]) -> tuple[int, int, dict[str, int]] | None:
        """Return position in the order, index in the queue and nodes of the first task of a queue that can start
        now."""
        longest = math.inf
        for index, (position, demand) in enumerate(queue):
            if demand.release_s <= self._now and demand.duration_s <= longest:
                counts, longest = self._fit(demand)
                if counts is not None:
                    return position, index, counts
            if self._is_strict or not longest:
                break
        return None

    def _fit(self, demand: TaskDemand) -> tuple[dict[str, int] | None, float]:
        """Return GPUs by node for ``demand`` from now on, or None and the longest duration for which GPUs are free."""
        count, tenant = demand.num_gpus, self._tenants.get(demand.tenant)
        allowed = math.inf if tenant is None else tenant.free_for(count, self._now)
        if not allowed:
            return None, 0.0
        if count not in self._fewest_nodes:
            self._fewest_nodes[count] = fewest_nodes(self._problem.nodes, count)
        num_nodes = self._fewest_nodes[count]
        found: list[tuple[float, dict[str, int]]] = []
        if num_nodes == 1:
            # Prefer the fullest node with enough free GPUs, so that large gaps stay free for large tasks.
            names = sorted((room.free, name) for name, room in self._nodes.items() if room.free >= count)
            found = [(self._nodes[name].free_for(count, self._now), {name: count}) for _, name in names]
        else:
            found = [self._fit_across(count, num_nodes)]
        for free_for, counts in found:
            if min(free_for, allowed) >= demand.duration_s:
                return counts, demand.duration_s
        return None, min(allowed, max((free_for for free_for, _ in found), default=0.0))

    def _fit_across(self, count: int, num_nodes: int) -> tuple[float, dict[str, int]]:
        freest = sorted(self._nodes.items(), key=lambda item: (-item[1].free, item[0]))[:num_nodes]
        counts: dict[str, int] = {}
        for name, room in freest:
            counts[name] = min(room.free, count - sum(counts.values()))
        if sum(counts.values()) < count:
            return 0.0, {}
        counts = {name: number for name, number in counts.items() if number}
        return min(self._nodes[name].free_for(number, self._now) for name, number in counts.items()), counts

    def _start(self, demand: TaskDemand, counts: dict[str, int]) -> Reservation:
        end = self._now + demand.duration_s
        for name, count in counts.items():
            self._nodes[name].take(count, end)
        if demand.tenant in self._tenants:
            self._tenants[demand.tenant].take(demand.num_gpus, end)
        heapq.heappush(self._changes, end)
        return Reservation(demand=demand, start=self._now, counts=counts)
