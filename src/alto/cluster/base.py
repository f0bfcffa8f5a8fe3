"""What a cluster does for the queue: start executors, watch them, end them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from alto.records import Gpu, Node
from alto.runs import JournalEntry

__all__ = ["Cluster", "ClusterEvent", "EntryWritten", "ExecutorEnded", "GpuCame", "GpuGone", "Launch", "Outcome"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A run to be worked on, by an executor that is started for it or works on others already.

    Attributes:
        task: Unique within the queue.
        run_dir: Folder of the run, made already and seen by every node; an earlier attempt in it is resumed.
        entry: What the executor does, ``module:function``: it is called with the run directory and a function that
            returns whether to stop; or a class, :class:`alto.cluster.Host`, which can work on several runs at once.
        gpus: Its own for as long as it runs, or its executor's.
        attempt: Number of the attempt, from 1.
        num_ranks: Number of its processes, each on its share of the GPUs; a single process has all of them.
        trust_remote_code: Whether the user allows code of the base model, where the task sets this key too.
        executor: Launches with the same one, which is not empty, share a process, with the same GPUs; empty: none.
        base: Launches with the same one, which is not empty, need the same base model: an idle process that holds it
            is preferred.
        tenant: Who submitted the task.
        priority: Of the task.
    """

    task: str
    run_dir: str
    entry: str
    gpus: tuple[Gpu, ...]
    attempt: int
    num_ranks: int = 1
    trust_remote_code: bool = False
    executor: str = ""
    base: str = ""
    tenant: str = ""
    priority: int = 0


class Outcome(StrEnum):
    """How an executor ended."""

    FINISHED = "finished"
    INTERRUPTED = "interrupted"
    """Stopped on request, with everything on disk."""
    FAILED = "failed"
    """With an error that the next attempt would meet again."""
    LOST = "lost"
    """Killed, hung, or gone with its node; what it had saved can be resumed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryWritten:
    """An entry that the executor of a task has written into the journal of its run.

    Attributes:
        task: Name of the task.
        attempt: Number of the attempt.
        entry: The journal entry.
    """

    task: str
    attempt: int
    entry: JournalEntry


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorEnded:
    """Nothing of this attempt runs any more; or its watcher died alone, and it saves and ends by itself: until then it
    holds the lock of its run, which keeps the next attempt waiting.

    Attributes:
        task: Name of the task.
        attempt: Number of the attempt.
        outcome: Kind of the end.
        reason: A sentence for the user; where it finished, warnings beside the result.
        error: Class of the error that it ended with; empty where there was none, or it is unknown.
    """

    task: str
    attempt: int
    outcome: Outcome
    reason: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuGone:
    """A GPU left the cluster, with its node."""

    gpu: Gpu


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuCame:
    """A GPU joined the cluster."""

    gpu: Gpu


ClusterEvent = EntryWritten | ExecutorEnded | GpuGone | GpuCame


class Cluster(Protocol):
    """Executors on the GPUs of one or more machines."""

    @property
    def nodes(self) -> Sequence[Node]:
        """The machines as they are now."""

    @property
    def has_gpus(self) -> bool:
        """False where CPU slots stand for GPUs."""

    def start(self, launch: Launch) -> None:
        """Start an executor; :meth:`poll` reports its events, also where it cannot be started.

        Raises:
            ValueError: The task runs already, or a GPU is taken or is not in this cluster.
        """

    def stop(self, task: str) -> None:
        """Let a running executor save and end; it ends as ``interrupted``. Returns at once.

        Where it has ended meanwhile, nothing happens.
        """

    def poll(self, timeout_s: float) -> list[ClusterEvent]:
        """What has happened since the last call, oldest first; waits up to ``timeout_s`` where nothing has."""

    def close(self) -> None:
        """Kill what still runs. No process is left when this returns. Idempotent."""
