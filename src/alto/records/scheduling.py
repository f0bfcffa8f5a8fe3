"""GPUs, and which task runs on them when."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = [
    "MAX_DURATION_S",
    "MIN_DURATION_S",
    "Gpu",
    "Node",
    "Placement",
    "Schedule",
    "Sharing",
    "SimulationOutcome",
    "TaskEstimate",
]

MIN_DURATION_S, MAX_DURATION_S = 1e-6, 1e12
"""Bounds of a task's estimated duration in seconds: beyond them, sums and shares of times lose precision."""


@dataclass(frozen=True, slots=True, order=True)
class Gpu:
    """One device of a cluster; on a machine without GPUs, one of the CPU slots that stand for them."""

    node: str
    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One machine of a cluster.

    Attributes:
        name: Unique in the cluster.
        gpus: Numbers of its devices; a device that was lost leaves a gap.
    """

    name: str
    gpus: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """What is known of a task that may share an executor with others.

    Attributes:
        base: The frozen base model: tasks with equal ones can share an executor; never empty.
        step_s: Seconds of the task's duration that its steps take whatever they train, from 0 to that duration. Tasks
            that step together pay this once.
        num_slots: Slots that its jobs use at most.
        slot_bytes: One of its slots. Slots of a shared bank are as large as the largest.
        pass_bytes: Memory beside the bank: base model and largest micro-batch. Tasks that share need that of the
            largest.
        capacity_bytes: Memory that may be planned with.
    """

    base: str
    step_s: float
    num_slots: int
    slot_bytes: int
    pass_bytes: int
    capacity_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskEstimate:
    """What a task is expected to take.

    Attributes:
        duration_s: Seconds in an executor of its own, early exit included.
        sharing: What is known for sharing an executor; None where it has one of its own.
    """

    duration_s: float
    sharing: Sharing | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where and when one task runs.

    Attributes:
        task: Name of the task.
        gpus: In rising order. All on one node wherever a node is large enough.
        start_s: Seconds after the schedule was made.
        duration_s: Seconds, as estimated; of a task that shares an executor, beside the others there.
        executor: Tasks with the same one share it; empty: the task has one of its own.
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
        method: Method that made it: ``cp-sat``, ``milp``, ``fifo``, ``sjf`` or ``lpt``.
        status: ``optimal`` (makespan proven), ``feasible`` (the solver ran out of time) or ``heuristic``.
        bound_s: Lower bound of the makespan, in seconds, for tasks that share executors as they do here: which tasks
            share is decided before (:func:`alto.scheduler.colocated`), and another division may end sooner.
        notice: Why another method was used than the requested one; empty where it was used.
    """

    method: str
    status: Literal["optimal", "feasible", "heuristic"]
    placements: tuple[Placement, ...]
    bound_s: float
    notice: str = ""

    @property
    def makespan_s(self) -> float:
        """End of the last task; 0 where there is none."""
        return max((placement.end_s for placement in self.placements), default=0.0)

    @property
    def gap(self) -> float:
        """How far the makespan may be above the least possible one, relative to that; 0 where it is proven."""
        return self.makespan_s / self.bound_s - 1.0 if self.bound_s else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationOutcome:
    """The result of one method on a simulated set of tasks.

    Attributes:
        label: In the paper's terms: ``B`` for batching alone, first come first served; ``+S`` with a scheduler,
            ``+EE`` with early exit.
        planner: The methods that made the plans, where there were others.
        makespan_s: From the first arrival to the end of the last task.
        mean_completion_s, p99_completion_s: From arrival to end, of the tasks that finished; 0 where none did.
        utilisation: Share of the available GPU time until the end in which an executor held the GPU, in [0, 1].
        num_replans, num_attempts: Plans made, executors started.
        num_finished, num_failed: Tasks.
        planned: Where every task was to run when it was first planned, times from the first arrival.
        actual: Where every attempt did run.
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
