"""The state of one running task: its jobs, the selection among them, and the slots that they hold."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from alto.early_exit import Selection
from alto.executor.context import TaskContext
from alto.executor.job_state import JobState
from alto.executor.slot_manager import SlotManager
from alto.executor.stopwatch import Stopwatch
from alto.executor.trainer import Trainer

__all__ = ["TaskState"]


@dataclass(slots=True, kw_only=True, eq=False)
class TaskState:
    """The state of a running task, equal on all ranks except for the contents of the banks.

    Attributes:
        context: The task's context.
        jobs: Every job by id; jobs that are added while the task runs come last.
        selection: Knows which jobs train, wait at a rung, or have ended.
        slot_manager: Moves jobs between slots and disk.
        ahead: Jobs that wait at a rung and continue in idle slots.
    """

    context: TaskContext
    jobs: dict[str, JobState]
    selection: Selection
    slot_manager: SlotManager
    ahead: frozenset[str] = frozenset()

    @property
    def trainer(self) -> Trainer:
        """The trainer of the resident jobs; :meth:`SlotManager.fit` may replace it."""
        return self.slot_manager.trainer

    @property
    def stopwatch(self) -> Stopwatch:
        """Adds up the time that the task spends on each activity."""
        return self.slot_manager.stopwatch

    def is_competing(self, job: JobState) -> bool:
        """Return whether the job has not ended."""
        return self.selection.is_training(job.id)

    def active(self) -> list[JobState]:
        """Return the resident jobs that take the next step."""
        return [job for job in self.jobs.values() if job.slot is not None and self._trains(job)]

    def slots(self) -> frozenset[int]:
        """Return the slots of the resident jobs."""
        return frozenset(job.slot for job in self.jobs.values() if job.slot is not None)

    def in_slot(self, slot: int) -> JobState:
        """Return the job that is resident in ``slot``."""
        return next(job for job in self.jobs.values() if job.slot == slot)

    def competing(self) -> Iterator[JobState]:
        """Yield the jobs that have not ended."""
        return (self.jobs[job] for job in self.selection.training)

    def _trains(self, job: JobState) -> bool:
        return job.id in self.ahead or not self.selection.is_waiting(job.id)
