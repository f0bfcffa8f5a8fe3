"""Local search for clusters too large to solve as a whole: moves tasks between nodes until all nodes end at about the
same time."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterable, Sequence

from alto.scheduler.inter_task.problem import SchedulingProblem, TaskDemand
from alto.scheduler.inter_task.reservations import Reservation

__all__ = ["balanced_reservations"]

_TRIES = 30
"""Tries of one cooling, per task."""

_MAX_COOLINGS = 60
"""Consecutive coolings without improvement after which the search ends."""

_WARMTH = 0.001
"""Share of the makespan by which a try may be worse at the beginning of a cooling."""


def balanced_reservations(
    problem: SchedulingProblem, reservations: Sequence[Reservation], *, bound: float, deadline: float
) -> list[Reservation]:
    """Move and swap tasks between nodes so that the last node ends sooner, and return the new reservations.

    The tasks of one node are stacked by width: the widest last, and among equals the longest last, each on the GPUs
    that are free first, counted from the end. If widths divide each other, no GPU waits in between, and the node ends
    when its fullest GPU does. Moves and swaps are tried at random. One is kept if the later of its two nodes ends
    sooner than before, or only a little later. That tolerance shrinks to zero (annealing), and then starts over.

    Args:
        problem: The scheduling problem.
        reservations: Reservations on one node each, without releases, quotas or tasks of a higher priority in the way.
        bound: The search ends once all tasks end by then.
        deadline: When to stop at the latest, by ``time.monotonic``.
    """
    nodes = [_Stack(problem, node.name) for node in problem.nodes]
    for node in nodes:
        node.put(
            sorted(
                (reservation.demand for reservation in reservations if node.name in reservation.counts),
                key=_stack_order,
            )
        )
    generator = random.Random(0)
    num_tries = _TRIES * len(reservations)
    best, best_height, num_vain = [list(node.tasks) for node in nodes], _last_end(nodes), 0
    while best_height > bound and num_vain < _MAX_COOLINGS and time.monotonic() < deadline:
        num_vain += 1
        for number in range(num_tries):
            if not number % 16 and time.monotonic() >= deadline:
                break
            warmth = _WARMTH * best_height * (1 - number / num_tries)
            if _try(nodes, -warmth * math.log(1 - generator.random()), generator) and _last_end(nodes) < best_height:
                best, best_height, num_vain = [list(node.tasks) for node in nodes], _last_end(nodes), 0
                if best_height <= bound:
                    break
    for node, tasks in zip(nodes, best, strict=True):
        node.put(tasks)
    return [reservation for node in nodes for reservation in node.reservations()]


def _last_end(nodes: Iterable[_Stack]) -> float:
    return max(node.height for node in nodes)


def _stack_order(demand: TaskDemand) -> tuple[float, ...]:
    return -demand.num_gpus, -demand.duration_s


class _Stack:
    """One node and its tasks, stacked in reverse from the node's end back to the ends of its running tasks."""

    def __init__(self, problem: SchedulingProblem, name: str) -> None:
        (node,) = (node for node in problem.nodes if node.name == name)
        held = {gpu.index: task.remaining_s for task in problem.running for gpu in task.gpus if gpu.node == name}
        self.name = name
        self.free_at = sorted(held.get(index, 0.0) for index in node.gpus)
        self.tasks: list[TaskDemand] = []
        self.size = len(self.free_at)
        self.height = 0.0
        # GPU seconds in use; the height is never below area / size.
        self.area = 0.0

    def put(self, tasks: list[TaskDemand]) -> None:
        """Replace the node's tasks by ``tasks``, given in the order of stacking."""
        self.tasks, self.height = tasks, self.height_of(tasks)
        self.area = sum(self.free_at) + sum(demand.num_gpus * demand.duration_s for demand in tasks)

    def height_of(self, tasks: Iterable[TaskDemand]) -> float:
        """Return when the node ends with ``tasks``, given in the order of stacking."""
        columns = [(free_at, 0.0) for free_at in self.free_at]
        for demand in tasks:
            _stack(columns, demand)
        return columns[-1][0]

    def reservations(self) -> list[Reservation]:
        columns = [(free_at, 0.0) for free_at in self.free_at]
        ends = [(demand, _stack(columns, demand)) for demand in self.tasks]
        height = columns[-1][0]
        return [
            Reservation(demand=demand, start=height - end, counts={self.name: demand.num_gpus}) for demand, end in ends
        ]


def _stack(columns: list[tuple[float, float]], demand: TaskDemand) -> float:
    """Put a task on the lowest of the columns, which are ``(free_at + load, load)`` in rising order; return its upper
    edge."""
    width = demand.num_gpus
    upper = max(load for _, load in columns[:width]) + demand.duration_s
    columns[:width] = [(total - load + upper, upper) for total, load in columns[:width]]
    columns.sort()
    return upper


def _try(nodes: Sequence[_Stack], slack: float, generator: random.Random) -> bool:
    """Swap two tasks of two nodes, or move one, if the later of the two nodes then ends at most ``slack`` later than
    now."""
    is_last = generator.random() < 0.2
    one = max(nodes, key=lambda node: node.height) if is_last else generator.choice(nodes)
    other = generator.choice(nodes)
    if one is other or not one.tasks:
        return False
    mine = generator.choice(one.tasks)
    theirs = generator.choice(other.tasks) if other.tasks and generator.random() < 0.7 else None
    if mine.num_gpus > other.size or (theirs is not None and theirs.num_gpus > one.size):
        return False
    return _exchange(one, mine, other, theirs, max(one.height, other.height) + slack)


def _exchange(one: _Stack, mine: TaskDemand, other: _Stack, theirs: TaskDemand | None, limit: float) -> bool:
    """Swap two tasks, or move one, if both nodes then end before ``limit``; return whether they do."""
    back = () if theirs is None else (theirs,)
    gain = mine.num_gpus * mine.duration_s - sum(task.num_gpus * task.duration_s for task in back)
    if other.area + gain >= other.size * limit or one.area - gain >= one.size * limit:
        return False
    there = sorted([*(task for task in other.tasks if task is not theirs), mine], key=_stack_order)
    if other.height_of(there) >= limit:
        return False
    here = sorted([*(task for task in one.tasks if task is not mine), *back], key=_stack_order)
    if one.height_of(here) >= limit:
        return False
    one.put(here)
    other.put(there)
    return True
