"""Runs many tasks on one cluster: measures their durations, schedules them, and executes them."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from alto.base import note_resumption, resume_command
from alto.cluster import (
    Cluster,
    Controller,
    LiveQueue,
    QueueIntake,
    answer_past_ends,
    past_ends,
    running_controller,
)
from alto.engine.estimates import UNKNOWN_DURATION_S, Measurement, base_key
from alto.engine.gpus import STRATEGIES
from alto.engine.objects import IN_A_QUEUE, check_has_id
from alto.engine.queue_setup import (
    QueueSetup,
    check_method,
    first_as_given,
    first_schedule,
    journal_begin,
    replanning,
    tasks_by_name,
)
from alto.engine.runner import checked_task, portable
from alto.engine.task_queue import TaskQueue, past_of_finished, queue_results, write_report_of
from alto.engine.work import TRAIN
from alto.errors import ProfileError, RunError, SpecError, TaskInterruptedError, UntrustedCodeError
from alto.records import Placement, Schedule, TaskEstimate
from alto.results import TaskResult
from alto.runs import Journal, JournalEntry, Observer, QueueDir, QueueEntry, has_result, load_run_task
from alto.runs.events import NO_SEQ, MeasuringBegun, TaskMeasured
from alto.scheduler import METHODS
from alto.scheduler.queue import QueueSettings
from alto.spec import Task

LOCAL = "local"


class QueueRunner:
    """Runs tasks side by side.

    Args:
        observers: Called with every entry; must return at once.
        is_interrupted: See :class:`alto.Engine`.
    """

    def __init__(
        self, setup: QueueSetup, *, observers: Sequence[Observer], is_interrupted: Callable[[], bool] | None
    ) -> None:
        self._setup = setup
        self._observers = tuple(observers)
        self._is_interrupted = is_interrupted or (lambda: False)

    def schedule(self, tasks: Sequence[Task], method: str, *, refresh: bool = False) -> Schedule:
        """Return a schedule of ``tasks``, under their names in the queue."""
        check_method(method)
        check_has_id(tasks, IN_A_QUEUE)
        tasks = [checked_task(task) for task in tasks]
        by_name, setup = tasks_by_name(tasks), self._setup.sized_for(tasks)
        with setup.opened() as cluster:
            setup.check(by_name, cluster.nodes, has_gpus=cluster.has_gpus)
            estimates = self._estimates(tasks, setup, cluster, self._show_only, refresh=refresh)
            return first_schedule(setup.problem(by_name, estimates, cluster.nodes), method)

    def begin(self, tasks: Sequence[Task], schedule: Schedule | None, output_dir: Path) -> list[TaskResult]:
        """Run ``tasks`` as a new queue in ``output_dir``.

        Args:
            schedule: The first schedule; None measures the tasks in the queue's folder and makes one.
        """
        method = "cp-sat" if schedule is None else schedule.method
        with self.opened(tasks, method, output_dir, schedule=schedule) as queue:
            pass
        return queue.results()

    @contextlib.contextmanager
    def opened(
        self,
        tasks: Sequence[Task],
        method: str,
        output_dir: Path,
        *,
        schedule: Schedule | None = None,
        trust_remote_code: bool = False,
    ) -> Iterator[TaskQueue]:
        """Yield a new queue that starts with ``tasks`` and accepts others until the block is left.

        Args:
            schedule: See :meth:`begin`.
            trust_remote_code: Whether tasks submitted by other processes may run code of their base models.
        """
        check_has_id(tasks, IN_A_QUEUE)
        if schedule is None:
            check_method(method)
            tasks = [checked_task(task) for task in tasks]
        by_name, setup = tasks_by_name(tasks), self._setup.sized_for(tasks)
        with (
            setup.opened() as cluster,
            self._new_queue(
                setup, cluster, by_name, schedule, output_dir, method=method, trust_remote_code=trust_remote_code
            ) as queue,
        ):
            yield queue
            queue.finish()
            queue.serve()

    def resume(self, root: str | Path, *, trust_remote_code: bool, keep_open: bool = False) -> list[TaskResult]:
        """Resume the queue at ``root``, on the cluster that the caller names, or by default on its first cluster."""
        queue_dir = QueueDir.open(root)
        entries, settings = queue_dir.read()
        _check_settings(settings, queue_dir)
        setup = QueueSetup(
            strategy=settings["strategy"],
            cluster=_trusted_cluster(self._setup.cluster, settings["cluster"], queue_dir),
            total_gpus=settings["total_gpus"],
            quotas=dict(settings["quotas"]),
            share_executor=settings.get("share_executor", False),
        )
        tasks: dict[str, Task] = {}
        for entry in entries:
            if not entry.is_cancelled and not has_result(run := queue_dir.run_of(entry.task)):
                with contextlib.suppress(SpecError):  # the task's executor reports it, and the other tasks continue
                    tasks[entry.task] = load_run_task(run, trust_remote_code=trust_remote_code)
        trusted = [entry.task for entry in entries] if trust_remote_code else []
        ends = past_ends(queue_dir)
        with queue_dir.run.locked():
            answer_past_ends(queue_dir, ends)
            if not keep_open and (past := past_of_finished(queue_dir)):
                for past_entry in past:
                    self._show(replace(past_entry, is_replayed=True))
                write_report_of(queue_dir)
                return queue_results(queue_dir)
            with setup.opened() as cluster:
                intake = _intake(setup, cluster, trusted=trusted, trust_remote_code=trust_remote_code)
                with self._working(queue_dir, setup, cluster, settings["method"], intake, tasks=tasks) as queue:
                    if not keep_open:
                        queue.finish()
                    queue.serve()
        return queue.results()

    # -- schedules -------------------------------------------------------------------------------------------------

    def _estimates(
        self,
        tasks: Sequence[Task],
        setup: QueueSetup,
        cluster: Cluster,
        show: Callable[[MeasuringBegun | TaskMeasured], object],
        *,
        refresh: bool = False,
    ) -> list[TaskEstimate]:
        """Estimate each task; see `Measurement`."""
        measurement = Measurement(
            cluster=cluster,
            is_parallel=setup.is_parallel,
            refresh=refresh,
            show=show,
            is_interrupted=self._is_interrupted,
        )
        return [setup.allowed(estimate) for estimate in measurement.estimates(tasks)]

    def _measured(
        self,
        queue_dir: QueueDir,
        tasks: Mapping[str, Task],
        setup: QueueSetup,
        cluster: Cluster,
        method: str,
        journal: Journal,
    ) -> Schedule:
        """Measure the tasks of a queue, write the estimates to its folder and journal, and schedule the tasks.

        Args:
            tasks: Tasks without a result, by name in the queue.
        """
        renamed = [task.replace(name=name) for name, task in tasks.items()]
        estimates = self._estimates(renamed, setup, cluster, journal.append)
        for name, estimate in zip(tasks, estimates, strict=True):
            queue_dir.note_estimate(name, estimate)
        return first_schedule(setup.problem(tasks, estimates, cluster.nodes), method)

    def _show_only(self, event: MeasuringBegun | TaskMeasured) -> None:
        self._show(JournalEntry(seq=NO_SEQ, time=time.time(), event=event))

    def _show(self, entry: JournalEntry) -> None:
        for observer in self._observers:
            observer(entry)

    # -- running them ----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _new_queue(
        self,
        setup: QueueSetup,
        cluster: Cluster,
        tasks: Mapping[str, Task],
        schedule: Schedule | None,
        output_dir: Path,
        *,
        method: str,
        trust_remote_code: bool,
    ) -> Iterator[TaskQueue]:
        placements = {} if schedule is None else {placement.task: placement for placement in schedule.placements}
        if schedule is not None and placements.keys() != tasks.keys():
            raise SpecError(
                f"schedule: expected a placement for each of the {len(tasks)} tasks, found {len(placements)} "
                "for different tasks; make it with engine.schedule(tasks)"
            )
        setup.check(tasks, cluster.nodes, has_gpus=cluster.has_gpus)
        entries = [_entry(name, task, placements.get(name), setup, cluster) for name, task in tasks.items()]
        queue_dir = QueueDir.create(
            output_dir, entries, [portable(task) for task in tasks.values()], setup.settings(method)
        )
        trusted = [name for name, task in tasks.items() if task.needs_trust]
        intake = _intake(setup, cluster, trusted=trusted, trust_remote_code=trust_remote_code)
        is_working = False
        try:
            with (
                queue_dir.run.locked(),
                self._working(queue_dir, setup, cluster, method, intake, first=schedule, tasks=tasks) as queue,
            ):
                is_working = True
                yield queue
        except ProfileError:
            if not is_working:  # the queue has nothing worth resuming
                shutil.rmtree(queue_dir.root, ignore_errors=True)
            raise

    @contextlib.contextmanager
    def _working(
        self,
        queue_dir: QueueDir,
        setup: QueueSetup,
        cluster: Cluster,
        method: str,
        intake: QueueIntake,
        *,
        tasks: Mapping[str, Task],
        first: Schedule | None = None,
    ) -> Iterator[TaskQueue]:
        """Work on the queue in a locked folder until the block is left; measure its unmeasured tasks first.

        Leaving the block ends executors that still run; if the block itself raised an error, they save first.

        Args:
            tasks: Tasks by name in the queue, without those that cannot be read.
        """
        entries, _ = queue_dir.read()
        done = {entry.task for entry in entries if has_result(queue_dir.run_of(entry.task))}
        solver = replanning(method)
        try:
            with Journal(queue_dir.run.journal_file, self._observers, check=queue_dir.run.check_lock) as journal:
                for entry in journal.past:
                    self._show(replace(entry, is_replayed=True))
                journal_begin(journal, cluster, method, entries, done)
                open_entries = [entry for entry in entries if entry.task not in done and not entry.is_cancelled]
                if any(entry.is_unmeasured for entry in open_entries):
                    open_tasks = {entry.task: tasks[entry.task] for entry in open_entries if entry.task in tasks}
                    first = self._measured(queue_dir, open_tasks, setup, cluster, method, journal)
                live = LiveQueue(queue_dir, journal, intake)
                with (
                    running_controller(
                        cluster,
                        journal,
                        QueueSettings(quotas=setup.quotas),
                        first_as_given(first, solver),
                        begin=lambda controller: live.begin(controller, done),
                        show=self._show,
                        is_interrupted=self._is_interrupted,
                    ) as controller,
                    _saving(live, controller),
                ):
                    yield TaskQueue(queue_dir, live, controller)
        except TaskInterruptedError as error:
            raise TaskInterruptedError(f"{error}; continue with: {resume_command(queue_dir.root)}") from None
        except KeyboardInterrupt as error:
            note_resumption(error, queue_dir.root)
            raise
        finally:
            solver.close()
            write_report_of(queue_dir)


@contextlib.contextmanager
def _saving(live: LiveQueue, controller: Controller) -> Iterator[None]:
    """Stop running tasks, after they have saved, if the block raises an error.

    This does not apply to an immediate stop by the user, nor if the controller itself has failed. `SystemExit` and the
    cancellation of an asyncio task count as errors.
    """
    try:
        yield
    except BaseException as error:
        if not (isinstance(error, KeyboardInterrupt | GeneratorExit) or controller.has_ended):
            live.finish()
            if controller.status().open_tasks:
                controller.drain()
            else:
                live.wait()
        raise


def _entry(name: str, task: Task, placement: Placement | None, setup: QueueSetup, cluster: Cluster) -> QueueEntry:
    """Return a task's entry for the queue's folder. A task without a placement is marked as not measured.

    The duration of a placement in a shared executor is longer than that of the task alone, so the cached estimate
    replaces it.
    """
    estimate = TaskEstimate(duration_s=UNKNOWN_DURATION_S if placement is None else placement.duration_s)
    if placement is None or placement.executor:
        estimate = setup.known_estimate(task, cluster) or estimate
    return QueueEntry.new(name, task, estimate, base=base_key(task), is_unmeasured=placement is None)


def _intake(setup: QueueSetup, cluster: Cluster, *, trusted: Collection[str], trust_remote_code: bool) -> QueueIntake:
    return QueueIntake(
        host=TRAIN,
        is_parallel=setup.is_parallel,
        check=lambda task, nodes: setup.check({task.name: task}, nodes, has_gpus=cluster.has_gpus),
        estimate=lambda task: setup.known_estimate(task, cluster) or TaskEstimate(duration_s=UNKNOWN_DURATION_S),
        base_of=base_key,
        trusted=trusted,
        trust_remote_code=trust_remote_code,
    )


def _trusted_cluster(named: str, began_on: str, queue_dir: QueueDir) -> str:
    """Return the cluster of a resumed queue: the one that the caller names, else ``local`` or ``auto`` from its file.

    Raises:
        UntrustedCodeError: Only the queue's file names the address of a Ray cluster, whose answers can run code here,
            or a cluster type of a package.
    """
    if named != LOCAL:
        return named
    if began_on not in (LOCAL, "auto"):
        raise UntrustedCodeError(
            f"cluster: expected the address of the cluster from you, found {began_on!r} only in the files of "
            f"{queue_dir.root}, which may come from another person; a cluster can run code on every client: if you "
            f"trust this cluster, add --cluster {began_on} (in Python: Engine(cluster=...))"
        )
    return began_on


def _check_settings(settings: Mapping[str, Any], queue_dir: QueueDir) -> None:
    """Check that the names in a queue's file exist."""
    for key, names in (("strategy", STRATEGIES), ("method", METHODS)):
        if str(settings[key]).lower() not in names:
            raise RunError(
                f"{key}: expected one of {', '.join(names)} in queue.yaml of {queue_dir.root}, found "
                f"{settings[key]!r}; put the file back as it was, or run the tasks in a new queue"
            )
