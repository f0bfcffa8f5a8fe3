"""The state of one task while it runs: its jobs, the selection between them, and which of them are resident."""

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
    """Equal on all ranks, except for the contents of the banks.

    Attributes:
        context: The task.
        jobs: Every job by id, those added while the task runs last.
        selection: Which jobs train, which wait at a rung, which have ended.
        slot_manager: Which job is in which slot.
        ahead: Jobs that wait at a rung and continue in idle slots.
    """

    context: TaskContext
    jobs: dict[str, JobState]
    selection: Selection
    slot_manager: SlotManager
    ahead: frozenset[str] = frozenset()

    @property
    def trainer(self) -> Trainer:
        """What trains the resident jobs now; :meth:`SlotManager.fit` may replace it."""
        return self.slot_manager.trainer

    @property
    def stopwatch(self) -> Stopwatch:
        """Adds up what the task spends its time on."""
        return self.slot_manager.stopwatch

    def is_competing(self, job: JobState) -> bool:
        """Whether the job has not ended."""
        return self.selection.is_training(job.id)

    def active(self) -> list[JobState]:
        """The jobs that take the next step."""
        return [job for job in self.jobs.values() if job.slot is not None and self._trains(job)]

    def slots(self) -> frozenset[int]:
        """The slots of the resident jobs."""
        return frozenset(job.slot for job in self.jobs.values() if job.slot is not None)

    def in_slot(self, slot: int) -> JobState:
        """The job that is resident in ``slot``."""
        return next(job for job in self.jobs.values() if job.slot == slot)

    def competing(self) -> Iterator[JobState]:
        """The jobs that have not ended."""
        return (self.jobs[job] for job in self.selection.training)

    def _trains(self, job: JobState) -> bool:
        return job.id in self.ahead or not self.selection.is_waiting(job.id)
