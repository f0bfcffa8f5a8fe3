"""Many tasks on one cluster: what they take, their schedule, and their execution."""

from __future__ import annotations

import contextlib
import itertools
import json
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from alto.cluster import Cluster, Controller, ExecutorEnded, GuardedSolver, Launch, Outcome, open_cluster
from alto.data import read_task_rows
from alto.engine.durations import known_duration_s, remember_duration_s
from alto.engine.gpus import STRATEGIES, check_num_gpus
from alto.engine.runner import portable
from alto.engine.work import PLAN, PLAN_ANEW, PLAN_FILE, TRAIN
from alto.errors import AltoError, ProfileError, RunBusyError, RunError, SpecError, TasksFailedError, UntrustedCodeError
from alto.export import write_queue_report
from alto.records import Gpu, Node, Schedule, TaskResult
from alto.runs import (
    Journal,
    Observer,
    QueueDir,
    QueueEntry,
    RunDir,
    TaskHistory,
    TaskStage,
    has_result,
    load_run_task,
    read_history,
    read_queue_history,
    task_result,
)
from alto.scheduler import METHODS, SchedulingProblem, TaskDemand
from alto.scheduler.queue import Queue, QueueSettings
from alto.spec import Task

__all__ = ["QueueRunner"]

LOCAL = "local"

SOLVE_S = 10.0
"""What the solver may take for a schedule."""
REPLAN_S = 1.0
"""... and for a new one while tasks run, whose GPUs wait for it."""

SOLVE_GAP, REPLAN_GAP = 0.001, 0.01
"""Share by which each may be longer than need be: durations are not known that well."""


