"""Settings that say where and how the queues of an engine run."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

import torch

from alto.cluster import Cluster, GuardedSolver, num_cores, open_cluster, unique_name
from alto.engine.estimates import allowed_estimate, known_estimate, num_ranks_of, remember_duration
from alto.engine.gpus import check_num_gpus
from alto.errors import SpecError
from alto.executor import cache
from alto.executor.profiling import kept_thread_times
from alto.executor.profiling.meter import capacity_bytes
from alto.records import Node, Schedule, TaskEstimate
from alto.runs import Journal, QueueEntry, QueueHistory
from alto.runs.events import QueuedTask, QueueResumed, QueueStarted
from alto.scheduler import METHODS, SchedulingProblem, TaskDemand
from alto.spec import Task

SOLVE_S = 10.0
"""Time limit of the solver for the first schedule."""
REPLAN_S = 1.0
"""Time limit for a new schedule while tasks run; free GPUs wait that long."""

_PROCESS_BYTES, _COPIES = 2**30, 8
"""Memory that an executor on a CPU slot should have: ``_PROCESS_BYTES`` plus ``_COPIES`` times the files of its base
model."""

SOLVE_GAP, REPLAN_GAP = 0.001, 0.01
"""Accepted relative gap to the optimum of each schedule; measured durations are less exact than this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSetup:
    """Where and how queues run; values as in :class:`alto.Engine`.

    Attributes:
        total_gpus: Maximum number of GPUs to use; None for all. On a CPU the number of slots; None for the number that
            :meth:`sized_for` chooses.
    """

    strategy: str
    cluster: str
    total_gpus: int | None
    quotas: Mapping[str, int]
    share_executor: bool = True

    @property
    def is_parallel(self) -> bool:
        """Whether a task on several GPUs has one process per GPU."""
        return self.strategy == "adapter_parallel"

    def settings(self, method: str) -> dict[str, Any]:
        """Return the settings in the form that a queue's folder stores."""
        return {"method": method, **asdict(self)}

    def sized_for(self, tasks: Sequence[Task]) -> Self:
        """Return this setup with a number of CPU slots for ``tasks``, if the user has not set one.

        The number of slots is limited by three numbers: the slots that the tasks ask for, the cores, and the processes
        that fit into memory. The largest number within these limits is used, because several processes with one thread
        each usually train more tokens per second than one process with several threads. If measurements of the base
        models (``alto plan``, ``alto tune``) show that equal tasks end sooner on fewer slots, fewer are used. For
        example, three tasks on two cores end sooner on one slot if a second thread adds more than half the speed of the
        first. If the size of a base model is not known, there is one slot.
        """
        if self.total_gpus is not None or self.cluster != "local" or not tasks or torch.cuda.is_available():
            return self
        of_model = {task.model: sum(size for _, size, _ in cache.weights_of(task.model)) for task in tasks}
        if not all(of_model.values()):
            return self
        process_bytes = _PROCESS_BYTES + _COPIES * max(of_model.values())
        fitting = capacity_bytes(torch.device("cpu")) // process_bytes
        num_slots = max(1, min(sum(task.num_gpus for task in tasks), num_cores(), fitting))
        return replace(self, total_gpus=_fastest_division(tasks, num_slots))

    @contextlib.contextmanager
    def opened(self) -> Iterator[Cluster]:
        """Yield the cluster; leaving the block closes it."""
        with contextlib.closing(open_cluster(self.cluster, total_gpus=self.total_gpus)) as cluster:
            yield cluster

    def check(self, tasks: Mapping[str, Task], nodes: Sequence[Node], *, has_gpus: bool) -> None:
        """Check that every task can be placed, before anything is measured or written; ``tasks`` by name in the
        queue.

        Args:
            has_gpus: False if CPU slots are used instead of GPUs.
        """
        self.problem(tasks, [TaskEstimate(duration_s=1.0)] * len(tasks), nodes)
        for task in tasks.values():
            check_num_gpus(task, self.strategy, most=max(len(node.gpus) for node in nodes), has_gpus=has_gpus)

    def problem(
        self, tasks: Mapping[str, Task], estimates: Sequence[TaskEstimate], nodes: Sequence[Node]
    ) -> SchedulingProblem:
        """Return the scheduling problem of the waiting ``tasks``, by name in the queue."""
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
                for (name, task), estimate in zip(tasks.items(), estimates, strict=True)
            ),
            quotas=self.quotas,
        )

    def known_estimate(self, task: Task, cluster: Cluster) -> TaskEstimate | None:
        """Return the cached estimate of ``task`` on ``cluster``; None if there is none."""
        found = known_estimate(task, cluster, self._num_ranks(task))
        return found if found is None else self.allowed(found)

    def remember_duration(self, task: Task, cluster: Cluster, duration_s: float) -> None:
        """Cache how long ``task`` took on ``cluster``, for :meth:`known_estimate`."""
        remember_duration(task, cluster, self._num_ranks(task), duration_s)

    def allowed(self, estimate: TaskEstimate) -> TaskEstimate:
        """Return ``estimate``, without its sharing data if tasks may not share executors."""
        return allowed_estimate(estimate, share_executor=self.share_executor)

    def _num_ranks(self, task: Task) -> int:
        return num_ranks_of(task, is_parallel=self.is_parallel)


