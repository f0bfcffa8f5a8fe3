"""Where and how the queues of an engine run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from alto.cluster import Cluster, GuardedSolver, open_cluster, unique_name
from alto.engine.estimates import known_estimate, remember_duration
from alto.engine.gpus import check_num_gpus
from alto.errors import SpecError
from alto.records import Node, Schedule, TaskEstimate
from alto.scheduler import METHODS, SchedulingProblem, TaskDemand
from alto.spec import Task

__all__ = ["QueueSetup", "check_method", "first_as_given", "first_schedule", "replanning", "unique_names"]

SOLVE_S = 10.0
"""Time limit of the solver for the first schedule."""
REPLAN_S = 1.0
"""Time limit for a new schedule while tasks run; free GPUs wait for it."""

SOLVE_GAP, REPLAN_GAP = 0.001, 0.01
"""Accepted relative gap of each schedule: durations are less exact than this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSetup:
    """Where and how queues run; values as :class:`alto.Engine` takes them.

    Attributes:
        strategy: How a task uses several GPUs.
        cluster: Address of the cluster.
        total_gpus: GPUs to use at most; None for all.
        quotas: The most GPUs of a tenant at a time.
        share_executor: Whether tasks on one base model may share an executor, where they allow it.
    """

    strategy: str
    cluster: str
    total_gpus: int | None
    quotas: Mapping[str, int]
    share_executor: bool = True

    @property
    def is_parallel(self) -> bool:
        """Whether a task on several GPUs is a process on each."""
        return self.strategy == "adapter_parallel"

    def settings(self, method: str) -> dict[str, Any]:
        """The settings as a queue's folder stores them."""
        return {
            "method": method,
            "strategy": self.strategy,
            "cluster": self.cluster,
            "total_gpus": self.total_gpus,
            "quotas": dict(self.quotas),
            "share_executor": self.share_executor,
        }

    @contextlib.contextmanager
    def opened(self) -> Iterator[Cluster]:
        """The cluster, until the block is left."""
        with contextlib.closing(open_cluster(self.cluster, total_gpus=self.total_gpus)) as cluster:
            yield cluster

    def check(self, tasks: Sequence[Task], cluster: Cluster) -> None:
        """Check that every task can be placed, before anything is measured or written."""
        self.problem(tasks, [TaskEstimate(duration_s=1.0)] * len(tasks), cluster.nodes)
        most = max(len(node.gpus) for node in cluster.nodes)
        for task in tasks:
            check_num_gpus(task, self.strategy, most=most, has_gpus=cluster.has_gpus)

    def problem(
        self, tasks: Sequence[Task], estimates: Sequence[TaskEstimate], nodes: Sequence[Node]
    ) -> SchedulingProblem:
        """The scheduling of ``tasks``.

        Args:
            tasks: Tasks that wait.
            estimates: What each of them takes.
            nodes: Of the cluster.
        """
        return SchedulingProblem(
            nodes=tuple(nodes),
            pending=tuple(
                TaskDemand(
                    task=name,
                    num_gpus=task.num_gpus,
                    duration_s=estimate.duration_s,
                    priority=task.priority,
                    tenant=task.tenant,
                    sharing=estimate.sharing,
                )
                for name, task, estimate in zip(unique_names(tasks), tasks, estimates, strict=True)
            ),
            quotas=self.quotas,
        )

    def known_estimate(self, task: Task, cluster: Cluster) -> TaskEstimate | None:
        """What such a task was measured to take on such a cluster; None where that is not known."""
        found = known_estimate(task, cluster, self._num_ranks(task))
        return found if found is None else self.allowed(found)

    def remember_duration(self, task: Task, cluster: Cluster, duration_s: float) -> None:
        """Cache how long ``task`` has taken on ``cluster``, for :meth:`known_estimate`."""
        remember_duration(task, cluster, self._num_ranks(task), duration_s)

    def allowed(self, estimate: TaskEstimate) -> TaskEstimate:
        """``estimate`` as far as tasks may share here."""
        return estimate if self.share_executor else replace(estimate, sharing=None)

    def _num_ranks(self, task: Task) -> int:
        return task.num_gpus if self.is_parallel else 1


def unique_names(tasks: Sequence[Task]) -> list[str]:
    """A name for each task: its own, with a number where one before it has the same."""
    own, names = {task.name for task in tasks}, list[str]()
    for task in tasks:
        names.append(task.name if task.name not in names else unique_name(task.name, own.union(names)))
    return names


def first_schedule(problem: SchedulingProblem, method: str) -> Schedule:
    """The first schedule of a queue."""
    with GuardedSolver(method, time_limit_s=SOLVE_S, gap=SOLVE_GAP) as solve:
        return solve(problem)


def replanning(method: str) -> GuardedSolver:
    """A solver for new schedules while tasks run; to be closed."""
    return GuardedSolver(method, time_limit_s=REPLAN_S, gap=REPLAN_GAP)


def first_as_given(
    given: Schedule | None, solve: Callable[[SchedulingProblem, Schedule | None], Schedule]
) -> Callable[[SchedulingProblem, Schedule | None], Schedule]:
    """A solver whose first answer is ``given``, where that is a schedule of the requested tasks."""
    left = [] if given is None else [given]

    def answer(problem: SchedulingProblem, hint: Schedule | None = None) -> Schedule:
        first = left.pop() if left else None
        if first is not None and {place.task for place in first.placements} == {task.task for task in problem.pending}:
            return first
        return solve(problem, hint)

    return answer


def check_method(method: str) -> None:
    """Check that a method of scheduling exists."""
    if method.lower() not in METHODS:
        raise SpecError(f"method: expected one of {', '.join(METHODS)}, found {method!r}")
