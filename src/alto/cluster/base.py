"""The interface of a cluster to the queue: it starts, watches and stops executors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Protocol

from alto.records import Demand, Gpu, Node, Sharing
from alto.runs import JournalEntry
from alto.scheduler import TaskDemand


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskTicket(Demand):
    """A queued task, from its submission to the process that works on it.

    Attributes:
        run_dir: Folder of the run; it exists, and on a cluster every node sees it at this path. An earlier attempt in
            it is resumed.
        host: ``module:name`` of the class that works on the run, a :class:`alto.cluster.Host`.
        is_parallel: Whether an executor has one process (rank) for each of its GPUs, or else one process for all.
        sharing: Facts for sharing an executor; None: the task has its own.
        base: Key of the base model; tasks with equal, non-empty keys can be trained by one process.
        trust_remote_code: Whether the user allows code of the base model if the task sets this key too.
    """

    run_dir: str
    host: str
    num_gpus: int = 1
    duration_s: float = 1.0
    is_parallel: bool = False
    sharing: Sharing | None = None
    base: str = ""
    trust_remote_code: bool = False

    def demand(self, release_s: float) -> TaskDemand:
        """Return the scheduler's request for the task; ``release_s`` is on the queue's clock."""
        return TaskDemand.of(
            self,
            release_s=release_s,
            sharing=self.sharing,
            is_on_one_node=self.is_parallel and self.num_gpus > 1,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A run to be started: in a new executor, or in one that already works on other runs.

    Attributes:
        ticket: The task; its fields that a cluster needs are properties here too.
        gpus: The GPUs of the run while it runs; shared with the other runs of its executor.
        attempt: Number of the attempt, from 1.
        executor: Launches with equal, non-empty values share a process on the same GPUs.
    """

    ticket: TaskTicket
    gpus: tuple[Gpu, ...]
    attempt: int
    executor: str = ""

    @property
    def task(self) -> str:
        """Name of the task."""
        return self.ticket.task

    @property
    def run_dir(self) -> str:
        """Folder of the run."""
        return self.ticket.run_dir

    @property
    def host(self) -> str:
        """The class that works on the run; see :class:`TaskTicket`."""
        return self.ticket.host

    @property
    def base(self) -> str:
        """Key of the base model. An idle process that holds the same base model is preferred."""
        return self.ticket.base

    @property
    def trust_remote_code(self) -> bool:
        """Whether the user allows code of the base model."""
        return self.ticket.trust_remote_code

    @property
    def num_ranks(self) -> int:
        """Number of processes, each on its share of the GPUs; a single process has all of them."""
        return len(self.gpus) if self.ticket.is_parallel else 1


class Outcome(StrEnum):
    """How an attempt at a task ended."""

    FINISHED = "finished"
    INTERRUPTED = "interrupted"
    """Stopped on request, with everything on disk."""
    FAILED = "failed"
    """Ended with an error that would recur in the next attempt."""
    LOST = "lost"
    """Killed, hung, or gone with its node; its saved state can be resumed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How an attempt at a task ended.

    Attributes:
        reason: Why it did not finish, as a sentence for the user.
        error: Class of the error that ended it; empty if there was none, or it is unknown.
        notices: Other problems, such as a missing report, as sentences for the user.
    """

    outcome: Outcome
    reason: str = ""
    error: str = ""
    notices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryWritten:
    """A journal entry of a run, written by the task's executor."""

    task: str
    attempt: int
    entry: JournalEntry


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptEnded(Ending):
    """The end of an attempt at a task. No process works on the task any more; a shared process may go on with others.

    There is one exception: the process that watches the executor died, but the executor did not. The executor then
    saves and ends by itself. Until then it holds the lock of its run, so that the next attempt waits.
    """

    task: str
    attempt: int

    @classmethod
    def of(cls, launch: Launch, ending: Ending) -> AttemptEnded:
        """Return the event for the end of ``launch``."""
        return cls(task=launch.task, attempt=launch.attempt, **asdict(ending))


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuLost:
    """A GPU left the cluster, with its node."""

    gpu: Gpu


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuAdded:
    """A GPU joined the cluster."""

    gpu: Gpu


ClusterEvent = EntryWritten | AttemptEnded | GpuLost | GpuAdded


class Cluster(Protocol):
    """Executors on the GPUs of one or more machines."""

    @property
    def nodes(self) -> Sequence[Node]:
        """The machines, as of now."""

    @property
    def has_gpus(self) -> bool:
        """False if CPU slots are used instead of GPUs."""

    def start(self, launch: Launch) -> None:
        """Start an executor; :meth:`poll` reports its events, including a failure to start.

        Raises:
            ValueError: The task already runs, or a GPU is taken or is not in this cluster.
        """

    def stop(self, task: str) -> None:
        """Ask the executor of ``task`` to save and stop, without waiting. Its outcome is then ``interrupted``.

        No-op if the executor has already stopped.
        """

    def poll(self, timeout_s: float) -> list[ClusterEvent]:
        """Return the events since the last call, oldest first; wait up to ``timeout_s`` if there are none."""

    def close(self) -> None:
        """Kill running executors. No process is left when this returns. Idempotent."""


def check_launch(launch: Launch, nodes: Iterable[Node], running: Iterable[Launch]) -> None:
    """Raise ValueError if the task already runs, or a GPU of the launch is taken or is not on one of ``nodes``."""
    taken: set[Gpu] = set()
    for other in running:
        if other.task == launch.task:
            raise ValueError(f"task {launch.task!r}: expected a task that does not run, found that it runs")
        if launch.executor and other.executor == launch.executor:
            if other.gpus != launch.gpus or other.base != launch.base or launch.num_ranks > 1:
                raise ValueError(
                    f"task {launch.task!r}: expected {list(other.gpus)} and {other.base!r}, the GPUs and the base "
                    f"model of its executor {launch.executor!r}, found {list(launch.gpus)} and {launch.base!r}"
                )
            continue
        taken.update(other.gpus)
    free = {Gpu(node.name, index) for node in nodes for index in node.gpus} - taken
    if not launch.gpus or len(set(launch.gpus)) != len(launch.gpus) or not set(launch.gpus) <= free:
        raise ValueError(
            f"task {launch.task!r}: expected GPUs among the free ones, {sorted(free)}, found {list(launch.gpus)}"
        )
