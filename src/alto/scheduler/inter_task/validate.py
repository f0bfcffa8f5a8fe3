"""Checks whether a schedule may be run. Shares no code with the schedulers."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict

from alto.errors import ScheduleError
from alto.records import Gpu, Placement, Schedule
from alto.scheduler.inter_task.problem import SchedulingProblem

__all__ = ["check_schedule"]

_ROUNDING = 1e-9
"""Two times that differ by less, relative to the larger, are one."""


def check_schedule(problem: SchedulingProblem, schedule: Schedule) -> None:
    """Check that ``schedule`` solves ``problem``.

    Every task that waits is placed once, as it was asked for; no GPU is used by two tasks at a time, or before the task
    that runs on it ends; tasks are on one node where any is large enough, else on as few as can be; no task starts
    before it is released; no tenant has more GPUs than its quota while a task of its own is placed; and no bound is
    above the makespan.

    Raises:
        ScheduleError: A condition does not hold.
    """
    _check_tasks(problem, schedule)
    for placement in schedule.placements:
        _check_gpus(problem, placement)
    _check_overlaps(problem, schedule)
    _check_quotas(problem, schedule)
    if _before(schedule.makespan_s, schedule.bound_s):
        raise ScheduleError(
            f"bound_s: expected at most the makespan, {schedule.makespan_s} s, found {schedule.bound_s} s; the solver "
            f"{schedule.method!r} is wrong"
        )


def _before(first_s: float, second_s: float) -> bool:
    return second_s - first_s > _ROUNDING * max(1.0, abs(first_s), abs(second_s))


def _check_tasks(problem: SchedulingProblem, schedule: Schedule) -> None:
    asked = {demand.task: demand for demand in problem.pending}
    found = Counter(placement.task for placement in schedule.placements)
    for task in sorted({*asked, *found}):
        if found[task] != (task in asked):
            raise ScheduleError(f"task {task!r}: expected {int(task in asked)} placements, found {found[task]}")
    for placement in schedule.placements:
        demand = asked[placement.task]
        where = f"task {placement.task!r}"
        if len(placement.gpus) != demand.num_gpus or len(set(placement.gpus)) != demand.num_gpus:
            raise ScheduleError(f"{where}: expected {demand.num_gpus} different GPUs, found {placement.gpus}")
        if placement.duration_s != demand.duration_s:
            raise ScheduleError(f"{where}: expected a duration of {demand.duration_s} s, found {placement.duration_s}")
        if not placement.start_s >= 0 or _before(placement.start_s, demand.release_s):
            raise ScheduleError(f"{where}: expected no start before {demand.release_s} s, found {placement.start_s}")


def _check_gpus(problem: SchedulingProblem, placement: Placement) -> None:
    where = f"task {placement.task!r}"
    existing = {Gpu(node.name, index) for node in problem.nodes for index in node.gpus}
    unknown = set(placement.gpus) - existing
    if unknown:
        raise ScheduleError(f"{where}: expected GPUs of the cluster, found {min(unknown)}")
    if placement.gpus != tuple(sorted(placement.gpus)):
        raise ScheduleError(f"{where}: expected GPUs in rising order, found {placement.gpus}")
    largest_first = sorted((len(node.gpus) for node in problem.nodes), reverse=True)
    least = next(
        number for number, held in enumerate(itertools.accumulate(largest_first), 1) if held >= len(placement.gpus)
    )
    nodes = {gpu.node for gpu in placement.gpus}
    if len(nodes) > least:
        raise ScheduleError(f"{where}: expected GPUs of at most {least} nodes, found {', '.join(sorted(nodes))}")


def _check_overlaps(problem: SchedulingProblem, schedule: Schedule) -> None:
    uses: defaultdict[Gpu, list[tuple[float, float, str]]] = defaultdict(list)
    for task in problem.running:
        for gpu in task.gpus:
            uses[gpu].append((0.0, task.remaining_s, task.task))
    for placement in schedule.placements:
        for gpu in placement.gpus:
            uses[gpu].append((placement.start_s, placement.end_s, placement.task))
    for gpu, spans in uses.items():
        for (_, end_s, first), (start_s, _, second) in itertools.pairwise(sorted(spans)):
            if _before(start_s, end_s):
                raise ScheduleError(
                    f"GPU {gpu.index} of node {gpu.node!r}: expected it free at {start_s} s for task {second!r}, "
                    f"found task {first!r} on it until {end_s} s"
                )


def _check_quotas(problem: SchedulingProblem, schedule: Schedule) -> None:
    tenants = {demand.task: demand.tenant for demand in problem.pending}
    for tenant, quota in problem.quotas.items():
        placed = [placement for placement in schedule.placements if tenants[placement.task] == tenant]
        held = [(task.remaining_s, len(task.gpus)) for task in problem.running if task.tenant == tenant]
        # More are in use only from a start on.
        for at_s in {placement.start_s for placement in placed}:
            count = sum(number for end_s, number in held if _before(at_s, end_s))
            count += sum(
                len(placement.gpus)
                for placement in placed
                if not _before(at_s, placement.start_s) and _before(at_s, placement.end_s)
            )
            if count > quota:
                raise ScheduleError(f"tenant {tenant!r}: expected at most {quota} GPUs at {at_s} s, found {count}")
