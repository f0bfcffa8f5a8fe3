"""Trains run folders on a cluster for the service, which keeps a durable list of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from alto.cluster import Cluster, Controller, TaskStatus, TaskTicket, running_controller
from alto.engine.estimates import UNKNOWN_DURATION_S, base_key
from alto.engine.queue_setup import QueueSetup, journal_begin, replanning
from alto.engine.work import TRAIN
from alto.errors import ClusterLostError
from alto.records import Node, TaskEstimate
from alto.runs import Journal, QueueHistory, RunDir
from alto.scheduler.queue import QueueSettings, TaskState
from alto.spec import Task

MAX_PLANNED = 32
"""Maximum number of waiting runs in a plan. If more wait, a plan covers only the runs that start now, so that GPUs do
not wait for a solver."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmittedRun:
    """The current state of a submitted run.

    Attributes:
        outcome: ``finished``, ``failed`` or ``stopped``; None while the run has not ended.
        is_new: Whether it waits and no executor has started it yet.
        is_too_large: Whether it waits for GPUs that the cluster does not have now.
        error: Class of the error that ended its latest attempt; empty if there was none, or it is unknown.
    """

    outcome: Literal["finished", "failed", "stopped"] | None
    is_running: bool
    is_new: bool
    is_too_large: bool
    reason: str
    error: str


class ControlPlane:
    """Trains submitted runs in the order of their priority. The methods raise the controller's errors.

    Args:
        quotas: Maximum number of GPUs of each tenant; the dictionary that the controller's queue reads.
    """

    def __init__(self, setup: QueueSetup, cluster: Cluster, controller: Controller, quotas: dict[str, int]) -> None:
        self._setup = setup
        self._cluster = cluster
        self._controller = controller
        self._quotas = quotas

    def check(self, task: Task) -> None:
        """Check that ``task`` fits on the machines that the cluster has or has had; some may be away now.

        Raises:
            SpecError, UnsupportedError: The task asks for more GPUs.
        """
        declared = self._controller.status().declared_nodes
        self._setup.check({task.name: task}, declared, has_gpus=self.has_gpus)

    def check_connected(self) -> None:
        """Raise the error that ended the control plane, such as `ClusterLostError`; no-op if it works."""
        self._controller.check_connected()

    @property
    def has_gpus(self) -> bool:
        """False if CPU slots are used instead of GPUs."""
        return self._cluster.has_gpus

    def estimate(self, task: Task) -> TaskEstimate | None:
        """Return the cached estimate of ``task`` on this cluster; None if there is none."""
        return self._setup.known_estimate(task, self._cluster)

    def remember_duration(self, task: Task, duration_s: float) -> None:
        """Store how long ``task`` took on this cluster, for :meth:`estimate`."""
        self._setup.remember_duration(task, self._cluster, duration_s)

    def submit(self, name: str, run_dir: Path, task: Task, *, priority: int = 0, shares_with: str = "") -> None:
        """Put a run into the queue; an earlier attempt in its folder is resumed.

        Args:
            name: Unique among all runs that the control plane ever had.
            run_dir: Folder of the run; exists already.
            task: Its task; its own priority is not used.
            priority: Higher goes first, across all tenants; may be negative.
            shares_with: Runs with the same text may share a process if they have the same base model.
        """
        estimate = self.estimate(task) or TaskEstimate(duration_s=UNKNOWN_DURATION_S)
        sharing = estimate.sharing
        ticket = TaskTicket(
            task=name,
            run_dir=str(run_dir),
            host=TRAIN,
            num_gpus=task.num_gpus,
            duration_s=estimate.duration_s,
            sharing=sharing and replace(sharing, base=f"{sharing.base} {shares_with}"),
            is_parallel=self._setup.is_parallel,
            trust_remote_code=task.needs_trust,
            base=f"{base_key(task)} {shares_with}",
            tenant=task.tenant,
            priority=priority,
        )
        self._controller.submit(ticket)

    def cancel(self, name: str) -> None:
        """Remove a run from the queue, or let its executor save and end; return at once."""
        self._controller.cancel(name)

    def take_back(self, name: str) -> bool:
        """Remove a run from the queue if no executor has started it; return whether it was removed."""

        def take() -> bool:
            is_new = self.states()[name].is_new
            if is_new:
                self._controller.cancel(name)
            return is_new

        return self._controller.call(take)

    def prioritise(self, priorities: Mapping[str, int]) -> None:
        """Change the priorities of waiting runs, by name; runs that are running or have ended stay the same."""
        self._controller.prioritise(priorities)

    def limit(self, tenant: str, max_gpus: int | None) -> None:
        """Set the maximum number of GPUs that the runs of ``tenant`` use at a time; None sets no limit."""

        def change() -> None:
            if max_gpus is None:
                self._quotas.pop(tenant, None)
            else:
                self._quotas[tenant] = max_gpus

        self._controller.call(change)

    def states(self) -> dict[str, SubmittedRun]:
        """Return the current state of all runs, by name."""
        return {name: _state_of(task) for name, task in self._controller.status().tasks.items()}

    def capacity(self) -> tuple[int, int]:
        """Return how many GPUs there are now, and how many of them one task can have."""
        sizes = [len(node.gpus) for node in self._controller.status().nodes]
        return sum(sizes), max(sizes, default=0) if self._setup.is_parallel else sum(sizes)

    def num_gpus(self) -> tuple[int, int]:
        """Return how many GPUs (or CPU slots) executors use, and how many there are."""
        status = self._controller.status()
        used = {gpu for task in status.tasks.values() if not task.has_ended for gpu in task.gpus}
        return len(used), sum(len(node.gpus) for node in status.nodes)

    def drain(self) -> None:
        """Let running executors save and end, start no others, and wait until none runs."""
        self._controller.drain()


