"""Scheduling problems and schedules in which executors take the place of tasks that share."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from alto.records import Gpu, Placement, Schedule, Sharing
from alto.scheduler.inter_task.colocation import Member, finish_times_s, member_of, members_ending_at
from alto.scheduler.inter_task.outcome import schedule_from
from alto.scheduler.inter_task.problem import RunningTask, SchedulingProblem, TaskDemand

__all__ = ["Colocation", "Group", "Kind", "RunningExecutor", "composed", "group_of", "kind_of", "running_executors"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Tasks that start together in one executor.

    Attributes:
        tasks: The tasks, on one GPU each.
        ends_s: When each task ends, in seconds from the common start.
        end_s: When the executor ends, in seconds from the common start.
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
    """A scheduling problem with executors in the place of tasks.

    Attributes:
        problem: The problem without sharing. One waiting task represents each new group, and one running task each
            running executor, which runs longer if tasks join it. Tasks that join do not wait.
        groups: New groups of two or more tasks; in `problem`, each has the name of its first task.
        joins: Groups that join running executors now.
        gpus: GPUs of the running executors by name.
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
    """Return the kind of tasks that may share with ``task``; None if none may."""
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
    """Return the running executors. Others may join if all its tasks may share and its GPU is present."""
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
    shares = [
        sharing.step_s / task.remaining_s if task.remaining_s else 0.0
        for task, sharing in zip(tasks, sharings, strict=True)
    ]
    return RunningExecutor(
        first=first,
        remaining_s=remaining_s,
        kind=kinds.pop(),
        members=tuple(members_ending_at([task.remaining_s for task in tasks], shares)),
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
    """Return the problem with executors in the place of tasks.

    Args:
        problem: The scheduling problem.
        executors: The running executors.
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
