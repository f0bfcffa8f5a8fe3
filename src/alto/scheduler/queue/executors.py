"""The executors that run: their GPUs, and the tasks in each."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from alto.records import Gpu, Placement, Schedule, Sharing
from alto.scheduler.inter_task import Member, RunningTask, finish_times_s, member_of, members_ending_at
from alto.scheduler.queue.gpus import GpuPool
from alto.scheduler.queue.task import LEAST_S, QueuedTask, TaskState

__all__ = ["Executors"]

_OVERRUN = 0.1
"""Estimated remaining time of a task that exceeds its estimate, as a share of its time so far."""

_Key = tuple[str, str]
"""The name of an executor; or nothing, and the one task that it has."""


@dataclass(slots=True, kw_only=True)
class _Executor:
    """One executor.

    Attributes:
        gpus: Its GPUs, from its first task to its last.
        tenant: Whose quota they count against: the tenant of the first task.
        tasks: Its tasks by name, in the order of their starts.
        is_lost: One of its tasks was lost, so the executor probably was: no task may join it.
    """

    gpus: tuple[Gpu, ...]
    tenant: str
    tasks: dict[str, QueuedTask] = field(default_factory=dict)
    is_lost: bool = False


class Executors:
    """Which tasks have which GPUs. The first task of an executor takes its GPUs, the last gives them back.

    Executors that others may join have names, each unique in the queue's life. Whenever a task joins or leaves, the
    others are expected to end as the model of time says (:func:`finish_times_s`).

    Args:
        pool: GPUs of the cluster.
        quotas: The most GPUs of a tenant at a time; an executor counts once.
    """

    def __init__(self, pool: GpuPool, quotas: Mapping[str, int]) -> None:
        self._pool = pool
        self._quotas = quotas
        self._executors: dict[_Key, _Executor] = {}
        self._tasks: dict[str, QueuedTask] = {}
        self._num_named = 0
        self.in_use: Counter[str] = Counter()
        """GPUs by tenant."""

    @property
    def tasks(self) -> Mapping[str, QueuedTask]:
        """The tasks that have GPUs, in the order of their starts."""
        return MappingProxyType(self._tasks)

    def named(self, schedule: Schedule) -> Schedule:
        """The schedule with the names of this queue for its new executors; those that run keep theirs."""
        running = {name for name, _ in self._executors}
        names: dict[str, str] = {}
        placements: list[Placement] = []
        for placement in schedule.placements:
            if placement.executor and placement.executor not in running:
                if placement.executor not in names:
                    names[placement.executor] = self._new_name()
                placement = replace(placement, executor=names[placement.executor])
            placements.append(placement)
        return replace(schedule, placements=tuple(placements))

    def is_there(self, placement: Placement) -> bool:
        """Whether the placement is in an executor that runs, on its GPU."""
        executor = self._executors.get((placement.executor, "")) if placement.executor else None
        return executor is not None and executor.gpus == placement.gpus and self._may_be_joined(executor)

    def may_start(self, task: QueuedTask, placement: Placement) -> bool:
        """Whether a task can start as placed: in an executor that runs, or on free GPUs within the quota."""
        if self.is_there(placement):
            return True
        # Tasks that the plan expected to end earlier may take longer.
        quota = self._quotas.get(task.demand.tenant, math.inf)
        return self.are_free(placement.gpus) and self.in_use[task.demand.tenant] + len(placement.gpus) <= quota

    def are_free(self, gpus: Iterable[Gpu]) -> bool:
        return self._pool.free.issuperset(gpus)

    def start(self, task: QueuedTask, placement: Placement, now_s: float, *, is_open: bool) -> None:
        """Begin an attempt of ``task`` where it is placed.

        Args:
            task: The task; it may start.
            placement: Where.
            now_s: Time on the queue's clock.
            is_open: Others may join later, if the task may share; its executor has a name then.
        """
        can_share = is_open and task.wanted.sharing is not None and task.demand.num_gpus == 1
        name = placement.executor or (self._new_name() if can_share else "")
        key = _key(name, task)
        if key not in self._executors:
            self._pool.take(placement.gpus)
            self.in_use[task.demand.tenant] += len(placement.gpus)
            self._executors[key] = _Executor(gpus=placement.gpus, tenant=task.demand.tenant)
        executor = self._executors[key]
        others = list(executor.tasks.values())
        self._tasks[task.name] = executor.tasks[task.name] = task
        task.begin_attempt(placement.gpus, now_s, name)
        if others:
            alone = member_of(task.demand.duration_s, _step_share(task) * task.demand.duration_s)
            _expect([*others, task], [*_members(others, now_s), alone], now_s)

    def leave(self, task: QueuedTask, now_s: float, *, is_lost: bool = False) -> bool:
        """End an attempt of ``task``.

        Args:
            task: The task.
            now_s: Time on the queue's clock.
            is_lost: It failed in a way that may be its executor's end.

        Returns:
            Whether it shared its executor with others, until it was lost at least.
        """
        del self._tasks[task.name]
        key = _key(task.executor, task)
        executor = self._executors[key]
        shared = len(executor.tasks) > 1 or executor.is_lost
        executor.is_lost = executor.is_lost or is_lost
        members = dict(zip(executor.tasks, _members(executor.tasks.values(), now_s), strict=True)) if shared else {}
        del executor.tasks[task.name]
        if executor.tasks:
            _expect(executor.tasks.values(), [members[name] for name in executor.tasks], now_s)
        else:
            del self._executors[key]
            self._pool.give_back(executor.gpus)
            self.in_use[executor.tenant] -= len(executor.gpus)
        return shared

    def running(self, now_s: float) -> tuple[RunningTask, ...]:
        """The tasks that have GPUs, for the scheduler; those whose GPUs are all lost are left out."""
        found = []
        for task in self._tasks.values():
            gpus = tuple(gpu for gpu in task.gpus if gpu in self._pool)
            overrun_s = _OVERRUN * (now_s - task.started_s)
            remaining_s = max(task.expected_end_s - now_s, overrun_s, LEAST_S)
            if gpus:
                found.append(
                    RunningTask(
                        task=task.name,
                        gpus=gpus,
                        remaining_s=remaining_s,
                        tenant=task.demand.tenant,
                        priority=task.demand.priority,
                        executor=task.executor,
                        sharing=self._sharing(task, remaining_s),
                    )
                )
        return tuple(found)

    def _sharing(self, task: QueuedTask, remaining_s: float) -> Sharing | None:
        sharing = task.demand.sharing
        if not task.executor or sharing is None or not self._may_be_joined(self._executors[task.executor, ""]):
            return None
        return replace(sharing, step_s=min(_step_share(task) * remaining_s, remaining_s))

    def _may_be_joined(self, executor: _Executor) -> bool:
        tasks = executor.tasks.values()
        return (
            not executor.is_lost
            and any(task.state in (TaskState.STARTING, TaskState.RUNNING) for task in tasks)
            and not any(task.has_lost_gpu for task in tasks)
        )

    def _new_name(self) -> str:
        self._num_named += 1
        return f"executor-{self._num_named}"


def _key(name: str, task: QueuedTask) -> _Key:
    return name, "" if name else task.name


def _members(tasks: Iterable[QueuedTask], now_s: float) -> list[Member]:
    """The remaining work of tasks that share an executor, from their expected ends."""
    found = list(tasks)
    ends_s = [max(task.expected_end_s - now_s, 0.0) for task in found]
    return members_ending_at(ends_s, [_step_share(task) for task in found])


def _expect(tasks: Iterable[QueuedTask], members: list[Member], now_s: float) -> None:
    """Note when ``tasks`` end, if nobody else comes or goes."""
    for task, end_s in zip(tasks, finish_times_s(members), strict=True):
        task.expected_end_s = now_s + end_s
        task.planned_s = max(task.expected_end_s - task.started_s, LEAST_S)


def _step_share(task: QueuedTask) -> float:
    sharing = task.demand.sharing
    return sharing.step_s / task.demand.duration_s if sharing is not None else 0.0
