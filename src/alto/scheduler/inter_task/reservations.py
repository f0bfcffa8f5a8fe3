"""Turns reservations (time and nodes) into placements (time and GPUs)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from alto.records import Gpu, Node, Placement
from alto.scheduler.inter_task.problem import SchedulingProblem, TaskDemand

__all__ = ["Reservation", "fewest_nodes", "place", "running_counts"]


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
