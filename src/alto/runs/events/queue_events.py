"""The events of a queue: those of its journal, and one that only observers see. Times are unix seconds, durations
seconds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from alto.records import Gpu, Node, Placement
from alto.runs.events.facts import QueuedTask
from alto.runs.events.fields import wire
from alto.runs.events.run_events import FORMAT

__all__ = [
    "ExecutorExited",
    "ExecutorStarted",
    "GpuAdded",
    "GpuLost",
    "QueueCompleted",
    "QueueEvent",
    "QueueInterrupted",
    "QueueResumed",
    "QueueStarted",
    "SchedulePlanned",
    "TaskCancelled",
    "TaskGivenUp",
    "TaskMeasured",
    "TaskSubmitted",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueStarted:
    """The first event: the cluster, and all tasks.

    Attributes:
        method: Who makes the schedules: ``cp-sat``, ``milp``, ``fifo``, ``sjf`` or ``lpt``.
        devices: ``gpus``, or ``cpu slots`` where these stand for GPUs.
        nodes: The machines and the numbers of their GPUs.
        tasks: All tasks, in the order they were given.
        format: Version of the journal's format.
    """

    method: str = field(metadata=wire(if_absent=""))
    devices: str = field(metadata=wire(if_absent="gpus"))
    nodes: tuple[Node, ...]
    tasks: tuple[QueuedTask, ...]
    format: int = field(default=FORMAT, metadata=wire(if_absent=1, always=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueResumed:
    """A process resumes the queue.

    Attributes:
        done: Tasks that had their result.
        notes: What the journal has lost, in sentences.
    """

    done: tuple[str, ...] = field(metadata=wire(if_absent=[]))
    notes: tuple[str, ...] = field(metadata=wire(if_absent=[]))


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSubmitted:
    """A task came after the queue had started.

    Attributes:
        task: Name of the task in the queue.
        num_gpus: GPUs that it runs on.
        duration_s: What it is estimated to take in seconds, early exit counted.
        priority: Higher goes first.
        tenant: Whose task it is; empty where nobody was named.
        command: Id of the command that submitted it; empty where the process that works on the queue did.
    """

    task: str
    num_gpus: int
    duration_s: float
    priority: int = 0
    tenant: str = ""
    command: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskCancelled:
    """Nobody wants a task any more: it is not started, or its executor saves and ends.

    Attributes:
        task: Name of the task in the queue.
        command: Id of the command that cancelled it; empty where the process that works on the queue did.
    """

    task: str
    command: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulePlanned:
    """A new schedule of the tasks that wait.

    Attributes:
        reason: Why it was made.
        method: Who made it.
        status: ``optimal``, ``feasible`` or ``heuristic``.
        makespan_s: Seconds to the end of the last task.
        bound_s: No schedule of these tasks ends before, in seconds.
        notice: Why it is not what was asked for; empty where it is.
        placements: Where and when each task runs; starts are seconds since this event.
    """

    reason: str
    method: str
    status: str
    makespan_s: float
    bound_s: float
    notice: str = field(metadata=wire(if_absent=""))
    placements: tuple[Placement, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorStarted:
    """A task was given GPUs.

    Attributes:
        task: Name of the task in the queue.
        attempt: Counts the executors of the task, from 1.
        gpus: Node and number of each.
    """

    task: str
    attempt: int
    gpus: tuple[Gpu, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorExited:
    """The processes of a task's executor are gone.

    Attributes:
        task: Name of the task in the queue.
        attempt: As of ``executor_started``.
        outcome: ``finished``, ``interrupted``, ``failed`` or ``lost``.
        reason: Why, in a sentence.
    """

    task: str
    attempt: int
    outcome: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskGivenUp:
    """A task is not tried again.

    Attributes:
        task: Name of the task in the queue.
        reason: Why, in a sentence.
    """

    task: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuLost:
    """A GPU left the cluster.

    Attributes:
        node: Its machine.
        index: Its number there.
    """

    node: str
    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuAdded:
    """A GPU joined the cluster.

    Attributes:
        node: Its machine.
        index: Its number there.
    """

    node: str
    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueInterrupted:
    """The queue was stopped by Ctrl-C or SIGTERM, with everything saved.

    Attributes:
        open: Tasks that still have to finish.
    """

    open: tuple[str, ...] = field(metadata=wire(if_absent=[]))


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueCompleted:
    """Every task has its result or was given up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskMeasured:
    """Before the queue begins: what a task is estimated to take. Observers see it; no journal holds it.

    Attributes:
        task: Name of the task.
        duration_s: Seconds, early exit counted.
    """

    task: str
    duration_s: float


QueueEvent: TypeAlias = (
    QueueStarted
    | QueueResumed
    | TaskSubmitted
    | TaskCancelled
    | SchedulePlanned
    | ExecutorStarted
    | ExecutorExited
    | TaskGivenUp
    | GpuLost
    | GpuAdded
    | QueueInterrupted
    | QueueCompleted
    | TaskMeasured
)