@contextlib.contextmanager
def opened_control_plane(
    setup: QueueSetup,
    root: Path,
    *,
    method: str = "cp-sat",
    before: QueueHistory | None = None,
    machines: Sequence[int] | None = None,
    needs_gpus: bool = False,
) -> Iterator[ControlPlane]:
    """Yield a control plane; leaving the block kills executors that still run; their runs can be resumed.

    Args:
        root: Folder of its journal.
        before: History of the previous control plane. Tasks that fit on its machines are accepted too, because these
            machines may come back. It is not used on ``local``, which has only this machine.
        machines: Numbers of GPUs of the machines that replace those of ``before``.
        needs_gpus: Whether CPU slots must not be used instead of GPUs.

    Raises:
        RunBusyError: Another process uses the folder.
        AltoError: The cluster cannot be opened, or lacks GPUs that are needed.
    """
    root.mkdir(parents=True, exist_ok=True)
    folder, quotas = RunDir(root), dict(setup.quotas)
    with (
        folder.locked(),
        _opened(setup, needs_gpus=needs_gpus) as cluster,
        replanning(method) as solve,
        Journal(folder.journal_file, check=folder.check_lock) as journal,
    ):
        declared: tuple[Node, ...] = ()
        if machines is not None:
            declared = tuple(Node(name=str(n), gpus=tuple(range(size))) for n, size in enumerate(machines, 1))
        elif before is not None and setup.cluster != "local" and before.has_gpus == cluster.has_gpus:
            declared = before.declared_nodes
        journal_begin(journal, cluster, method, declared=declared)
        settings = QueueSettings(quotas=quotas, max_planned=MAX_PLANNED, declared=declared)
        with running_controller(cluster, journal, settings, solve) as controller:
            yield ControlPlane(setup, cluster, controller, quotas)


@contextlib.contextmanager
def _opened(setup: QueueSetup, *, needs_gpus: bool) -> Iterator[Cluster]:
    with setup.opened() as cluster:
        if needs_gpus and not cluster.has_gpus:
            raise ClusterLostError(
                "expected GPUs, which the cluster had before, found only CPU slots; start the machines with GPUs, or "
                "restart the service to use CPU slots from now on"
            )
        yield cluster


def _state_of(task: TaskStatus) -> SubmittedRun:
    outcomes: dict[TaskState, Literal["finished", "failed", "stopped"]] = {
        TaskState.FINISHED: "finished",
        TaskState.FAILED: "failed",
        TaskState.STOPPED: "stopped",
    }
    return SubmittedRun(
        outcome=outcomes.get(task.state),
        is_running=task.state in (TaskState.STARTING, TaskState.RUNNING),
        is_new=task.state is TaskState.WAITING and task.attempt == 0,
        is_too_large=bool(task.waits_for),
        reason=task.reason,
        error="" if task.ended is None else task.ended.error,
    )
