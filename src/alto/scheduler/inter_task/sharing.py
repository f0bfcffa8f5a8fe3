"""Scheduling problems and schedules with one entry per executor; tasks that share an executor are one entry."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from alto.records import MAX_DURATION_S, Gpu, Placement, Schedule, Sharing
from alto.scheduler.inter_task.colocation import (
    Bin,
    Division,
    Member,
    divide,
    finish_times_s,
    member_of,
    members_ending_at,
    neighbours,
)
from alto.scheduler.inter_task.lists import list_reservations
from alto.scheduler.inter_task.problem import RunningTask, SchedulingProblem, TaskDemand, schedule_from


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Tasks that start together in one executor.

    Attributes:
        tasks: The tasks, on one GPU each.
        ends_s: When each task ends, in seconds from the common start.
        executor: The running executor that they join; empty: a new one.
    """

    tasks: tuple[TaskDemand, ...]
    ends_s: tuple[float, ...]
    end_s: float
    executor: str = ""

    @property
    def name(self) -> str:
        """Name of the task that represents the group."""
        return self.tasks[0].task


@dataclass(frozen=True, slots=True, kw_only=True)
class Colocation:
    """A scheduling problem with one entry per executor instead of one per task.

    Attributes:
        problem: The problem without sharing. Each new group is one waiting task. Each running executor is one running
            task, with a longer duration if tasks join it. Joining tasks are not among the waiting tasks.
        groups: New groups of two or more tasks; in `problem`, each has the name of its first task.
    """

    problem: SchedulingProblem
    groups: tuple[Group, ...] = ()
    joins: tuple[Group, ...] = ()
    gpus: Mapping[str, tuple[Gpu, ...]]

    def hint(self, hint: Schedule | None) -> Schedule | None:
        """Convert an earlier schedule of tasks to one of `problem`: a group starts where its first placed task
        started."""
        if hint is None or not self.groups:
            return hint
        names = {demand.task: group.name for group in self.groups for demand in group.tasks}
        found: dict[str, Placement] = {}
        for placement in sorted(hint.placements, key=lambda placement: placement.start_s):
            name = names.get(placement.task, placement.task)
            found.setdefault(name, replace(placement, task=name, executor=""))
        return replace(hint, placements=tuple(found.values()))

    def expanded(self, schedule: Schedule) -> Schedule:
        """Convert a schedule of `problem` to one of all tasks; names of new executors are unique in it."""
        if not self.groups and not self.joins:
            return schedule
        names = (name for number in itertools.count(1) if (name := f"shared-{number}") not in self.gpus)
        groups = {group.name: group for group in self.groups}
        placements: list[Placement] = []
        for group in self.joins:
            placements += _placements(group, self.gpus[group.executor], 0.0, group.executor)
        for placement in schedule.placements:
            if placement.task in groups:
                placements += _placements(groups[placement.task], placement.gpus, placement.start_s, next(names))
            else:
                placements.append(placement)
        placements.sort(key=lambda placement: placement.start_s)
        found = schedule_from(
            schedule.method,
            tuple(placements),
            bound_s=max(schedule.bound_s, *(max(group.ends_s) for group in self.joins), 0.0),
            status=schedule.status,
        )
        return replace(found, notice=schedule.notice)


@dataclass(frozen=True, slots=True, order=True)
class Kind:
    """Properties that tasks must have in common to share; ``tenant`` is empty if the tenant has no quota."""

    base: str
    priority: int
    tenant: tuple[str, ...]
    release_s: float


