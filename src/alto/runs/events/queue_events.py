"""The events of a queue: the events of its journal, and events that only observers see.

Times are in unix seconds, durations in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from alto.records import Demand, Gpu, Node, Placement
from alto.runs.events.facts import QueuedTask, QueueEvent, wire
from alto.runs.events.run_events import FORMAT


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueStarted(QueueEvent):
    """The first event: the cluster, and all tasks.

    Attributes:
        method: Scheduling method: ``cp-sat``, ``milp``, ``fifo``, ``sjf`` or ``lpt``.
        devices: ``gpus``, or ``cpu slots`` if CPU slots are used instead of GPUs.
        nodes: The machines and the indices of their GPUs.
        tasks: All tasks, in the order given.
        declared: The largest machines that the cluster had before, if the queue of a service continues another one.
        format: Version of the journal's format.
    """

    method: str = field(metadata=wire(if_absent=""))
    devices: str = field(metadata=wire(if_absent="gpus"))
    nodes: tuple[Node, ...]
    tasks: tuple[QueuedTask, ...]
    declared: tuple[Node, ...] = ()
    format: int = field(default=FORMAT, metadata=wire(if_absent=1, always=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueResumed(QueueEvent):
    """A process resumes the queue.

    Attributes:
        done: Tasks that already had their result.
        notes: Notices about events that a damaged journal lost, as sentences.
        nodes: The machines and the indices of their GPUs; empty if they are the same as before.
        devices: ``gpus`` or ``cpu slots``; empty if they are the same as before.
    """

    done: tuple[str, ...] = field(metadata=wire(if_absent=[]))
    notes: tuple[str, ...] = field(metadata=wire(if_absent=[]))
    nodes: tuple[Node, ...] = ()
    devices: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSubmitted(Demand, QueueEvent):
    """A task was submitted after the queue had started.

    Attributes:
        command: Id of the command that submitted it; empty if the process that works on the queue submitted it.
    """

    command: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskCancelled(QueueEvent):
    """A task was cancelled: it is not started, or its executor saves and ends.

    Attributes:
        task: Name of the task in the queue.
        command: Id of the command that cancelled it; empty if the process that works on the queue cancelled it.
    """

    task: str
    command: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulePlanned(QueueEvent):
    """A new schedule of the waiting tasks.

    Attributes:
        reason: Why it was made.
        method: Method that made it.
        status: ``optimal``, ``feasible`` or ``heuristic``.
        makespan_s: Seconds to the end of the last task.
        bound_s: Lower bound of the makespan, in seconds.
        notice: Why the requested method was not used; empty if it was.
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
class AttemptStarted(QueueEvent):
    """An attempt at a task has begun: the task got its GPUs.

    Attributes:
        task: Name of the task in the queue.
        attempt: Number of the attempt at the task; starts at 1 again after the queue is resumed.
        gpus: Node and index of each GPU.
        executor: Tasks with the same name here are trained in one process; empty: the task has its own.
    """

    task: str
    attempt: int
    gpus: tuple[Gpu, ...]
    executor: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptEnded(QueueEvent):
    """An attempt at a task has ended completely.

    Attributes:
        task: Name of the task in the queue.
        attempt: Same as in ``executor_started``.
        outcome: ``finished``, ``interrupted``, ``failed`` or ``lost``.
        reason: Why it did not finish, as a sentence; if it finished, other problems, such as a missing report.
    """

    task: str
    attempt: int
    outcome: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskGivenUp(QueueEvent):
    """A task will not be tried again.

    Attributes:
        task: Name of the task in the queue.
        reason: Why, as a sentence.
    """

    task: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuLost(QueueEvent):
    """A GPU left the cluster.

    Attributes:
        node: Name of its machine.
        index: Its index on that machine.
    """

    node: str
    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuAdded(QueueEvent):
    """A GPU joined the cluster.

    Attributes:
        node: Name of its machine.
        index: Its index on that machine.
    """

    node: str
    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueInterrupted(QueueEvent):
    """The queue was stopped by Ctrl-C or SIGTERM, with everything saved.

    Attributes:
        open: Tasks that have not finished.
    """

    open: tuple[str, ...] = field(metadata=wire(if_absent=[]))


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueCompleted(QueueEvent):
    """Every task has its result or was given up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuringBegun(QueueEvent):
    """Steps of a task are being measured before it is trained or planned, because no measurement is cached. A queue
    that measures its tasks before scheduling them writes this to its journal; otherwise only observers receive it.

    Attributes:
        task: Name of the task.
        model: Its base model.
        remaining_s: Expected seconds until the measurement is done; None while unknown. The event is repeated whenever
            the estimate improves.
        is_update: Whether the same measurement was announced before.
        kept_in: Folder on the machine in which the measurement is kept for later runs; empty while unknown.
    """

    task: str
    model: str
    remaining_s: float | None = None
    is_update: bool = False
    kept_in: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskMeasured(QueueEvent):
    """The estimated duration of a task, before the first schedule of a queue. If no queue runs, as in ``alto plan``,
    only observers receive it.

    Attributes:
        task: Name of the task.
        duration_s: Estimated seconds, early exit included.
    """

    task: str
    duration_s: float