class QueueRunner:
    """Runs tasks side by side; arguments as :class:`alto.Engine` takes them."""

    def __init__(
        self,
        *,
        strategy: str,
        cluster: str,
        total_gpus: int | None,
        quotas: Mapping[str, int],
        observers: Sequence[Observer],
        is_interrupted: Callable[[], bool] | None,
    ) -> None:
        self._strategy = strategy
        self._cluster = cluster
        self._total_gpus = total_gpus
        self._quotas = dict(quotas)
        self._observers = tuple(observers)
        self._is_interrupted = is_interrupted or (lambda: False)

    def schedule(self, tasks: Sequence[Task], method: str, *, refresh: bool = False) -> Schedule:
        """A schedule of ``tasks`` under their names in the queue."""
        if method.lower() not in METHODS:
            raise SpecError(f"method: expected one of {', '.join(METHODS)}, found {method!r}")
        tasks = [portable(task) for task in tasks]
        for task in tasks:
            read_task_rows(task)  # what is wrong with them is best said here, by name
        with self._opened(PLAN_ANEW if refresh else PLAN) as cluster:
            self._check(tasks, cluster)
            durations = self._durations(tasks, cluster, refresh=refresh)
            problem = self._problem(tasks, durations, cluster.nodes)
        with GuardedSolver(method, time_limit_s=SOLVE_S, gap=SOLVE_GAP) as solve:
            return solve(problem)

    def begin(self, tasks: Sequence[Task], schedule: Schedule | None, output_dir: Path) -> list[TaskResult]:
        """Run ``tasks`` as a new queue in ``output_dir``."""
        schedule = schedule if schedule is not None else self.schedule(tasks, "cp-sat")
        names = unique_names(tasks)
        placements = {placement.task: placement for placement in schedule.placements}
        if set(placements) != set(names):
            raise SpecError(
                f"schedule: expected a placement for each of the {len(names)} tasks, found {len(placements)} "
                "for other ones; make it with engine.schedule(tasks)"
            )
        entries = [
            QueueEntry(
                task=name,
                num_gpus=task.num_gpus,
                duration_s=placements[name].duration_s,
                priority=task.priority,
                tenant=task.tenant,
            )
            for name, task in zip(names, tasks, strict=True)
        ]
        settings = {
            "method": schedule.method,
            "strategy": self._strategy,
            "cluster": self._cluster,
            "total_gpus": self._total_gpus,
            "quotas": self._quotas,
        }
        with self._opened(TRAIN) as cluster:
            self._check(tasks, cluster)
            queue_dir = QueueDir.create(output_dir, entries, [portable(task) for task in tasks], settings)
            with queue_dir.run.locked():
                trusted = [name for name, task in zip(names, tasks, strict=True) if task.trust_remote_code]
                return self._run(queue_dir, entries, schedule.method, cluster, first=schedule, trusted=trusted)

    def resume(self, root: str | Path, *, trust_remote_code: bool) -> list[TaskResult]:
        """Go on with the queue at ``root``, on the cluster it began on, or on the one that the caller names."""
        queue_dir = QueueDir.open(root)
        entries, settings = queue_dir.read()
        _check_settings(settings, queue_dir)
        self._cluster = _trusted_cluster(self._cluster, settings["cluster"], queue_dir)
        for entry in entries:
            if not has_result(run := queue_dir.run_of(entry.task)):
                with contextlib.suppress(SpecError):  # its executor says so, and the others go on
                    load_run_task(run, trust_remote_code=trust_remote_code)
        self._strategy, self._total_gpus = settings["strategy"], settings["total_gpus"]
        self._quotas = dict(settings["quotas"])
        trusted = [entry.task for entry in entries] if trust_remote_code else []
        with queue_dir.run.locked(), self._opened(TRAIN) as cluster:
            return self._run(queue_dir, entries, settings["method"], cluster, first=None, trusted=trusted)

    # -- what tasks take -----------------------------------------------------------------------------------------

    def _durations(self, tasks: Sequence[Task], cluster: Cluster, *, refresh: bool) -> list[float]:
        """Seconds each task will take, early exit counted.

        Each of which nothing is known yet is looked at by an executor of its own: side by side on GPUs, one by one
        where CPU slots stand for them, which share the cores.
        """
        durations = {
            index: known_s
            for index, task in enumerate(tasks)
            if not refresh and (known_s := self._known_s(task, cluster)) is not None
        }
        free = [Gpu(node.name, index) for node in cluster.nodes for index in node.gpus]
        at_once = len(free) if cluster.has_gpus else 1
        waiting = deque((index, task) for index, task in enumerate(tasks) if index not in durations)
        taken: dict[str, tuple[Gpu, ...]] = {}
        with tempfile.TemporaryDirectory(prefix="alto-plan-") as folder:
            while waiting or taken:
                while waiting and len(taken) < at_once and (gpus := fitting_gpus(free, waiting[0][1], cluster.nodes)):
                    index, task = waiting.popleft()
                    run_dir = RunDir(Path(folder) / str(index))
                    run_dir.begin(task)
                    taken[str(index)] = gpus
                    free = [gpu for gpu in free if gpu not in gpus]
                    cluster.start(
                        Launch(
                            task=str(index),
                            run_dir=str(run_dir.root),
                            gpus=gpus,
                            attempt=1,
                            num_ranks=self._num_ranks(task.num_gpus),
                            trust_remote_code=task.trust_remote_code,
                        )
                    )
                for event in cluster.poll(1.0):
                    if isinstance(event, ExecutorEnded):
                        free.extend(taken.pop(event.task))
                        if event.outcome is not Outcome.FINISHED:
                            name = tasks[int(event.task)].name
                            raise ProfileError(
                                f"task {name!r}: expected to measure what it takes, found {event.reason}"
                            )
                        found = json.loads((Path(folder) / event.task / PLAN_FILE).read_text("utf-8"))
                        measured, duration_s = tasks[int(event.task)], found["expected_duration_s"]
                        durations[int(event.task)] = duration_s
                        remember_duration_s(measured, cluster, self._num_ranks(measured.num_gpus), duration_s)
                        self._report_measured(measured, duration_s)
                if self._is_interrupted():
                    raise KeyboardInterrupt
        return [durations[index] for index in range(len(tasks))]

    def _known_s(self, task: Task, cluster: Cluster) -> float | None:
        return known_duration_s(task, cluster, self._num_ranks(task.num_gpus))

    def _report_measured(self, task: Task, duration_s: float) -> None:
        for observer in self._observers:
            observer({"event": "measured", "task": task.name, "duration_s": duration_s})

    def _problem(self, tasks: Sequence[Task], durations: Sequence[float], nodes: Sequence[Node]) -> SchedulingProblem:
        return SchedulingProblem(
            nodes=tuple(nodes),
            pending=tuple(
                TaskDemand(
                    task=name,
                    num_gpus=task.num_gpus,
                    duration_s=duration_s,
                    priority=task.priority,
                    tenant=task.tenant,
                )
                for name, task, duration_s in zip(unique_names(tasks), tasks, durations, strict=True)
            ),
            quotas=self._quotas,
        )

    def _check(self, tasks: Sequence[Task], cluster: Cluster) -> None:
        """Whether every task can be placed at all, before anything is measured or written."""
        self._problem(tasks, [1.0] * len(tasks), cluster.nodes)
        most = max(len(node.gpus) for node in cluster.nodes)
        for task in tasks:
            check_num_gpus(task, self._strategy, most=most, has_gpus=cluster.has_gpus)

    def _num_ranks(self, num_gpus: int) -> int:
        return num_gpus if self._strategy == "adapter_parallel" else 1

    # -- running them --------------------------------------------------------------------------------------------

    def _run(
        self,
        queue_dir: QueueDir,
        entries: Sequence[QueueEntry],
        method: str,
        cluster: Cluster,
        *,
        first: Schedule | None,
        trusted: Sequence[str],
    ) -> list[TaskResult]:
        done = {entry.task for entry in entries if has_result(queue_dir.run_of(entry.task))}
        solver = GuardedSolver(method, time_limit_s=REPLAN_S, gap=REPLAN_GAP)
        solve = _first_as_given(first, solver)
        queue = Queue(nodes=tuple(cluster.nodes), settings=QueueSettings(quotas=self._quotas), solve=solve)
        try:
            with Journal(queue_dir.run.journal_file, self._observers, check=queue_dir.run.check_lock) as journal:
                for event in journal.past:
                    for observer in self._observers:
                        observer({**event, "replayed": True})
                notes = _notes_on(journal)
                if not journal.past:
                    _record_start(journal, entries, method, cluster)
                if journal.past or done or notes:  # of a journal that is lost, the results may be left
                    journal.append("queue_resumed", done=sorted(done), notes=notes)
                Controller(
                    entries,
                    queue,
                    cluster,
                    queue_dir=queue_dir,
                    journal=journal,
                    num_ranks=self._num_ranks,
                    done=done,
                    trusted=trusted,
                    observers=self._observers,
                    is_interrupted=self._is_interrupted,
                ).run()
                journal.append("queue_completed")
                journal.sync()
        finally:
            solver.close()
            _report(queue_dir)
        return self._results(queue_dir, entries)

    def _results(self, queue_dir: QueueDir, entries: Sequence[QueueEntry]) -> list[TaskResult]:
        history = read_queue_history(queue_dir.root)
        failed = history.in_state(TaskStage.FAILED)
        results = [
            replace(task_result(read_history(run.root), run), notices=_notices_of(history.tasks[entry.task], run))
            for entry in entries
            if has_result(run := queue_dir.run_of(entry.task))
        ]
        if failed:
            reasons = "; ".join(f"{task.task}: {task.failure}" for task in failed)
            raise TasksFailedError(
                f"expected all {len(entries)} tasks of {queue_dir.root} to end with an adapter, found {len(failed)} "
                f"that were given up ({reasons}); the others have theirs. Mend the cause, then try them again with: "
                f"alto resume {queue_dir.root}",
                results=results,
            )
        return results

    @contextlib.contextmanager
    def _opened(self, entry: str) -> Iterator[Cluster]:
        cluster = open_cluster(self._cluster, total_gpus=self._total_gpus, entry=entry)
        try:
            yield cluster
        finally:
            cluster.close()


