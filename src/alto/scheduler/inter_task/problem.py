"""The inter-task scheduling problem: waiting tasks, running tasks, GPUs and quotas."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from alto.base import is_number
from alto.errors import SpecError
from alto.records import MAX_DURATION_S, MIN_DURATION_S, Demand, Gpu, Node, Placement, Schedule, Sharing


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskDemand(Demand):
    """A waiting task, for the scheduler; it never delays a waiting task of a higher priority.

    Attributes:
        release_s: Earliest start, in seconds from now.
        sharing: Data for sharing an executor, only for tasks on one GPU; None: the task has its own executor.
        is_on_one_node: Whether all its GPUs must be on one node. A queue lets it wait while no node is large enough.
    """

    release_s: float = 0.0
    sharing: Sharing | None = None
    is_on_one_node: bool = False

    def lasting(self, duration_s: float) -> TaskDemand:
        """Return the same task with another duration; its steps keep their share of the duration."""
        sharing = self.sharing
        if sharing is not None:
            step_s = min(sharing.step_s / self.duration_s * duration_s, duration_s)
            sharing = replace(sharing, step_s=step_s)
        return replace(self, duration_s=duration_s, sharing=sharing)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningTask:
    """A running task: it stays where it is for ``remaining_s`` more seconds.

    Attributes:
        remaining_s: Estimated remaining seconds, counting the slowdown by other tasks in the same executor.
        tenant: The tenant whose quota the GPUs count against.
        executor: Name of the executor; tasks with the same name share it and its GPU. Empty: the task has its own.
        sharing: Facts for sharing; ``step_s`` is the part of ``remaining_s`` that the steps would take if the task ran
            alone for that time. Other tasks may join an executor if all its tasks have this.
    """

    task: str
    gpus: tuple[Gpu, ...]
    remaining_s: float
    tenant: str = ""
    priority: int = 0
    executor: str = ""
    sharing: Sharing | None = None


@dataclass(frozen=True, kw_only=True)
class SchedulingProblem:
    """Waiting tasks, on a cluster where other tasks run.

    Attributes:
        nodes: Nodes that have GPUs; nodes without GPUs are dropped.
        quotas: Maximum number of GPUs that a tenant holds at a time; other tenants have no limit.

    Raises:
        SpecError: A name or a GPU is given twice; a duration, a quota or a sharing value is out of bounds; tasks of one
            executor have different GPUs; or a task can never be placed.
    """

    nodes: tuple[Node, ...]
    pending: tuple[TaskDemand, ...]
    running: tuple[RunningTask, ...] = ()
    quotas: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = Counter([demand.task for demand in self.pending] + [task.task for task in self.running])
        twice = [name for name, count in names.items() if count > 1]
        if twice:
            raise SpecError(f"task: expected a unique name for each task, found {twice[0]!r} twice; rename one")
        self._check_nodes()
        object.__setattr__(self, "nodes", tuple(node for node in self.nodes if node.gpus))
        for tenant, quota in self.quotas.items():
            if not isinstance(quota, int) or isinstance(quota, bool) or quota < 1:
                raise SpecError(f"quota of tenant {tenant!r}: expected 1 GPU or more, found {quota!r}; correct it")
        for task in self.running:
            if not is_number(task.remaining_s, least=0, most=MAX_DURATION_S):
                raise SpecError(
                    f"task {task.task!r}: expected to run for 0 to {MAX_DURATION_S:g} more seconds, found "
                    f"{task.remaining_s}; correct its estimate"
                )
            if task.sharing is not None:
                _check_sharing(f"task {task.task!r}", task.sharing, task.remaining_s)
        self._check_executors()
        for demand in self.pending:
            self._check(demand)

    def _check_nodes(self) -> None:
        twice = [name for name, count in Counter(node.name for node in self.nodes).items() if count > 1]
        if twice:
            raise SpecError(f"node: expected a unique name for each node, found {twice[0]!r} twice; rename one")
        for node in self.nodes:
            if len(set(node.gpus)) < len(node.gpus):
                raise SpecError(
                    f"node {node.name!r}: expected each GPU once, found {', '.join(map(str, node.gpus))}; correct them"
                )

    def _check_executors(self) -> None:
        gpus: dict[str, tuple[Gpu, ...]] = {}
        for task in self.running:
            if task.executor and gpus.setdefault(task.executor, task.gpus) != task.gpus:
                raise SpecError(
                    f"task {task.task!r}: expected the GPUs of its executor {task.executor!r}, "
                    f"{gpus[task.executor]}, found {task.gpus}; correct them"
                )

    @cached_property
    def num_gpus(self) -> int:
        return sum(len(node.gpus) for node in self.nodes)

    @cached_property
    def gpus_by_node(self) -> Mapping[str, frozenset[int]]:
        """Indices of the GPUs of each node, by node name."""
        return {node.name: frozenset(node.gpus) for node in self.nodes}

    def _check(self, demand: TaskDemand) -> None:
        where = f"task {demand.task!r}"
        if not is_number(demand.duration_s, least=MIN_DURATION_S, most=MAX_DURATION_S):
            raise SpecError(
                f"{where}: expected a duration above 0 seconds, from {MIN_DURATION_S:g} to {MAX_DURATION_S:g}, found "
                f"{demand.duration_s}; correct its estimate"
            )
        if demand.sharing is not None:
            _check_sharing(where, demand.sharing, demand.duration_s)
        if not is_number(demand.release_s, least=0, most=MAX_DURATION_S):
            raise SpecError(
                f"{where}: expected a release of 0 or more seconds from now, at most {MAX_DURATION_S:g}, found "
                f"{demand.release_s}; correct it"
            )
        if not 1 <= demand.num_gpus <= self.num_gpus:
            raise SpecError(
                f"{where}: expected num_gpus from 1 to {self.num_gpus} (all GPUs of the cluster), found "
                f"{demand.num_gpus}; ask for fewer, or add GPUs"
            )
        quota = self.quotas.get(demand.tenant)
        if quota is not None and demand.num_gpus > quota:
            raise SpecError(
                f"{where}: expected at most {quota} GPUs, which is the quota of tenant {demand.tenant!r}, found "
                f"{demand.num_gpus}; ask for fewer, or raise the quota"
            )


def _check_sharing(where: str, sharing: Sharing, duration_s: float) -> None:
    if not sharing.base:
        raise SpecError(f"{where}: expected a base model in its sharing, found none; name it, or share nothing")
    if not is_number(sharing.step_s, least=0, most=duration_s):
        raise SpecError(
            f"{where}: expected steps that take 0 to {duration_s:g} seconds (its duration), found {sharing.step_s}; "
            "correct step_s"
        )
    for name, least in (("num_slots", 1), ("slot_bytes", 0), ("pass_bytes", 0), ("capacity_bytes", 0)):
        found = getattr(sharing, name)
        if not isinstance(found, int) or isinstance(found, bool) or found < least:
            raise SpecError(f"{where}: expected {name} of at least {least}, found {found!r}; correct it")


def makespan_of(placements: Iterable[Placement]) -> float:
    """Return the end of the last placement; 0 if there is none."""
    return max((placement.end_s for placement in placements), default=0.0)


def schedule_from(
    method: str,
    placements: tuple[Placement, ...],
    *,
    bound_s: float,
    status: Literal["optimal", "feasible", "heuristic"],
) -> Schedule:
    """Make a schedule that is ``optimal`` if it ends at the bound; otherwise it has ``status``.

    Bound and makespan may be sums of the same times in different orders, so they count as equal if only rounding
    differs.

    Args:
        status: Status if the makespan is above the bound.
    """
    makespan_s = makespan_of(placements)
    if math.isclose(makespan_s, bound_s, rel_tol=1e-9):
        bound_s, status = makespan_s, "optimal"
    return Schedule(method=method, status=status, placements=placements, bound_s=bound_s)


_EXACT_S = (1.0, 0.1, 0.01, 0.001)
_MAX_TICKS = 10**8
"""Ticks of the whole horizon; multiplied by the GPUs of a large cluster this is far below the 64-bit limit."""


def in_ticks(problem: SchedulingProblem) -> tuple[SchedulingProblem, float, bool]:
    """Return the problem in ticks, the seconds per tick, and whether the conversion is exact.

    The conversion is exact if every time is a whole number of seconds, tenths, hundredths or thousandths, and the
    horizon has less than 10^8 of these units. A tick is then the greatest common divisor of all times. Otherwise a tick
    is 10^-8 of the horizon, and times are rounded up: a schedule in ticks is also valid in seconds, and the least
    makespan of ``n`` tasks in ticks is at most ``n + 1`` ticks above the least in seconds.
    """
    times = [demand.duration_s for demand in problem.pending] + [demand.release_s for demand in problem.pending]
    times += [task.remaining_s for task in problem.running]
    # At worst all tasks run one after the other, after the last release and the last running task.
    horizon_s = max(times, default=0.0) + sum(demand.duration_s for demand in problem.pending)
    for unit_s in _EXACT_S:
        if horizon_s / unit_s < _MAX_TICKS and all(_is_whole(time / unit_s) for time in times):
            return _exact(problem, times, unit_s)
    tick_s = horizon_s / _MAX_TICKS
    return _with_times(problem, lambda time_s: float(math.ceil(time_s / tick_s))), tick_s, False


def _exact(problem: SchedulingProblem, times: Sequence[float], unit_s: float) -> tuple[SchedulingProblem, float, bool]:
    units = math.gcd(*(round(time / unit_s) for time in times)) or 1
    return _with_times(problem, lambda time_s: float(round(time_s / unit_s) // units)), unit_s * units, True


def _with_times(problem: SchedulingProblem, ticks: Callable[[float], float]) -> SchedulingProblem:
    return replace(
        problem,
        pending=tuple(
            replace(demand, duration_s=ticks(demand.duration_s), release_s=ticks(demand.release_s))
            for demand in problem.pending
        ),
        running=tuple(replace(task, remaining_s=ticks(task.remaining_s)) for task in problem.running),
    )


def _is_whole(number: float) -> bool:
    return number == 0 or (round(number) > 0 and math.isclose(number, round(number), rel_tol=1e-12))