def kind_of(problem: SchedulingProblem, task: TaskDemand | RunningTask) -> Kind | None:
    """Return the kind of tasks that may share an executor with ``task``; None if ``task`` cannot share."""
    num_gpus = task.num_gpus if isinstance(task, TaskDemand) else len(task.gpus)
    if task.sharing is None or num_gpus != 1:
        return None
    return Kind(
        base=task.sharing.base,
        priority=task.priority,
        tenant=(task.tenant,) if task.tenant in problem.quotas else (),
        release_s=task.release_s if isinstance(task, TaskDemand) else 0.0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningExecutor:
    """A running executor, or a task that runs alone.

    Attributes:
        first: The first of its tasks.
        remaining_s: Seconds until its last task ends.
        kind: Kind of the tasks that may join it; None: no task may join.
        members: Remaining work of its tasks, if others may join.
        sharings: Sharing facts of its tasks, if others may join.
    """

    first: RunningTask
    remaining_s: float
    kind: Kind | None = None
    members: tuple[Member, ...] = ()
    sharings: tuple[Sharing, ...] = ()


def running_executors(problem: SchedulingProblem) -> list[RunningExecutor]:
    """Return the running executors. Others may join if all its tasks may share and its GPU still exists."""
    together: dict[str | int, list[RunningTask]] = {}
    for number, task in enumerate(problem.running):
        together.setdefault(task.executor or number, []).append(task)
    return [_running_executor(problem, tasks) for tasks in together.values()]


def _running_executor(problem: SchedulingProblem, tasks: Sequence[RunningTask]) -> RunningExecutor:
    first, remaining_s = tasks[0], max(task.remaining_s for task in tasks)
    kinds = {kind_of(problem, task) for task in tasks}
    is_there = all(gpu.index in problem.gpus_by_node.get(gpu.node, ()) for gpu in first.gpus)
    if not first.executor or len(kinds) > 1 or None in kinds or not is_there or not remaining_s:
        return RunningExecutor(first=first, remaining_s=remaining_s)
    sharings = tuple(task.sharing for task in tasks if task.sharing is not None)
    step_shares = [
        sharing.step_s / task.remaining_s if task.remaining_s else 0.0
        for task, sharing in zip(tasks, sharings, strict=True)
    ]
    return RunningExecutor(
        first=first,
        remaining_s=remaining_s,
        kind=kinds.pop(),
        members=tuple(members_ending_at([task.remaining_s for task in tasks], step_shares)),
        sharings=sharings,
    )


def group_of(tasks: Sequence[TaskDemand], running: Sequence[Member] = (), executor: str = "") -> Group:
    """Return ``tasks`` as a group, in an executor in which the work ``running`` remains."""
    members = [member_of(demand.duration_s, demand.sharing.step_s) for demand in tasks if demand.sharing is not None]
    ends_s = finish_times_s([*members, *running])
    # In the model no task ends sooner than alone, but rounding can make it so.
    own_ends_s = tuple(max(end_s, demand.duration_s) for end_s, demand in zip(ends_s, tasks, strict=False))
    return Group(tasks=tuple(tasks), ends_s=own_ends_s, end_s=max(*ends_s, *own_ends_s), executor=executor)


def composed(
    problem: SchedulingProblem, executors: Sequence[RunningExecutor], groups: Sequence[Group] = ()
) -> Colocation:
    """Return the problem in which each group of tasks is one entry, together with the groups.

    Args:
        groups: Tasks that share; every other task has its own executor.
    """
    new = {group.name: group for group in groups if not group.executor}
    joins = {group.executor: group for group in groups if group.executor}
    gone = {demand.task for group in groups for demand in group.tasks} - new.keys()
    durations_s = {name: group.end_s for name, group in new.items()}
    pending = tuple(
        _alone(demand, durations_s.get(demand.task, demand.duration_s))
        for demand in problem.pending
        if demand.task not in gone
    )
    running = tuple(
        _running_alone(found, joins[name].end_s if (name := found.first.executor) in joins else found.remaining_s)
        for found in executors
    )
    is_same = pending == problem.pending and running == problem.running
    return Colocation(
        problem=problem if is_same else replace(problem, pending=pending, running=running),
        groups=tuple(new.values()),
        joins=tuple(joins.values()),
        gpus={task.executor: task.gpus for task in problem.running if task.executor},
    )


def _alone(demand: TaskDemand, duration_s: float) -> TaskDemand:
    is_same = demand.sharing is None and demand.duration_s == duration_s
    return demand if is_same else replace(demand, sharing=None, duration_s=duration_s)


def _running_alone(found: RunningExecutor, remaining_s: float) -> RunningTask:
    task = found.first
    is_same = task.sharing is None and not task.executor and task.remaining_s == remaining_s
    return task if is_same else replace(task, remaining_s=remaining_s, executor="", sharing=None)


def _placements(group: Group, gpus: tuple[Gpu, ...], start_s: float, executor: str) -> Iterator[Placement]:
    for demand, end_s in zip(group.tasks, group.ends_s, strict=True):
        yield Placement(task=demand.task, gpus=gpus, start_s=start_s, duration_s=end_s, executor=executor)


_MAX_TRIES = 400
_MAX_PLACED = 25_000
"""Maximum number of divisions that are tried, and of tasks that are placed in their list schedules."""

_LEAST_TRIES = 4
"""Divisions that are tried for each kind of tasks, if there are many kinds."""

_FEWER = 0.8
"""With many tasks, the next number of executors to try, as a share of the previous one."""

_ALL_COUNTS = 12
"""Number of tasks of a kind up to which every number of executors is tried."""

_ROUNDING = 1e-9
"""Relative difference below which two times count as equal."""


def apart(problem: SchedulingProblem) -> Colocation:
    """Return the problem without sharing: every waiting task has its own executor."""
    return composed(problem, running_executors(problem))


def colocated(problem: SchedulingProblem) -> Colocation:
    """Decide which waiting tasks share an executor, and which join a running one, so that the makespan decreases.

    Tasks may share if they have the same base model, priority and release, use one GPU each, and fit into memory
    together; a tenant with a quota shares only with itself. Tasks join a running executor only if no task of a higher
    priority waits, because they delay what follows on its GPU.

    The kinds of tasks are searched in order: the highest priority first, then the most work. For each kind, smaller and
    smaller numbers of new executors are tried, with and without the running ones. The tasks are divided so that every
    executor has about the same work (:func:`divide`). Then tasks are moved and swapped one by one as long as that
    helps.

    A division is kept if two conditions hold in the list schedule ``lpt``: the tasks of its own and higher priorities
    end sooner, and no priority ends later than without sharing. So no task shares for the benefit of a lower priority,
    and the makespan of ``lpt`` is never above the makespan without sharing. Ends of joined executors count too. If ends
    are equal, the division with fewer shared tasks wins.
    """
    executors = running_executors(problem)
    kinds: dict[Kind, list[TaskDemand]] = {}
    for demand in problem.pending:
        if (kind := kind_of(problem, demand)) is not None:
            kinds.setdefault(kind, []).append(demand)
    highest = max((demand.priority for demand in problem.pending), default=0)
    joinable = {
        kind: [found for found in executors if found.kind == kind] for kind in kinds if kind.priority == highest
    }
    with_choice = [kind for kind, demands in kinds.items() if len(demands) > 1 or joinable.get(kind)]
    if not with_choice:
        return composed(problem, executors)
    best = _Best(problem, executors)
    work_s = {kind: sum(demand.duration_s for demand in kinds[kind]) for kind in with_choice}
    for kind in sorted(with_choice, key=lambda kind: (-kind.priority, -work_s[kind], kind)):
        num_tries = min(_MAX_TRIES, _MAX_PLACED // len(problem.pending)) // len(with_choice)
        best.num_left = max(best.num_left + num_tries, _LEAST_TRIES)
        _DivisionSearch(best, kinds[kind], joinable.get(kind, ())).run()
    return best.colocation


class _Best:
    """The best groups so far, of tasks of any kind.

    Attributes:
        colocation: The problem with these groups.
        num_left: Number of divisions that may still be tried.
    """

    def __init__(self, problem: SchedulingProblem, executors: Sequence[RunningExecutor]) -> None:
        self.problem = problem
        self.executors = executors
        self.groups: tuple[Group, ...] = ()
        self.colocation = composed(problem, executors)
        self.num_left = 0
        self._priorities = sorted({demand.priority for demand in problem.pending}, reverse=True)
        self._apart = self._ends = self._ends_of(self.colocation)

    def take_if_better(self, groups: Sequence[Group], priority: int) -> bool:
        """Keep ``groups`` if they are better for tasks of ``priority`` and higher. Return whether they were kept. The
        call counts as a try."""
        self.num_left -= 1
        if any(group.end_s > MAX_DURATION_S for group in groups):
            return False
        found = composed(self.problem, self.executors, groups)
        ends = self._ends_of(found)
        if any(end > before for end, before in zip(ends, self._apart, strict=True)):
            return False
        count = self._priorities.index(priority) + 1
        before = (*self._ends[:count], _num_shared(self.groups))
        if not _is_less((*ends[:count], _num_shared(groups)), before):
            return False
        self.groups, self._ends, self.colocation = tuple(groups), ends, found
        return True

    def ends_by_task(self) -> Mapping[str, float]:
        """Return when the executor of each task ends; a new group is listed only under the task that represents it."""
        ends = {found.demand.task: found.end for found in list_reservations(self.colocation.problem, "lpt")}
        return ends | {demand.task: group.end_s for group in self.colocation.joins for demand in group.tasks}

    def _ends_of(self, colocation: Colocation) -> tuple[float, ...]:
        """Return the last end of each priority, the highest first."""
        ends = dict.fromkeys(self._priorities, 0.0)
        for group in colocation.joins:
            priority = group.tasks[0].priority
            ends[priority] = max(ends[priority], group.end_s)
        for reservation in list_reservations(colocation.problem, "lpt"):
            priority = reservation.demand.priority
            ends[priority] = max(ends[priority], reservation.end)
        return tuple(ends.values())


class _DivisionSearch:
    """The search for a division of the tasks of one kind, given the best groups of other kinds."""

    def __init__(self, best: _Best, demands: Sequence[TaskDemand], running: Sequence[RunningExecutor]) -> None:
        self._best = best
        self._demands = demands
        self._running = {found.first.executor: found for found in running}
        self._joined = [Bin(executor=name, running=found.sharings) for name, found in self._running.items()]
        self._others = best.groups
        self._tried: set[frozenset[tuple[str, ...]]] = set()
        self._division: Division = (*(Bin(tasks=(demand,)) for demand in demands), *self._joined)

    def run(self) -> None:
        self._try_counts([], [])
        if self._joined:
            self._try_counts(
                self._joined, [sum(member.own_s for member in found.members) for found in self._running.values()]
            )
        while self._refine():
            pass

    def _try_counts(self, joined: Sequence[Bin], held_s: Sequence[float]) -> None:
        """Try fewer and fewer new executors, in addition to ``joined``, which already have ``held_s`` seconds of own
        work each."""
        taken = {gpu for item in joined for gpu in self._running[item.executor].first.gpus}
        ready_s = sorted(self._free_at_s(taken)) or [0.0]
        for count in _counts(len(self._demands), self._best.problem.num_gpus, has_running=bool(joined)):
            loads_s = [ready_s[number % len(ready_s)] for number in range(count)]
            self._try(divide(self._demands, [*[Bin()] * count, *joined], [*loads_s, *held_s]))

    def _free_at_s(self, taken: set[Gpu]) -> list[float]:
        """Return when each GPU becomes free, without the GPUs in ``taken``."""
        free_s = {Gpu(node.name, index): 0.0 for node in self._best.problem.nodes for index in node.gpus}
        for executor in self._best.executors:
            free_s |= {gpu: executor.remaining_s for gpu in executor.first.gpus if gpu in free_s}
        return [time_s for gpu, time_s in free_s.items() if gpu not in taken]

    def _refine(self) -> bool:
        """Make one small change of the division that improves it; return whether one was found."""
        ends = self._best.ends_by_task()

        def end_s(item: Bin) -> float:
            return max((ends.get(demand.task, 0.0) for demand in item.tasks), default=0.0)

        for division in neighbours(sorted(self._division, key=end_s, reverse=True)):
            if self._best.num_left <= 0:
                return False
            if self._try(division):
                return True
        return False

    def _try(self, division: Division) -> bool:
        """Keep a division if it is better than the best so far; return whether it is."""
        groups = [
            group_of(item.tasks, self._running[item.executor].members if item.executor else (), item.executor)
            for item in division
            if len(item.tasks) > 1 or (item.tasks and item.executor)
        ]
        names = frozenset((group.executor, *sorted(demand.task for demand in group.tasks)) for group in groups)
        if self._best.num_left <= 0 or names in self._tried:
            return False
        self._tried.add(names)
        if not self._best.take_if_better([*self._others, *groups], self._demands[0].priority):
            return False
        there = {item.executor for item in division}
        self._division = (*division, *(item for item in self._joined if item.executor not in there))
        return True


def _counts(num_tasks: int, num_gpus: int, *, has_running: bool) -> list[int]:
    """Return the numbers of new executors to try, in decreasing order.

    With few tasks, these are all numbers. With many tasks, each number is smaller than the previous one by a constant
    factor; one and two executors per GPU are tried too if they are within the limits.
    """
    least = 0 if has_running else 1
    most = num_tasks if has_running else num_tasks - 1
    if num_tasks <= _ALL_COUNTS:
        return list(range(most, least - 1, -1))
    counts = {most, least, *(count for count in (num_gpus, 2 * num_gpus) if least <= count <= most)}
    count = float(most)
    while (count := count * _FEWER) >= 1:
        counts.add(round(count))
    return sorted(counts, reverse=True)


def _num_shared(groups: Iterable[Group]) -> int:
    return sum(len(group.tasks) for group in groups)


def _is_less(found: Sequence[float], best: Sequence[float]) -> bool:
    """Compare two lists of numbers in order, ignoring differences by rounding; return whether ``found`` is less."""
    for one, other in zip(found, best, strict=True):
        if abs(one - other) > _ROUNDING * max(abs(one), abs(other)):
            return one < other
    return False
