"""The state of a queue, folded from its journal one entry at a time, as :mod:`alto.runs.history` does for a run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from alto.errors import RunError
from alto.records import Demand, Gpu, Node, Placement, nodes_covering
from alto.runs import events
from alto.runs.events import Event, JournalEntry, MeasuringBegun, TaskMeasured, TaskRelayed, TaskResumed, TaskStarted
from alto.runs.history import RunHistory, history_before, read_history
from alto.runs.job_history import RunStatus
from alto.runs.journal import JournalFold
from alto.runs.progress import fraction_done
from alto.runs.queue_dir import QueueDir


class TaskStage(StrEnum):
    """The state of a task of a queue."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(slots=True, kw_only=True)
class Attempt:
    """One executor run of a task; ``end`` and ``outcome`` are None while it runs.

    Attributes:
        number: Number of the attempt, from 1 over all resumptions; the journal restarts at 1 after every resumption.
        start, end: Begin and end, in unix seconds.
        executor: Name of the executor. Tasks whose attempts have the same one were trained in one process. Empty if the
            task had its own.
    """

    number: int
    gpus: tuple[Gpu, ...]
    start: float
    end: float | None = None
    outcome: str | None = None
    reason: str = ""
    executor: str = ""

    def duration_s(self, now: float) -> float:
        """Return the seconds that it took, or has taken until ``now`` (unix seconds) if it still runs."""
        return (now if self.end is None else self.end) - self.start


@dataclass(slots=True, kw_only=True)
class TaskHistory:
    """The state of one task after the events seen so far.

    Attributes:
        demand: The task as submitted, with the latest estimate of its duration: from its submission, or from measuring.
        first_plan: Its placement in the first schedule that includes it; its start is in seconds since the queue began,
            without interruptions. None before that.
        is_cancelled: Whether it was cancelled; its running executor saves and ends.
        measuring: The measurement of its steps that is under way; None if there is none.
        is_unmeasured: Whether it will be measured before the first schedule; its estimate is a guess until then.
    """

    demand: Demand
    state: TaskStage = TaskStage.WAITING
    attempts: list[Attempt] = field(default_factory=list)
    first_plan: Placement | None = None
    failure: str = ""
    is_cancelled: bool = False
    measuring: events.MeasuringBegun | None = None
    is_unmeasured: bool = False

    @property
    def task(self) -> str:
        """Name in the queue."""
        return self.demand.task

    def spent_s(self, now: float) -> float:
        """Return the seconds that all its attempts took until ``now`` (unix seconds)."""
        return sum(attempt.duration_s(now) for attempt in self.attempts)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanNote:
    """One schedule that was made.

    Attributes:
        at: When it was made, in unix seconds.
        status: ``optimal``, ``feasible`` or ``heuristic``.
        makespan_s: Seconds to the end of the last task.
        bound_s: Lower bound of the makespan, in seconds.
        notice: Why the requested method was not used; empty if it was.
    """

    at: float
    reason: str
    method: str
    status: str
    makespan_s: float
    bound_s: float
    notice: str


