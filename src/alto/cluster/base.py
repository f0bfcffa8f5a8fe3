"""The interface of a cluster to the queue: it starts, watches and ends executors."""

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
    """A run for an executor: one that is started for it, or one that already works on other runs.

    Attributes:
        task: Unique within the queue.
        run_dir: Folder of the run; it exists and every node sees it. An earlier attempt in it is resumed.
        entry: ``module:name`` of the executor's work: a function that is called with the run directory and a function
            that returns whether to stop; or a class, :class:`alto.cluster.Host`, which can work on several runs.
        gpus: The GPUs of the run while it runs; shared with the other runs of its executor.
        attempt: Number of the attempt, from 1.
        num_ranks: Number of processes, each on its share of the GPUs; a single process has all of them.
        trust_remote_code: Whether the user allows code of the base model if the task sets this key too.
        executor: Launches with equal, non-empty values share a process on the same GPUs.
        base: Launches with equal, non-empty values need the same base model; an idle process that holds it is
            preferred.
        tenant: Tenant that submitted the task.
        priority: Priority of the task.
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
    """Ended with an error that would recur in the next attempt."""
    LOST = "lost"
    """Killed, hung, or gone with its node; its saved state can be resumed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryWritten:
    """A journal entry of a run, written by the task's executor."""

    task: str
    attempt: int
    entry: JournalEntry


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorEnded:
    """The end of an attempt: none of its processes runs any more.

    One exception: its watcher died alone. The executor then saves and ends by itself, and until then it holds the lock
    of its run, so that the next attempt waits.

    Attributes:
        reason: A sentence for the user; if it finished, warnings beside the result.
        error: Class of the error that ended it; empty if there was none, or it is unknown.
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
        """The machines, as of now."""

    @property
    def has_gpus(self) -> bool:
        """False if CPU slots take the place of GPUs."""

    def start(self, launch: Launch) -> None:
        """Start an executor; :meth:`poll` reports its events, including a failure to start.

        Raises:
            ValueError: The task already runs, or a GPU is taken or is not in this cluster.
        """

    def stop(self, task: str) -> None:
        """Let a running executor save and end; it ends as ``interrupted``. Returns at once.

        Nothing happens if it has already ended.
        """

    def poll(self, timeout_s: float) -> list[ClusterEvent]:
        """Return the events since the last call, oldest first; wait up to ``timeout_s`` if there are none."""

    def close(self) -> None:
        """Kill running executors. No process is left when this returns. Idempotent."""
