"""Records of GPUs and of schedules: where and when each task runs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from itertools import zip_longest
from typing import Any, Literal, Self

MIN_DURATION_S, MAX_DURATION_S = 1e-6, 1e12
"""Bounds of a task's estimated duration in seconds: beyond them, sums and shares of times lose precision."""


@dataclass(frozen=True, slots=True, order=True)
class Gpu:
    """One device of a cluster; on a machine without GPUs, a CPU slot in its place."""

    node: str
    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One machine of a cluster.

    Attributes:
        name: Name of the machine, unique in the cluster.
        gpus: Indices of its devices; a lost device leaves a gap.
    """

    name: str
    gpus: tuple[int, ...]


def nodes_covering(*clusters: Iterable[Node]) -> tuple[Node, ...]:
    """Return the smallest set of nodes that has room for each of ``clusters``: its largest node is as large as the
    largest of any cluster, its second largest as the second largest of any, and so on. Its nodes have numbers as names.
    """
    sizes = [sorted((len(node.gpus) for node in nodes), reverse=True) for nodes in clusters]
    largest = (max(found) for found in zip_longest(*sizes, fillvalue=0))
    return tuple(Node(name=str(number), gpus=tuple(range(size))) for number, size in enumerate(largest, 1) if size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """The properties of a task that may share an executor with others.

    Attributes:
        base: The frozen base model; tasks with the same base model can share an executor. Never empty.
        step_s: Seconds of the task's duration that its steps take regardless of how many tokens they train. Tasks that
            step together pay them once.
        num_slots: Maximum number of slots that its jobs use.
        slot_bytes: Size of one of its slots. Every slot of a shared bank has the size of the largest.
        pass_bytes: Memory in addition to the bank: base model and largest micro-batch. Tasks that share an executor
            need only the largest of these.
        capacity_bytes: Memory that plans may use.
    """

    base: str
    step_s: float
    num_slots: int
    slot_bytes: int
    pass_bytes: int
    capacity_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskEstimate:
    """The expected duration of a task.

    Attributes:
        duration_s: Seconds in an executor of its own, including early exit.
        sharing: Properties for sharing an executor; None if the task must have one of its own.
    """

    duration_s: float
    sharing: Sharing | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """A queued task: the facts that planning, recording and starting it need.

    Attributes:
        task: Name of the task, unique in its queue.
        num_gpus: Number of GPUs on which it runs.
        duration_s: Estimated seconds, early exit included.
        priority: Higher goes first.
        tenant: Tenant whose quota the GPUs count against; empty if none was named.
    """

    task: str
    num_gpus: int
    duration_s: float
    priority: int = 0
    tenant: str = ""

    @classmethod
    def of(cls, demand: Demand, **more: Any) -> Self:
        """Return an object of this class with the fields of ``demand``, and the fields ``more``."""
        return cls(**({field.name: getattr(demand, field.name) for field in fields(Demand)} | more))


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The place and time of one task.

    Attributes:
        gpus: GPUs in increasing order; all on one node if a node is large enough.
        start_s: Seconds after the schedule was made.
        duration_s: Estimated seconds, including the slowdown by other tasks in the same executor.
        executor: Name of the executor; tasks with the same name share it. Empty: the task has one of its own.
    """

    task: str
    gpus: tuple[Gpu, ...]
    start_s: float
    duration_s: float
    executor: str = ""

    @property
    def end_s(self) -> float:
        return self.start_s + self.duration_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Placements of a set of tasks, in the order of their starts.

    Attributes:
        method: Method that made the schedule: ``cp-sat``, ``milp``, ``fifo``, ``sjf`` or ``lpt``.
        status: ``optimal`` (makespan proven), ``feasible`` (the solver ran out of time) or ``heuristic``.
        bound_s: Lower bound of the makespan, in seconds, for this assignment of tasks to shared executors. The
            assignment is made before (:func:`alto.scheduler.colocated`); another one may end sooner.
        notice: Why the requested method was not used; empty if it was.
    """

    method: str
    status: Literal["optimal", "feasible", "heuristic"]
    placements: tuple[Placement, ...]
    bound_s: float
    notice: str = ""

    @property
    def makespan_s(self) -> float:
        """End of the last task, in seconds; 0 if there are no tasks."""
        return max((placement.end_s for placement in self.placements), default=0.0)

    @property
    def gap(self) -> float:
        """Largest possible excess of the makespan over the minimum, relative to the minimum; 0 if it is proven."""
        return self.makespan_s / self.bound_s - 1.0 if self.bound_s else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationOutcome:
    """The result of one method on a simulated set of tasks.

    Attributes:
        label: Label in the paper's terms: ``B`` for batching alone, first come first served; ``+S`` with a scheduler,
            ``+EE`` with early exit.
        planner: Names of the methods that actually made the plans.
        makespan_s: Seconds from the first arrival to the end of the last task.
        mean_completion_s, p99_completion_s: Mean and 99th percentile of the seconds from arrival to end of the finished
            tasks; 0 if none finished.
        utilisation: Share of the available GPU time until the end in which an executor held the GPU, in [0, 1].
        num_replans, num_attempts: Number of plans made, and of attempts.
        planned: Placement of every task when it was first planned; times count from the first arrival.
        actual: Actual placement of every attempt.
    """

    method: str
    early_exit: bool
    label: str
    planner: str
    makespan_s: float
    mean_completion_s: float
    p99_completion_s: float
    utilisation: float
    num_replans: int
    num_attempts: int
    num_finished: int
    num_failed: int
    planned: tuple[Placement, ...]
    actual: tuple[Placement, ...]