def _fastest_division(tasks: Sequence[Task], most: int) -> int:
    """Return the number of slots, at most ``most``, on which equal tasks end first. This is computed from the cached
    durations of a step for each number of threads; if these are not known for a base model, return ``most``."""
    num_tasks, num_needed, cores = len(tasks), max(task.num_gpus for task in tasks), num_cores()
    makespans = dict.fromkeys(range(num_needed, most + 1), 0.0)
    for model in {task.model for task in tasks}:
        known = {time.num_threads: time.duration_s for time in kept_thread_times(model, cores)}
        if not known:
            return most
        for num_slots in makespans:
            threads = cores * num_needed // num_slots
            # Threads between two measured numbers are no help; below the fewest, time grows as threads are taken away.
            fewer = max((number for number in known if number <= threads), default=None)
            step_s = known[min(known)] * min(known) / threads if fewer is None else known[fewer]
            makespans[num_slots] += math.ceil(num_tasks * num_needed / num_slots) * step_s / known[cores]
    return min(makespans, key=lambda num_slots: (makespans[num_slots], -num_slots), default=most)


def tasks_by_name(tasks: Sequence[Task]) -> dict[str, Task]:
    """Return the tasks by their names in the queue: their own, with a number added if an earlier task has the same
    name."""
    own, by_name = {task.name for task in tasks}, dict[str, Task]()
    for task in tasks:
        by_name[task.name if task.name not in by_name else unique_name(task.name, own.union(by_name))] = task
    return by_name


def first_schedule(problem: SchedulingProblem, method: str) -> Schedule:
    """Solve for the first schedule of a queue."""
    with GuardedSolver(method, time_limit_s=SOLVE_S, gap=SOLVE_GAP) as solve:
        return solve(problem)


def replanning(method: str) -> GuardedSolver:
    """Return a solver for new schedules while tasks run; the caller must close it."""
    return GuardedSolver(method, time_limit_s=REPLAN_S, gap=REPLAN_GAP)


def first_as_given(
    given: Schedule | None, solve: Callable[[SchedulingProblem, Schedule | None], Schedule]
) -> Callable[[SchedulingProblem, Schedule | None], Schedule]:
    """Return a solver whose first answer is ``given``, provided that it schedules exactly the requested tasks."""
    left = [] if given is None else [given]

    def answer(problem: SchedulingProblem, hint: Schedule | None = None) -> Schedule:
        first = left.pop() if left else None
        if first is not None and {place.task for place in first.placements} == {task.task for task in problem.pending}:
            return first
        return solve(problem, hint)

    return answer


def journal_begin(
    journal: Journal,
    cluster: Cluster,
    method: str,
    entries: Sequence[QueueEntry] = (),
    done: Collection[str] = (),
    declared: tuple[Node, ...] = (),
) -> None:
    """Write the event that starts or resumes a queue. Results may exist even if the journal was lost.

    Args:
        done: Names of the tasks that have a result.
        declared: The largest machines that the cluster had before.
    """
    notes = []
    if journal.num_lines_cut > 1:  # a single line was cut off while it was written
        notes.append(
            f"The journal of the queue was damaged: its last {journal.num_lines_cut} lines were damaged and "
            "were removed. Tasks that have their results keep them; the others resume from their own checkpoints."
        )
    devices = "gpus" if cluster.has_gpus else "cpu slots"
    if not journal.past:
        journal.append(
            QueueStarted(
                method=method,
                devices=devices,
                nodes=tuple(cluster.nodes),
                tasks=tuple(QueuedTask.of(entry, is_unmeasured=entry.is_unmeasured) for entry in entries),
                declared=declared,
            )
        )
    if journal.past or done or notes:
        nodes, before = tuple(cluster.nodes), QueueHistory.of(journal.past)
        is_same = not journal.past or (set(before.nodes) == set(nodes) and before.has_gpus == cluster.has_gpus)
        journal.append(
            QueueResumed(
                done=tuple(sorted(done)),
                notes=tuple(notes),
                nodes=() if is_same else nodes,
                devices="" if not journal.past or before.has_gpus == cluster.has_gpus else devices,
            )
        )


def check_method(method: str) -> None:
    """Raise SpecError if there is no scheduling method of this name."""
    if method.lower() not in METHODS:
        raise SpecError(f"method: expected one of {', '.join(METHODS)}, found {method!r}")