class QueueHistory(JournalFold):
    """Folds journal entries into the state of a queue.

    Attributes:
        started: The event that started the queue; None before the first event.
        tasks: Every task by its name in the queue, in the order given.
        is_completed: Whether every task has its result or was given up.
        measuring_s: Seconds in which tasks were measured before the first schedule; part of ``duration_s``.
        declared_nodes: The largest machines that the cluster has had; see `nodes_covering`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.started: events.QueueStarted | None = None
        self.tasks: dict[str, TaskHistory] = {}
        self.plans: list[PlanNote] = []
        self.notices: list[str] = []
        self.is_completed = False
        self.measuring_s = 0.0
        self.declared_nodes: tuple[Node, ...] = ()
        self._devices = ""
        self._measuring_since: float | None = None
        self._done: set[str] = set()
        self._present_since: dict[Gpu, float] = {}
        self._present_spans: list[tuple[float, float]] = []  # of GPUs that have left, in unix seconds

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The machines that the queue has, as its journal knows them."""
        indices: dict[str, list[int]] = {}
        for gpu in self._present_since:
            indices.setdefault(gpu.node, []).append(gpu.index)
        return tuple(Node(name=name, gpus=tuple(sorted(found))) for name, found in indices.items())

    @property
    def num_gpus(self) -> int:
        """GPUs of all machines, or the CPU slots that are used instead."""
        return sum(len(node.gpus) for node in self.nodes)

    @property
    def has_gpus(self) -> bool:
        """Whether there are real GPUs; False if CPU slots are used instead."""
        return self._devices == "gpus"

    def status(self, *, is_live: bool) -> RunStatus:
        """Return the status of the queue; ``is_live``: whether a process works on it."""
        return RunStatus.of(is_finished=self.is_completed, is_live=is_live)

    def in_state(self, state: TaskStage) -> list[TaskHistory]:
        return [task for task in self.tasks.values() if task.state is state]

    def actual_placements(self, now: float | None = None) -> list[Placement]:
        """Return the placements of all attempts until ``now`` (unix seconds; by default the latest event).

        Starts are in seconds since the queue began, without interruptions.
        """
        now = self.last_seen_at or 0.0 if now is None else now
        return [
            Placement(
                task=task.task,
                gpus=attempt.gpus,
                start_s=self.worked_s(attempt.start),
                duration_s=attempt.duration_s(now),
            )
            for task in self.tasks.values()
            for attempt in task.attempts
        ]

    def utilisation(self, now: float | None = None) -> float:
        """Return the fraction of the available GPU time that executors used, in [0, 1]. The available time is from the
        first start of an attempt to the last end; a GPU counts only while it belongs to the cluster.

        Interruptions are not counted, and a GPU shared by tasks counts once. Running attempts count until ``now`` (unix
        seconds; by default the latest event).
        """
        now = self.last_seen_at or 0.0 if now is None else now
        actual = sorted(self.actual_placements(now), key=lambda place: place.start_s)
        if not actual:
            return 0.0
        used_s, busy_until_s = 0.0, dict.fromkeys((gpu for place in actual for gpu in place.gpus), 0.0)
        for place in actual:
            for gpu in place.gpus:
                used_s += max(0.0, place.end_s - max(place.start_s, busy_until_s[gpu]))
                busy_until_s[gpu] = max(busy_until_s[gpu], place.end_s)
        begin_s, end_s = actual[0].start_s, max(busy_until_s.values())
        spans = (*self._present_spans, *((since, now) for since in self._present_since.values()))
        present_s = sum(
            max(0.0, min(self.worked_s(until), end_s) - max(self.worked_s(since), begin_s)) for since, until in spans
        )
        return used_s / present_s if present_s else 0.0

    def _fold(self, event: Event, time: float) -> None:
        match event:
            case events.QueueStarted():
                self.started = event
                self._devices, self.declared_nodes = event.devices, event.declared
                self._set_nodes(event.nodes, time)
                for entry in event.tasks:
                    self._add(entry)
            case events.QueueResumed():
                self._on_resumed(event, time)
            case events.TaskSubmitted():
                self._add(event)
            case events.TaskCancelled():
                task = self.tasks[event.task]
                task.is_cancelled = True
                task.state = TaskStage.CANCELLED if task.state is TaskStage.WAITING else task.state
            case events.MeasuringBegun() if event.task in self.tasks:
                self.tasks[event.task].measuring = event
                self._measuring_since = time if self._measuring_since is None else self._measuring_since
            case events.TaskMeasured() if event.task in self.tasks:
                task = self.tasks[event.task]
                task.measuring, task.is_unmeasured = None, False
                task.demand = replace(task.demand, duration_s=event.duration_s)
                if not any(other.measuring for other in self.tasks.values()):
                    self._end_measuring(time)
            case events.SchedulePlanned():
                self._on_planned(event, time)
            case events.AttemptStarted():
                task = self.tasks[event.task]
                number = len(task.attempts) + 1
                task.attempts.append(Attempt(number=number, gpus=event.gpus, start=time, executor=event.executor))
                task.state, task.failure = TaskStage.RUNNING, ""
            case events.AttemptEnded():
                task = self.tasks[event.task]
                self._close(task, time, outcome=event.outcome, reason=event.reason)
                task.state = TaskStage.FINISHED if event.outcome == "finished" else _unfinished(task)
            case events.GpuAdded(node=node, index=index):
                self._present_since.setdefault(Gpu(node, index), time)
                self.declared_nodes = nodes_covering(self.declared_nodes, self.nodes)
            case events.GpuLost(node=node, index=index):
                self._remove(Gpu(node, index), time)
            case events.TaskGivenUp():
                task = self.tasks[event.task]
                task.state, task.failure = TaskStage.FAILED, event.reason
            case events.QueueCompleted():
                self.is_completed = True

    def _add(self, entry: events.QueuedTask | events.TaskSubmitted) -> None:
        self.tasks[entry.task] = TaskHistory(
            demand=entry,
            state=TaskStage.FINISHED if entry.task in self._done else TaskStage.WAITING,
            is_unmeasured=isinstance(entry, events.QueuedTask) and entry.is_unmeasured,
        )

    def _on_resumed(self, event: events.QueueResumed, time: float) -> None:
        self._end_measuring(self.last_seen_at)
        for task in self.tasks.values():
            task.measuring = None
        self._note_interruption(time, is_rest=self.is_completed)
        self.is_completed = False
        if event.devices:
            self._devices, self.declared_nodes = event.devices, ()
        if event.nodes:
            self._set_nodes(event.nodes, time)
        self.notices += event.notes
        self._done.update(event.done)  # the journal may repeat the submission of these tasks later
        for task in self.tasks.values():
            if task.task in event.done:  # the journal may have lost the event that this task finished
                self._close(task, self.last_seen_at, outcome="finished", reason="")
                task.state, task.failure = TaskStage.FINISHED, ""
            elif task.state is TaskStage.RUNNING:
                self._close(task, self.last_seen_at, outcome="lost", reason="the controller ended")
                task.state = _unfinished(task)

    def _set_nodes(self, nodes: Iterable[Node], time: float) -> None:
        present = {Gpu(node.name, index) for node in nodes for index in node.gpus}
        for gpu in self._present_since.keys() - present:
            self._remove(gpu, time)
        for node in nodes:
            for index in node.gpus:
                self._present_since.setdefault(Gpu(node.name, index), time)
        self.declared_nodes = nodes_covering(self.declared_nodes, self.nodes)

    def _remove(self, gpu: Gpu, time: float) -> None:
        since = self._present_since.pop(gpu, None)
        if since is not None:
            self._present_spans.append((since, time))

    def _end_measuring(self, time: float | None) -> None:
        if self._measuring_since is not None and time is not None:
            self.measuring_s += max(0.0, time - self._measuring_since)
        self._measuring_since = None

    def _on_planned(self, event: events.SchedulePlanned, time: float) -> None:
        self.plans.append(
            PlanNote(
                at=time,
                reason=event.reason,
                method=event.method,
                status=event.status,
                makespan_s=event.makespan_s,
                bound_s=event.bound_s,
                notice=event.notice,
            )
        )
        if event.notice and event.notice not in self.notices:
            self.notices.append(event.notice)
        for placement in event.placements:
            task = self.tasks[placement.task]
            task.is_unmeasured = False
            task.first_plan = task.first_plan or replace(placement, start_s=self.worked_s(time) + placement.start_s)

    @staticmethod
    def _close(task: TaskHistory, end: float | None, *, outcome: str, reason: str) -> None:
        if task.attempts and task.attempts[-1].end is None:
            attempt = task.attempts[-1]
            attempt.end = attempt.start if end is None else max(attempt.start, end)
            attempt.outcome, attempt.reason = outcome, reason


