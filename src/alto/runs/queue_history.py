"""What happened in a queue, folded from its journal one event at a time, as :mod:`alto.runs.history` does for a run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from alto.records import Gpu, Node, Placement
from alto.runs.fold import JournalFold
from alto.runs.journal import Event
from alto.runs.queue_dir import QueueDir

__all__ = [
    "Attempt",
    "QueueHistory",
    "TaskHistory",
    "TaskStage",
    "gpus_from_json",
    "gpus_to_json",
    "read_queue_history",
]


class TaskStage(StrEnum):
    """Where a task of a queue is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"


@dataclass(slots=True, kw_only=True)
class Attempt:
    """One executor of a task, in unix seconds; ``end`` and ``outcome`` are None while it runs."""

    number: int
    gpus: tuple[Gpu, ...]
    start: float
    end: float | None = None
    outcome: str | None = None
    reason: str = ""


@dataclass(slots=True, kw_only=True)
class TaskHistory:
    """State of one task after the events seen so far.

    Attributes:
        duration_s: As it was estimated before the queue began.
        first_plan: Where the first schedule has placed it, its start in unix seconds; None before.
        failure: Why it was given up.
    """

    task: str
    num_gpus: int = 1
    duration_s: float = 0.0
    state: TaskStage = TaskStage.WAITING
    attempts: list[Attempt] = field(default_factory=list)
    first_plan: Placement | None = None
    failure: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanNote:
    """One schedule that was made: when (unix seconds), why, by whom, and how good it is."""

    at: float
    reason: str
    method: str
    status: str
    makespan_s: float
    bound_s: float
    notice: str


class QueueHistory(JournalFold):
    """Folds journal events into the state of a queue.

    Attributes:
        settings: The ``queue_started`` event without its tasks.
        tasks: Every task by its name in the queue, in the order they were given.
        nodes: The machines as they were when the queue began.
        plans: Every schedule that was made.
        notices: What users should know, oldest first.
        result: The ``queue_completed`` event, None before.
    """

    def __init__(self) -> None:
        super().__init__()
        self.settings: dict[str, Any] = {}
        self.tasks: dict[str, TaskHistory] = {}
        self.nodes: tuple[Node, ...] = ()
        self.plans: list[PlanNote] = []
        self.notices: list[str] = []
        self.result: dict[str, Any] | None = None
        self._handlers = {
            "queue_started": self._on_started,
            "queue_resumed": self._on_resumed,
            "planned": self._on_planned,
            "executor_started": self._on_executor_started,
            "executor_ended": self._on_executor_ended,
            "task_given_up": self._on_given_up,
            "queue_completed": self._on_completed,
        }

    def in_state(self, state: TaskStage) -> list[TaskHistory]:
        return [task for task in self.tasks.values() if task.state is state]

    def _on_started(self, event: Event) -> None:
        self.settings = {key: value for key, value in event.items() if key not in ("seq", "time", "event", "tasks")}
        self.nodes = tuple(Node(name=node["name"], gpus=tuple(node["gpus"])) for node in event["nodes"])
        for entry in event["tasks"]:
            name = str(entry["task"])
            self.tasks[name] = TaskHistory(
                task=name, num_gpus=int(entry["num_gpus"]), duration_s=float(entry["duration_s"])
            )

    def _on_resumed(self, event: Event) -> None:
        self._note_interruption(event)
        self.notices += map(str, event.get("notes") or ())
        done = set(event.get("done") or ())
        for task in self.tasks.values():
            if task.task in done:  # the line that says so may not have reached the disk
                self._close(task, self.last_seen_at, outcome="finished", reason="")
                task.state, task.failure = TaskStage.FINISHED, ""
            elif task.state is TaskStage.RUNNING:
                self._close(task, self.last_seen_at, outcome="lost", reason="the controller ended")
                task.state = TaskStage.WAITING

    def _on_planned(self, event: Event) -> None:
        at = float(event["time"])
        self.plans.append(
            PlanNote(
                at=at,
                reason=str(event["reason"]),
                method=str(event["method"]),
                status=str(event["status"]),
                makespan_s=float(event["makespan_s"]),
                bound_s=float(event["bound_s"]),
                notice=str(event["notice"]),
            )
        )
        if event["notice"] and event["notice"] not in self.notices:
            self.notices.append(str(event["notice"]))
        for entry in event["placements"]:
            placement = Placement(
                task=str(entry["task"]),
                gpus=gpus_from_json(entry["gpus"]),
                start_s=at + float(entry["start_s"]),
                duration_s=float(entry["duration_s"]),
            )
            task = self.tasks[placement.task]
            task.first_plan = task.first_plan or placement

    def _on_executor_started(self, event: Event) -> None:
        task = self.tasks[str(event["task"])]
        task.attempts.append(
            Attempt(number=int(event["attempt"]), gpus=gpus_from_json(event["gpus"]), start=float(event["time"]))
        )
        task.state, task.failure = TaskStage.RUNNING, ""

    def _on_executor_ended(self, event: Event) -> None:
        task, outcome = self.tasks[str(event["task"])], str(event["outcome"])
        self._close(task, float(event["time"]), outcome=outcome, reason=str(event["reason"]))
        task.state = TaskStage.FINISHED if outcome == "finished" else TaskStage.WAITING

    def _on_given_up(self, event: Event) -> None:
        task = self.tasks[str(event["task"])]
        task.state, task.failure = TaskStage.FAILED, str(event["reason"])

    def _on_completed(self, event: Event) -> None:
        self.result = dict(event)

    @staticmethod
    def _close(task: TaskHistory, end: float | None, *, outcome: str, reason: str) -> None:
        if task.attempts and task.attempts[-1].end is None:
            attempt = task.attempts[-1]
            attempt.end = attempt.start if end is None else max(attempt.start, end)
            attempt.outcome, attempt.reason = outcome, reason


def gpus_to_json(gpus: Iterable[Gpu]) -> list[list[Any]]:
    """GPUs as a journal holds them."""
    return [[gpu.node, gpu.index] for gpu in gpus]


def gpus_from_json(told: Iterable[Any]) -> tuple[Gpu, ...]:
    """GPUs as a journal told them."""
    return tuple(Gpu(str(node), int(index)) for node, index in told)


def read_queue_history(queue_dir: str | Path) -> QueueHistory:
    """The history of the queue in ``queue_dir``.

    Raises:
        RunNotFoundError: It holds no queue.
        RunError: The journal is damaged, or says what no ALTO writes.
    """
    return QueueHistory.read(QueueDir.open(queue_dir).run.journal_file)
