"""The inter-task scheduling problem: waiting tasks, running tasks, GPUs and quotas."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from alto.errors import SpecError
from alto.records import MAX_DURATION_S, MIN_DURATION_S, Gpu, Node
from alto.spec.outside import is_number

__all__ = ["RunningTask", "SchedulingProblem", "TaskDemand"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskDemand:
    """A waiting task, for the scheduler.

    Attributes:
        task: Unique among all tasks of a problem.
        duration_s: Estimated, on ``num_gpus`` GPUs.
        release_s: It starts no earlier; seconds from now.
        priority: A task of a lower priority never delays a waiting one of a higher.
        tenant: Whose quota its GPUs count against.
    """

    task: str
    num_gpus: int
    duration_s: float
    release_s: float = 0.0
    priority: int = 0
    tenant: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningTask:
    """A task that runs already: it stays where it is for ``remaining_s`` more seconds.

    Attributes:
        gpus: Its GPUs.
        tenant: Whose quota its GPUs count against.
    """

    task: str
    gpus: tuple[Gpu, ...]
    remaining_s: float
    tenant: str = ""


@dataclass(frozen=True, kw_only=True)
class SchedulingProblem:
    """Tasks that wait, on a cluster where others run.

    Attributes:
        nodes: Those that have GPUs; others that were given are left out.
        pending: Waiting tasks.
        running: Running tasks.
        quotas: The most GPUs a tenant has at a time; a tenant that is not named has no limit.

    Raises:
        SpecError: A name or a GPU is given twice, a duration or quota is out of bounds, or a task can never be placed.
    """

    nodes: tuple[Node, ...]
    pending: tuple[TaskDemand, ...]
    running: tuple[RunningTask, ...] = ()
    quotas: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = Counter([demand.task for demand in self.pending] + [task.task for task in self.running])
        twice = [name for name, count in names.items() if count > 1]
        if twice:
            raise SpecError(f"task: expected a name of its own for each task, found {twice[0]!r} twice; rename one")
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
        for demand in self.pending:
            self._check(demand)

    def _check_nodes(self) -> None:
        twice = [name for name, count in Counter(node.name for node in self.nodes).items() if count > 1]
        if twice:
            raise SpecError(f"node: expected a name of its own for each node, found {twice[0]!r} twice; rename one")
        for node in self.nodes:
            if len(set(node.gpus)) < len(node.gpus):
                raise SpecError(
                    f"node {node.name!r}: expected each GPU once, found {', '.join(map(str, node.gpus))}; correct them"
                )

    @cached_property
    def num_gpus(self) -> int:
        return sum(len(node.gpus) for node in self.nodes)

    @cached_property
    def gpus_by_node(self) -> Mapping[str, frozenset[int]]:
        """Numbers of the GPUs of each node, by its name."""
        return {node.name: frozenset(node.gpus) for node in self.nodes}

    def _check(self, demand: TaskDemand) -> None:
        where = f"task {demand.task!r}"
        if not is_number(demand.duration_s, least=MIN_DURATION_S, most=MAX_DURATION_S):
            raise SpecError(
                f"{where}: expected a duration above 0 seconds, from {MIN_DURATION_S:g} to {MAX_DURATION_S:g}, found "
                f"{demand.duration_s}; correct its estimate"
            )
        if not is_number(demand.release_s, least=0, most=MAX_DURATION_S):
            raise SpecError(
                f"{where}: expected a release of 0 or more seconds from now, {MAX_DURATION_S:g} at most, found "
                f"{demand.release_s}; correct it"
            )
        if not 1 <= demand.num_gpus <= self.num_gpus:
            raise SpecError(
                f"{where}: expected num_gpus from 1 to {self.num_gpus}, which is what the cluster has, found "
                f"{demand.num_gpus}; ask for fewer, or add GPUs"
            )
        quota = self.quotas.get(demand.tenant)
        if quota is not None and demand.num_gpus > quota:
            raise SpecError(
                f"{where}: expected at most {quota} GPUs, which is the quota of tenant {demand.tenant!r}, found "
                f"{demand.num_gpus}; ask for fewer, or raise the quota"
            )