def _unfinished(task: TaskHistory) -> TaskStage:
    """Return the state of a task whose executor has ended without a result."""
    return TaskStage.CANCELLED if task.is_cancelled else TaskStage.WAITING


def gpus_to_json(gpus: Iterable[Gpu]) -> list[list[Any]]:
    """Return GPUs in the form of a journal."""
    return [[gpu.node, gpu.index] for gpu in gpus]


def read_queue_history(queue_dir: str | Path) -> QueueHistory:
    """Return the history of the queue in ``queue_dir``.

    Raises:
        RunNotFoundError: It holds no queue.
        RunError: The journal is damaged.
    """
    return QueueHistory.read(QueueDir.open(queue_dir).run.journal_file)


class QueueProgress:
    """The observed state of a queue and of its tasks' runs.

    Attributes:
        runs: State of the tasks' runs, from their journals, by task; tasks that have not begun are missing.
        unreadable: Why the journal of a task's run cannot be read, by task.
        num_measured: Number of tasks that were measured before the first schedule.
        folder: The queue's folder; None while it is unknown.
    """

    def __init__(self) -> None:
        self.folder: QueueDir | None = None
        self.queue = QueueHistory()
        self.runs: dict[str, RunHistory] = {}
        self.unreadable: dict[str, str] = {}
        self.num_measured = 0

    @classmethod
    def read(cls, queue_dir: str | Path) -> QueueProgress:
        """Return the progress of the queue in ``queue_dir``, from its journals.

        Raises:
            RunNotFoundError: There is no queue.
            RunError: The queue's journal is damaged. If a task's journal is damaged, only that task's progress is
                unknown.
        """
        progress, folder = cls(), QueueDir.open(queue_dir)
        progress.queue = read_queue_history(queue_dir)
        progress._read_runs(folder, progress.queue.tasks)
        return progress

    @classmethod
    def before_resume(cls, queue_dir: str | Path) -> QueueProgress:
        """Return the progress of the tasks' runs in ``queue_dir``, from their journals.

        The queue's own journal is left out: when the queue is resumed, its entries are observed again. Errors as in
        :meth:`read`.
        """
        progress, folder = cls(), QueueDir.open(queue_dir)
        entries, _ = folder.read()
        progress._read_runs(folder, [entry.task for entry in entries])
        return progress

    def _read_runs(self, folder: QueueDir, tasks: Iterable[str]) -> None:
        self.folder = folder
        for task in tasks:
            try:
                self.runs[task] = read_history(folder.run_of(task).root)
            except RunError as error:
                self.unreadable[task] = str(error)

    def apply(self, entry: JournalEntry) -> None:
        """Fold in an event of the queue, or an event of a task's run that the queue relays."""
        match entry.event:
            case TaskRelayed(task=task, entry=JournalEntry(event=MeasuringBegun() as begun)):
                if task in self.queue.tasks:
                    self.queue.tasks[task].measuring = begun
                return
            case TaskRelayed(task=task) if task in self.queue.tasks:
                self.queue.tasks[task].measuring = None
        match entry.event:
            case TaskMeasured():
                self.num_measured += 1
                self.queue.apply(entry)
            case TaskRelayed(task=task, entry=JournalEntry(event=TaskStarted(), is_replayed=False) as first):
                self.runs[task] = RunHistory.of([first])
            case TaskRelayed(task=task, entry=relayed):
                if isinstance(relayed.event, TaskResumed) and self.folder is not None:
                    # The run's journal was cut back to a checkpoint; the steps that were cut off are trained again.
                    self.runs[task] = history_before(self.folder.run_of(task).root, relayed.seq)
                    self.unreadable.pop(task, None)
                self.runs.setdefault(task, RunHistory()).apply(relayed)
            case _:
                self.queue.apply(entry)

    def fraction_done(self, task: TaskHistory) -> float:
        """Return the fraction of the task's expected samples that is trained, in [0, 1]."""
        if task.state is TaskStage.FINISHED:
            return 1.0
        run = self.runs.get(task.task)
        return 0.0 if run is None else fraction_done(run)

    def best_loss(self, task: TaskHistory) -> float | None:
        """Return the best validation loss so far, in the unit of the task's method; None if there is none."""
        run = self.runs.get(task.task)
        return run.best.best_validation_loss if run is not None and run.best is not None else None

    def holders(self) -> dict[Gpu, str]:
        """Return the running task on each GPU that has one."""
        running = self.queue.in_state(TaskStage.RUNNING)
        return {gpu: task.task for task in running if task.attempts for gpu in task.attempts[-1].gpus}
