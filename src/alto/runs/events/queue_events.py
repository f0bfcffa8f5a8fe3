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
    "MeasuringBegun",
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
        method: Method of scheduling: ``cp-sat``, ``milp``, ``fifo``, ``sjf`` or ``lpt``.
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
        notes: Losses of a damaged journal, as sentences.
    """

    done: tuple[str, ...] = field(metadata=wire(if_absent=[]))
    notes: tuple[str, ...] = field(metadata=wire(if_absent=[]))


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSubmitted:
    """A task was submitted after the queue had started.

    Attributes:
        task: Name of the task in the queue.
        num_gpus: GPUs that it runs on.
        duration_s: Estimated seconds, early exit included.
        priority: Higher goes first.
        tenant: Whose task it is; empty where no tenant was named.
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
    """A task was cancelled: it is not started, or its executor saves and ends.

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
        method: Method that made it.
        status: ``optimal``, ``feasible`` or ``heuristic``.
        makespan_s: Seconds to the end of the last task.
        bound_s: Lower bound of the makespan, in seconds.
        notice: Why another method was used than the requested one; empty where it was used.
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
        attempt: Counts the executors of the task, from 1 again after the queue is resumed.
        gpus: Node and number of each.
        executor: Tasks with the same one are trained in one process; empty: it has one of its own.
    """

    task: str
    attempt: int
    gpus: tuple[Gpu, ...]
    executor: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorExited:
    """Nothing of an attempt at a task runs any more.

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
class MeasuringBegun:
    """Before a task is trained or planned: steps of it are being measured, as no measurement is cached. It is in the
    journal of a queue that measures its tasks before it schedules them; elsewhere only observers receive it.

    Attributes:
        task: Name of the task.
        model: Its base model.
        remaining_s: Expected seconds until it is measured; the event comes again each time they are known better. None
            while they are not known.
        is_update: Whether the same measurement was announced before.
        kept_in: Folder of the machine on which the measurement is kept for later runs; empty while it is not known.
    """

    task: str
    model: str
    remaining_s: float | None = None
    is_update: bool = False
    kept_in: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskMeasured:
    """Before the first schedule of a queue: the estimated duration of a task. Where no queue runs, as in ``alto
    plan``, only observers receive it.

    Attributes:
        task: Name of the task.
        duration_s: Seconds, early exit included.
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
    | MeasuringBegun
    | TaskMeasured
)
