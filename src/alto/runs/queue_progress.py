"""Progress of a queue and of its tasks' runs: the numbers that tables and pages share."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from alto.errors import RunError
from alto.records import Gpu
from alto.runs.events import JournalEntry, MeasuringBegun, TaskMeasured, TaskRelayed, TaskResumed, TaskStarted
from alto.runs.history import RunHistory, history_before, read_history
from alto.runs.progress import share_done
from alto.runs.queue_dir import QueueDir
from alto.runs.queue_history import QueueHistory, TaskHistory, TaskStage, read_queue_history

__all__ = ["QueueProgress"]


class QueueProgress:
    """The observed state of a queue and of its tasks' runs.

    Attributes:
        queue: State of the queue, from its own journal.
        runs: State of the tasks' runs, from their journals, by task; tasks that have not begun are missing.
        unreadable: Why the journal of a task's run cannot be read, by task.
        num_measured: Tasks whose duration was measured before the queue began.
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

        The queue's own journal is left out: when the queue is resumed, its entries are observed again.

        Raises:
            RunNotFoundError: There is no queue.
            RunError: The queue's file is damaged. If a task's journal is damaged, only that task's progress is unknown.
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

    def share(self, task: TaskHistory) -> float:
        """Return the share of the task's expected samples that is trained, in [0, 1]."""
        if task.state is TaskStage.FINISHED:
            return 1.0
        run = self.runs.get(task.task)
        return 0.0 if run is None else share_done(run)

    def best_loss(self, task: TaskHistory) -> float | None:
        """Return the best validation loss so far, in nats per token; None if there is none."""
        run = self.runs.get(task.task)
        return run.best.best_validation_loss if run is not None and run.best is not None else None

    def holders(self) -> dict[Gpu, str]:
        """Return the running task on each GPU that has one."""
        running = self.queue.in_state(TaskStage.RUNNING)
        return {gpu: task.task for task in running if task.attempts for gpu in task.attempts[-1].gpus}
