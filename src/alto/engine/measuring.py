"""Measures how long tasks take, with executors of a cluster."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import TypeAdapter

from alto.cluster import Cluster, Controller, Outcome, TaskTicket
from alto.engine.estimates import base_key, estimate_of, known_estimate, remember_estimate
from alto.engine.work import PLAN, PLAN_ANEW, PLAN_FILE
from alto.errors import ProfileError
from alto.records import TaskEstimate, TaskPlan
from alto.runs import Journal, JournalEntry, RunDir, scratch_folder
from alto.runs.events import MeasuringBegun, TaskRelayed
from alto.scheduler import schedule_tasks
from alto.scheduler.queue import Queue, QueueSettings
from alto.spec import Task

__all__ = ["Measurement"]

_ONE_ATTEMPT = QueueSettings(backoff_s=0.0, max_attempts=1)

_WAIT_S = 1.0
"""Interval at which the measurement checks whether to stop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Measures tasks with executors of ``cluster``: in parallel on GPUs, one after the other on CPU slots, which share
    the cores.

    Attributes:
        is_parallel: Whether an executor has one process for each of its GPUs.
        refresh: Measure again, even if a measurement is cached.
        on_measuring: Called with a task before an executor measures it, then with its progress; not called if the
            executor finds the measurement in its cache.
        on_measured: Called with each measured task and its duration in seconds.
        is_interrupted: Called every second; once it returns true, measuring ends.
    """

    cluster: Cluster
    is_parallel: bool
    refresh: bool
    on_measuring: Callable[[Task, MeasuringBegun], None]
    on_measured: Callable[[Task, float], None]
    is_interrupted: Callable[[], bool]

    def estimates(self, tasks: Sequence[Task]) -> list[TaskEstimate]:
        """Return the estimate of each task; cached estimates are not measured again unless ``refresh`` is set.

        Raises:
            ProfileError: A task could not be measured; the message has the reason.
            KeyboardInterrupt: ``is_interrupted`` returned true.
        """
        known = {
            index: estimate
            for index, task in enumerate(tasks)
            if not self.refresh and (estimate := known_estimate(task, self.cluster, self._num_ranks(task))) is not None
        }
        missing = {str(index): task for index, task in enumerate(tasks) if index not in known}
        if missing:
            known |= self._measure(missing)
        return [known[index] for index in range(len(tasks))]

    def _measure(self, tasks: Mapping[str, Task]) -> dict[int, TaskEstimate]:
        told = deque[JournalEntry]()  # filled on the thread of the controller
        with scratch_folder("alto-plan-") as folder:
            queue = Queue(
                self.cluster.nodes, _ONE_ATTEMPT, lambda problem, hint: schedule_tasks(problem, method="fifo")
            )
            with (
                Journal(folder / "journal.jsonl") as journal,
                Controller(self.cluster, queue, journal, show=told.append) as controller,
            ):
                controller.start()
                at_once = [list(tasks)] if self.cluster.has_gpus else [[index] for index in tasks]
                found: dict[int, TaskEstimate] = {}
                for group in at_once:
                    for index in group:
                        controller.submit(self._run(index, tasks[index], folder / index))
                    for index in group:
                        while not controller.wait(index, timeout_s=_WAIT_S):
                            self._relay(tasks, told)
                            self._check(controller, tasks)
                        self._relay(tasks, told)
                        self._check(controller, tasks)
                        found[int(index)] = self._estimate(tasks[index], folder / index)
                return found

    def _relay(self, tasks: Mapping[str, Task], told: deque[JournalEntry]) -> None:
        """Pass the executors' progress reports to ``on_measuring``."""
        while told:
            match told.popleft().event:
                case TaskRelayed(task=index, entry=JournalEntry(event=MeasuringBegun() as begun)):
                    self.on_measuring(tasks[index], begun)

    def _run(self, index: str, task: Task, folder: Path) -> TaskTicket:
        RunDir(folder).begin(task)
        return TaskTicket(
            task=index,
            run_dir=str(folder),
            entry=PLAN_ANEW if self.refresh else PLAN,
            num_gpus=task.num_gpus,
            is_parallel=self.is_parallel,
            trust_remote_code=task.needs_trust,
            base=base_key(task),
        )

    def _check(self, controller: Controller, tasks: Mapping[str, Task]) -> None:
        """Raise ProfileError if a task could not be measured, which ends the measurement of all tasks."""
        for index, status in controller.status().tasks.items():
            if status.has_ended and (status.ended is None or status.ended.outcome is not Outcome.FINISHED):
                why = status.reason if status.ended is None else status.ended.reason
                raise ProfileError(f"task {tasks[index].name!r}: expected to measure its time and memory, found {why}")
        if self.is_interrupted():
            raise KeyboardInterrupt

    def _estimate(self, task: Task, folder: Path) -> TaskEstimate:
        """Return, cache and report the estimate of a measured task."""
        plan = TypeAdapter(TaskPlan).validate_json((folder / PLAN_FILE).read_bytes())
        estimate = estimate_of(plan, task)
        remember_estimate(task, self.cluster, self._num_ranks(task), estimate)
        self.on_measured(task, estimate.duration_s)
        return estimate if task.share_executor else replace(estimate, sharing=None)

    def _num_ranks(self, task: Task) -> int:
        return task.num_gpus if self.is_parallel else 1