def fitting_gpus(free: Sequence[Gpu], task: Task, nodes: Sequence[Node]) -> tuple[Gpu, ...]:
    """GPUs for a task among those that are free, of one node where any is large enough; none where it has to wait."""
    if task.num_gpus > max(len(node.gpus) for node in nodes):
        groups = [free]
    else:
        groups = [[gpu for gpu in free if gpu.node == node.name] for node in nodes]
    return next((tuple(group[: task.num_gpus]) for group in groups if len(group) >= task.num_gpus), ())


def unique_names(tasks: Sequence[Task]) -> list[str]:
    """A name for each task: its own, with a number where one before it has the same."""
    own, names = {task.name for task in tasks}, []
    for task in tasks:
        numbered = (f"{task.name}-{number}" for number in itertools.count(2))
        is_free = task.name not in names
        names.append(task.name if is_free else next(name for name in numbered if name not in own and name not in names))
    return names


def _first_as_given(
    given: Schedule | None, solve: Callable[[SchedulingProblem, Schedule | None], Schedule]
) -> Callable[[SchedulingProblem, Schedule | None], Schedule]:
    """A solver whose first answer is ``given``, where that is a schedule of what it is asked for."""
    left = [] if given is None else [given]

    def answer(problem: SchedulingProblem, hint: Schedule | None = None) -> Schedule:
        first = left.pop() if left else None
        if first is not None and {place.task for place in first.placements} == {task.task for task in problem.pending}:
            return first
        return solve(problem, hint)

    return answer


