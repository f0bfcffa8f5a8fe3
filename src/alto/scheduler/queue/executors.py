"""The running executors: their GPUs, and the tasks in each."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from alto.errors import SpecError
from alto.records import Gpu, Node, Placement, Schedule, Sharing, nodes_covering
from alto.scheduler.inter_task import Member, RunningTask, finish_times_s, member_of, members_ending_at
from alto.scheduler.queue.task import LEAST_S, ScheduledTask, TaskState


class GpuPool:
    """The GPUs of a cluster: the existing ones, the free ones, and the largest machines so far.

    Args:
        declared: Machines that the cluster had before.

    Raises:
        SpecError: Two nodes have the same name.
    """

    def __init__(self, nodes: Sequence[Node], declared: Sequence[Node] = ()) -> None:
        names = [node.name for node in nodes]
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            raise SpecError(f"node: expected a unique name for each node, found {twice[0]!r} twice; rename one")
        self._present = {Gpu(node.name, index) for node in nodes for index in node.gpus}
        self._taken: set[Gpu] = set()
        self.free = set(self._present)
        self.nodes = _nodes(self._present)
        """Present nodes, without nodes that have no GPU left."""
        self.declared_nodes = nodes_covering(declared, self.nodes)
        """See `nodes_covering`; a task that does not fit on them can never be placed."""

    def __len__(self) -> int:
        return len(self._present)

    @property
    def free_nodes(self) -> tuple[Node, ...]:
        """The nodes that have free GPUs, with only the free ones."""
        return _nodes(self.free)

    def __contains__(self, gpu: Gpu) -> bool:
        return gpu in self._present

    def lose(self, gpu: Gpu) -> bool:
        """Remove a lost GPU and return whether it existed."""
        was_there = gpu in self._present
        self._present.discard(gpu)
        self.free.discard(gpu)
        self.nodes = _nodes(self._present)
        return was_there

    def add(self, gpu: Gpu) -> bool:
        """Add a GPU and return whether it is new; while a task still holds it, it is not free."""
        if gpu in self._present:
            return False
        self._present.add(gpu)
        self.nodes = _nodes(self._present)
        self.declared_nodes = nodes_covering(self.declared_nodes, self.nodes)
        if gpu not in self._taken:
            self.free.add(gpu)
        return True

    def take(self, gpus: Iterable[Gpu]) -> None:
        gpus = set(gpus)
        assert gpus <= self.free, f"{gpus - self.free} are not free"
        self.free -= gpus
        self._taken |= gpus

    def give_back(self, gpus: Iterable[Gpu]) -> None:
        """Release GPUs; a GPU that was lost meanwhile does not become free."""
        gpus = set(gpus)
        self._taken -= gpus
        self.free |= gpus & self._present


def _nodes(gpus: Iterable[Gpu]) -> tuple[Node, ...]:
    indices: dict[str, list[int]] = {}
    for gpu in sorted(gpus):
        indices.setdefault(gpu.node, []).append(gpu.index)
    return tuple(Node(name=name, gpus=tuple(found)) for name, found in indices.items())


_OVERRUN = 0.1
"""Estimated remaining time of a task that has exceeded its estimate, as a share of its time so far."""

_Key = tuple[str, str]
"""Key of an executor: its name and an empty string; without a name, an empty string and the name of its only task."""


@dataclass(slots=True, kw_only=True)
class _Executor:
    """One executor.

    Attributes:
        gpus: Its GPUs, held from the start of its first task to the end of its last.
        first: The first task, even after its end; the GPUs count against its tenant's quota.
        is_lost: Whether one of its tasks was lost. The executor probably was lost too, so no task may join it.
    """

    gpus: tuple[Gpu, ...]
    first: ScheduledTask
    tasks: dict[str, ScheduledTask] = field(default_factory=dict)
    is_lost: bool = False


class Executors:
    """The running executors, and which tasks hold which GPUs.

    The first task of an executor takes its GPUs, and the last task gives them back. An executor that other tasks may
    join has a name that is unique in the queue's life. When a task joins or leaves, the expected ends of the others are
    updated by the model of time (:func:`finish_times_s`).

    Args:
        quotas: Maximum number of GPUs of a tenant at a time; the GPUs of a shared executor count once.
    """

    def __init__(self, pool: GpuPool, quotas: Mapping[str, int]) -> None:
        self._pool = pool
        self._quotas = quotas
        self._executors: dict[_Key, _Executor] = {}
        self._tasks: dict[str, ScheduledTask] = {}
        self._num_named = 0
        self.in_use: Counter[str] = Counter()
        """GPUs in use by tenant."""

    @property
    def tasks(self) -> Mapping[str, ScheduledTask]:
        """The tasks that hold GPUs, in the order of their starts."""
        return MappingProxyType(self._tasks)

    def named(self, schedule: Schedule) -> Schedule:
        """Return the schedule with new executors renamed to names unique in this queue; running executors keep their
        names."""
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
        """Return whether the placement is in a running executor, on its GPU, that the task may join."""
        executor = self._executors.get((placement.executor, "")) if placement.executor else None
        return executor is not None and executor.gpus == placement.gpus and self._may_be_joined(executor)

    def may_start(self, task: ScheduledTask, placement: Placement) -> bool:
        """Return whether a task can start as placed: in a running executor, or on free GPUs within the quota."""
        if self.is_there(placement):
            return True
        # GPUs or quota may still be in use: a task that the plan expected to end by now may take longer.
        quota = self._quotas.get(task.demand.tenant, math.inf)
        return self.are_free(placement.gpus) and self.in_use[task.demand.tenant] + len(placement.gpus) <= quota

    def are_free(self, gpus: Iterable[Gpu]) -> bool:
        return self._pool.free.issuperset(gpus)

    def start(self, task: ScheduledTask, placement: Placement, now_s: float, *, is_open: bool) -> None:
        """Begin an attempt of ``task`` where it is placed.

        Args:
            task: The task; :meth:`may_start` must be true.
            is_open: Whether other tasks may join later, if the task may share; the executor then has a name.
        """
        can_share = is_open and task.wanted.sharing is not None and task.demand.num_gpus == 1
        name = placement.executor or (self._new_name() if can_share else "")
        key = _key(name, task)
        if key not in self._executors:
            self._pool.take(placement.gpus)
            self.in_use[task.demand.tenant] += len(placement.gpus)
            self._executors[key] = _Executor(gpus=placement.gpus, first=task)
        executor = self._executors[key]
        others = list(executor.tasks.values())
        self._tasks[task.name] = executor.tasks[task.name] = task
        task.begin_attempt(placement.gpus, now_s, name)
        if others:
            alone = member_of(task.demand.duration_s, _step_share(task) * task.demand.duration_s)
            _expect([*others, task], [*_members(others, now_s), alone], now_s)

    def leave(self, task: ScheduledTask, now_s: float, *, is_lost: bool = False) -> bool:
        """End an attempt of ``task``.

        Args:
            is_lost: Whether the task failed in a way that may mean the end of its executor.

        Returns:
            Whether the task shared its executor with others, now or until the executor was lost.
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
            self.in_use[executor.first.demand.tenant] -= len(executor.gpus)
        return shared

    def running(self, now_s: float) -> tuple[RunningTask, ...]:
        """Return the tasks that hold GPUs, for the scheduler; tasks whose GPUs are all lost are left out."""
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

    def _sharing(self, task: ScheduledTask, remaining_s: float) -> Sharing | None:
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


def _key(name: str, task: ScheduledTask) -> _Key:
    return name, "" if name else task.name


def _members(tasks: Iterable[ScheduledTask], now_s: float) -> list[Member]:
    """Return the remaining work of tasks that share an executor, computed from their expected ends."""
    found = list(tasks)
    ends_s = [max(task.expected_end_s - now_s, 0.0) for task in found]
    return members_ending_at(ends_s, [_step_share(task) for task in found])


def _expect(tasks: Iterable[ScheduledTask], members: list[Member], now_s: float) -> None:
    """Set the expected ends of ``tasks``, assuming that no task joins or leaves."""
    for task, end_s in zip(tasks, finish_times_s(members), strict=True):
        task.expected_end_s = now_s + end_s
        task.planned_s = max(task.expected_end_s - task.started_s, LEAST_S)


def _step_share(task: ScheduledTask) -> float:
    sharing = task.demand.sharing
    return sharing.step_s / task.demand.duration_s if sharing is not None else 0.0
