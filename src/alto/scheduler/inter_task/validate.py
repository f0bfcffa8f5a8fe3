"""Checks whether a schedule may be run. Shares no code with the schedulers."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from alto.errors import ScheduleError
from alto.records import Gpu, Placement, Schedule
from alto.scheduler.inter_task.problem import RunningTask, SchedulingProblem, TaskDemand

_ROUNDING = 1e-9
"""Relative difference below which two times count as equal."""


@dataclass(slots=True, kw_only=True)
class _Use:
    """One executor: its GPUs, its first task, whose tenant they count against, the shortest span for which it holds
    them, and its running and placed tasks."""

    gpus: tuple[Gpu, ...]
    first: RunningTask | TaskDemand
    start_s: float
    end_s: float
    running: list[RunningTask] = field(default_factory=list)
    placed: list[Placement] = field(default_factory=list)

    @property
    def name(self) -> str:
        return " and ".join([*(task.task for task in self.running), *(placement.task for placement in self.placed)])


def check_schedule(problem: SchedulingProblem, schedule: Schedule) -> None:
    """Check that ``schedule`` solves ``problem``.

    - Every waiting task is placed once, as requested, and does not start before its release.
    - No GPU is used by two executors at a time, or before the task that runs on it ends.
    - A task is on one node if any is large enough, else on as few as possible.
    - No tenant exceeds its quota at the start of one of its tasks.
    - The bound is not above the makespan.

    Tasks that share an executor have the same base model, priority and single GPU, and fit into memory together. A
    tenant with a quota shares only with itself; tenants without a quota may share with each other. They start together,
    or while the executor that they join runs. Each takes at least as long as alone, and all together take at least the
    sum of their own work plus the largest of their step parts. Any other task takes exactly its requested duration.

    Raises:
        ScheduleError: A condition does not hold.
    """
    _check_tasks(problem, schedule)
    for placement in schedule.placements:
        _check_gpus(problem, placement)
    uses = _uses(problem, schedule)
    for executor, use in uses.items():
        if isinstance(executor, str) and use.placed:
            _check_shared(problem, executor, use)
    _check_overlaps(list(uses.values()))
    _check_quotas(problem, list(uses.values()))
    if _before(schedule.makespan_s, schedule.bound_s):
        raise ScheduleError(
            f"bound_s: expected at most the makespan, {schedule.makespan_s} s, found {schedule.bound_s} s; the solver "
            f"{schedule.method!r} is wrong"
        )


def _before(first_s: float, second_s: float) -> bool:
    return second_s - first_s > _ROUNDING * max(1.0, abs(first_s), abs(second_s))


def _check_tasks(problem: SchedulingProblem, schedule: Schedule) -> None:
    pending = {demand.task: demand for demand in problem.pending}
    found = Counter(placement.task for placement in schedule.placements)
    for task in sorted({*pending, *found}):
        if found[task] != (task in pending):
            raise ScheduleError(f"task {task!r}: expected {int(task in pending)} placements, found {found[task]}")
    for placement in schedule.placements:
        demand = pending[placement.task]
        where = f"task {placement.task!r}"
        if len(placement.gpus) != demand.num_gpus or len(set(placement.gpus)) != demand.num_gpus:
            raise ScheduleError(f"{where}: expected {demand.num_gpus} different GPUs, found {placement.gpus}")
        if not placement.executor and placement.duration_s != demand.duration_s:
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
        raise ScheduleError(f"{where}: expected GPUs in increasing order, found {placement.gpus}")
    largest_first = sorted((len(node.gpus) for node in problem.nodes), reverse=True)
    least = next(
        number for number, held in enumerate(itertools.accumulate(largest_first), 1) if held >= len(placement.gpus)
    )
    nodes = {gpu.node for gpu in placement.gpus}
    if len(nodes) > least:
        raise ScheduleError(
            f"{where}: expected GPUs on at most {least} node(s), found GPUs on {len(nodes)} nodes: "
            f"{', '.join(sorted(nodes))}"
        )


def _uses(problem: SchedulingProblem, schedule: Schedule) -> dict[str | int, _Use]:
    """Return every executor by its name, or by a number if it has none."""
    demands = {demand.task: demand for demand in problem.pending}
    numbers = itertools.count()
    uses: dict[str | int, _Use] = {}
    for task in problem.running:
        new = _Use(gpus=task.gpus, first=task, start_s=0.0, end_s=0.0)
        use = uses.setdefault(task.executor or next(numbers), new)
        use.running.append(task)
        use.end_s = max(use.end_s, task.remaining_s)
    for placement in schedule.placements:
        first = demands[placement.task]
        new = _Use(gpus=placement.gpus, first=first, start_s=placement.start_s, end_s=placement.end_s)
        uses.setdefault(placement.executor or next(numbers), new).placed.append(placement)
    for use in uses.values():
        # The running tasks of an executor share it with the tasks that join, so it also does their own work.
        joined_s = sum(_own_s(demands[placement.task]) for placement in use.placed) if use.running else 0.0
        use.end_s = max(use.end_s + joined_s, *(placement.end_s for placement in use.placed), 0.0)
    return uses


def _own_s(demand: TaskDemand) -> float:
    return demand.duration_s - demand.sharing.step_s if demand.sharing is not None else demand.duration_s


def _check_shared(problem: SchedulingProblem, executor: str, use: _Use) -> None:
    pending = {demand.task: demand for demand in problem.pending}
    demands = [pending[placement.task] for placement in use.placed]
    where = f"executor {executor!r}"
    tasks: list[RunningTask | TaskDemand] = [*use.running, *demands]
    sharings = [task.sharing for task in tasks if task.sharing is not None]
    if len(sharings) < len(tasks) or any(demand.num_gpus != 1 for demand in demands):
        raise ScheduleError(f"{where}: expected tasks on one GPU that may share, found {use.name}")
    for what, found in (
        ("base", {sharing.base for sharing in sharings}),
        ("priority", {task.priority for task in tasks}),
        ("GPU", {use.gpus, *(placement.gpus for placement in use.placed)}),
    ):
        if len(found) > 1:
            raise ScheduleError(f"{where}: expected tasks with the same {what}, found {found}")
    tenants = {task.tenant for task in tasks}
    if len(tenants) > 1 and not tenants.isdisjoint(problem.quotas):
        raise ScheduleError(
            f"{where}: expected no other tenants beside a tenant with a quota, found {', '.join(sorted(tenants))}"
        )
    if len(sharings) > 1:
        need_bytes = max(sharing.pass_bytes for sharing in sharings)
        need_bytes += max(sharing.slot_bytes for sharing in sharings) * sum(sharing.num_slots for sharing in sharings)
        capacity_bytes = min(sharing.capacity_bytes for sharing in sharings)
        if need_bytes > capacity_bytes:
            raise ScheduleError(f"{where}: expected tasks that need {capacity_bytes} bytes, found {need_bytes}")
    _check_times(where, use, demands)


def _check_times(where: str, use: _Use, demands: Sequence[TaskDemand]) -> None:
    starts = {placement.start_s for placement in use.placed}
    if use.running and not max(starts) < max(task.remaining_s for task in use.running):
        raise ScheduleError(f"{where}: expected tasks that join it before it ends, found a start at {max(starts)} s")
    if not use.running and len(starts) > 1:
        raise ScheduleError(f"{where}: expected tasks that start together, found starts at {sorted(starts)}")
    for placement, demand in zip(use.placed, demands, strict=True):
        if not placement.duration_s >= demand.duration_s * (1 - _ROUNDING):
            raise ScheduleError(
                f"task {demand.task!r}: expected a duration of {demand.duration_s} s or more beside others, found "
                f"{placement.duration_s}"
            )
    step_s = max(demand.sharing.step_s for demand in demands if demand.sharing is not None)
    least_s = min(starts) + sum(map(_own_s, demands)) + step_s
    end_s = max(placement.end_s for placement in use.placed)
    if _before(end_s, least_s):
        raise ScheduleError(f"{where}: expected the last end no sooner than {least_s} s, found {end_s}")


def _check_overlaps(uses: Sequence[_Use]) -> None:
    by_gpu: defaultdict[Gpu, list[_Use]] = defaultdict(list)
    for use in uses:
        for gpu in use.gpus:
            by_gpu[gpu].append(use)
    for gpu, found in by_gpu.items():
        in_order = sorted(found, key=lambda use: (use.start_s, use.end_s, use.name))
        for first, second in itertools.pairwise(in_order):
            if _before(second.start_s, first.end_s):
                raise ScheduleError(
                    f"GPU {gpu.index} of node {gpu.node!r}: expected it free at {second.start_s} s for task "
                    f"{second.name!r}, found task {first.name!r} on it until {first.end_s} s"
                )


def _check_quotas(problem: SchedulingProblem, uses: Sequence[_Use]) -> None:
    for tenant, quota in problem.quotas.items():
        theirs = [use for use in uses if use.first.tenant == tenant]
        # The number of GPUs in use can rise only when an executor starts.
        for at_s in {use.start_s for use in theirs if not use.running}:
            count = sum(
                len(use.gpus)
                for use in theirs
                if (use.running or not _before(at_s, use.start_s)) and _before(at_s, use.end_s)
            )
            if count > quota:
                raise ScheduleError(f"tenant {tenant!r}: expected at most {quota} GPUs at {at_s} s, found {count}")