def _record_start(journal: Journal, entries: Sequence[QueueEntry], method: str, cluster: Cluster) -> None:
    journal.append(
        "queue_started",
        method=method,
        devices="gpus" if cluster.has_gpus else "cpu slots",
        nodes=[{"name": node.name, "gpus": list(node.gpus)} for node in cluster.nodes],
        tasks=[
            {
                "task": entry.task,
                "num_gpus": entry.num_gpus,
                "duration_s": entry.duration_s,
                "priority": entry.priority,
                "tenant": entry.tenant,
            }
            for entry in entries
        ],
    )


def _trusted_cluster(named: str, began_on: str, queue_dir: QueueDir) -> str:
    """Where a queue goes on: on the cluster that the caller names, else on that of its file if it names no machine.

    Raises:
        UntrustedCodeError: Only the queue's file names the address of a Ray cluster, whose answers can run code here.
    """
    if named != LOCAL:
        return named
    if began_on not in (LOCAL, "auto"):
        raise UntrustedCodeError(
            f"cluster: expected the address of a Ray cluster from you, found {began_on!r} only in the files of "
            f"{queue_dir.root}, which may be somebody else's; a Ray cluster can run code on whoever connects to it: if "
            f"you trust this one, add --cluster {began_on} (in Python: Engine(cluster=...))"
        )
    return began_on


def _check_settings(settings: Mapping[str, Any], queue_dir: QueueDir) -> None:
    """Whether the file of a queue names what there is."""
    for key, names in (("strategy", STRATEGIES), ("method", METHODS)):
        if str(settings[key]).lower() not in names:
            raise RunError(
                f"{key}: expected one of {', '.join(names)} in queue.yaml of {queue_dir.root}, found "
                f"{settings[key]!r}; put the file back as it was, or run the tasks anew"
            )


def _report(queue_dir: QueueDir) -> None:
    """Write the queue's report; where that is impossible there is none, not one that tells an earlier state. Who has
    lost the queue's lock leaves it as it is."""
    report = queue_dir.run.report_file
    try:
        queue_dir.run.check_lock()
    except RunBusyError:
        return  # another process may work on the queue, and its report is that one's
    try:
        write_queue_report(queue_dir.root)
    except (AltoError, OSError):
        with contextlib.suppress(OSError):
            report.unlink()


def _notices_of(task: TaskHistory, run: RunDir) -> tuple[str, ...]:
    """What the last executor of a finished task said of it, until a report is written."""
    reasons = [attempt.reason for attempt in task.attempts[-1:] if attempt.reason]
    return () if run.report_file.exists() else tuple(reasons)


def _notes_on(journal: Journal) -> list[str]:
    """What the journal of a queue has lost; a last line that was being written when the queue ended is no news."""
    if journal.num_lines_cut < 2:
        return []
    return [
        f"The journal of the queue was damaged: its last {journal.num_lines_cut} lines could not be relied on and were "
        "cut off. Tasks that have their results keep them; the others go on from their own checkpoints."
    ]
