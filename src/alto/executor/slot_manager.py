"""Moves the jobs of a task between the bank of the executor and the disk."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from alto.early_exit import Selection
from alto.errors import DeviceMemoryError
from alto.executor.checkpoint import StateStore, read_state, write_state
from alto.executor.context import JobState, TaskContext
from alto.executor.forward_plan import slot_of
from alto.executor.micro_batches import OnMemoryEvent
from alto.executor.shared_bank import SharedBank
from alto.executor.trainer import Trainer
from alto.lora import AdapterWeights, ModuleNames, OptimizerState, read_adapter, write_adapter
from alto.runs import RunDir


class Stopwatch:
    """Adds up the time that a task spends on each activity.

    Args:
        before_s: Seconds by activity, from before the task was interrupted.

    Attributes:
        time_s: Seconds by activity: ``training``, ``evaluation``, ``saving``.
    """

    def __init__(self, before_s: Mapping[str, float] | None = None) -> None:
        self.time_s = {"training": 0.0, "evaluation": 0.0, "saving": 0.0, **(before_s or {})}

    def add(self, what: Literal["training", "evaluation", "saving"], seconds: float) -> None:
        self.time_s[what] += seconds

    @contextlib.contextmanager
    def timing(self, what: Literal["training", "evaluation", "saving"]) -> Iterator[None]:
        """Add the time until the block is left."""
        began_s = time.perf_counter()
        try:
            yield
        finally:
            self.add(what, time.perf_counter() - began_s)


class SlotManager:
    """Moves the jobs of one task between the slots of the bank and their folders.

    Every rank has a slot manager and makes the same calls; a job that is resident on another rank is only recorded.

    Args:
        on_memory_event: Called each time memory runs out, with the jobs of this task that are involved.

    Attributes:
        jobs: Every job that may be admitted before the next :meth:`fit`.
        on_lost_slot: Called with a job and its slot, when the job loses the slot because a new bank has fewer slots.
        error: An error of this task while the bank was rebuilt. It stops this task at its next turn, but not the task
            that needed the new bank.
    """

    def __init__(
        self,
        bank: SharedBank,
        context: TaskContext,
        run_dir: RunDir,
        on_memory_event: OnMemoryEvent,
        stopwatch: Stopwatch | None = None,
    ) -> None:
        self.bank = bank
        self.stopwatch = stopwatch or Stopwatch()
        self.context = context
        self.jobs: tuple[JobState, ...] = ()
        self.on_lost_slot: Callable[[JobState, int], None] = lambda job, slot: None
        self.error: Exception | None = None
        self._ranks = context.ranks
        self._names = ModuleNames.of(context.backbone.model)
        self._run_dir = run_dir
        self._store = StateStore(run_dir)
        self.memory_ran_out = on_memory_event

    def attach(self, jobs: Iterable[JobState], *, max_tokens_per_pass: int) -> None:
        """Get slots for ``jobs``, before any of them is resident.

        Args:
            jobs: Every job that may be admitted before the next :meth:`fit`.
            max_tokens_per_pass: Largest number of tokens of a micro-batch that the task allows.

        Raises:
            DeviceMemoryError: Not even one slot fits.
        """
        self.jobs = tuple(jobs)
        self.bank.attach(self, max_tokens=max_tokens_per_pass)

    def detach(self) -> None:
        """Free the slots of all jobs and leave the bank; unsaved state is lost."""
        for job in self.jobs:
            if job.slot is not None:
                self._free(job)
        self.bank.detach(self)

    @property
    def trainer(self) -> Trainer:
        """Trains the resident jobs; replaced when the bank is fitted."""
        return self.bank.trainer

    @property
    def num_slots(self) -> int:
        """Total number of slots over all ranks."""
        return self.bank.num_slots

    def is_free(self, slot: int) -> bool:
        """Return whether the bank has ``slot``, counted over all ranks, and no job of any task is in it.

        A slot of another rank counts as free: with several ranks, only this task uses the bank.
        """
        if slot >= self.num_slots:
            return False
        slots = self.trainer.passes.slots
        return slots.rank_of(slot) != self._ranks.rank or self.trainer.bank.is_free(slots.local_slot_of(slot))

    def ranks_of(self, job: JobState) -> list[int]:
        """Return the ranks that train a resident job."""
        if job.is_data_parallel:
            return list(range(self._ranks.size))
        return [self._rank_of(job)]

    def admit(self, job: JobState, slot: int, *, is_data_parallel: bool = False) -> None:
        """Put a job without a slot into ``slot``: with the state that it had when it left its last slot, or with its
        starting weights if it has not trained yet.

        Args:
            slot: Slot number, counted over all ranks.
            is_data_parallel: Whether to put it into the same local slot of every rank's bank.
        """
        assert self.is_free(slot), f"slot {slot} is another job's"
        job.slot, job.is_data_parallel = slot, is_data_parallel
        local_slot = self.trainer.passes.local_slot(job)
        if local_slot is None:
            return
        try:
            self.trainer.admit(job, local_slot, *self._beginning_of(job))
        except Exception:
            job.slot = None
            if not self.trainer.bank.is_free(local_slot):
                self.trainer.bank.release(local_slot)
            raise

    def _beginning_of(self, job: JobState) -> tuple[AdapterWeights | None, OptimizerState | None]:
        """Return the weights and the optimizer state with which a job enters a slot; None for new ones."""
        if job.step:
            return read_state(self._store.folder(job.id, "last"))
        if job.starts_warm:
            return read_adapter(self._run_dir.job(job.id, "start")), None
        start = self.context.start
        return None if start is None else start.weights, None

    def save_and_free(self, job: JobState) -> int:
        """Save the job's state, then free its slot and return the slot's number."""
        self.save(job)
        return self._free(job)

    def leave(self, job: JobState) -> None:
        """Save a job and free its slot while the bank is rebuilt. If the job cannot be saved, this task stops at its
        next turn; with several ranks, which have a single task, the error is raised."""
        with self._own_errors():
            self.save_and_free(job)
        if job.slot is not None:
            self._free(job)

    def enter_again(self, job: JobState, slot: int) -> None:
        """Put a job that has left the bank into ``slot``; errors are as in :meth:`leave`."""
        with self._own_errors():
            self.admit(job, slot)

    @contextlib.contextmanager
    def _own_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if not self._ranks.is_alone or isinstance(error, torch.AcceleratorError):
                raise
            self.error = self.error or error

    def keep_best(self, job: JobState) -> None:
        """Keep the adapter in the job's slot as its best so far."""
        job.unsaved_best = (
            job.step,
            self.trainer.bank.read(self._local_slot(job)) if self._is_written_here(job) else None,
        )

    def save(self, job: JobState) -> None:
        """Save the job's state if it is not on disk already; for a job that cannot be resumed, only its best
        adapter."""
        with self.stopwatch.timing("saving"):
            self._save(job)

    def _save(self, job: JobState) -> None:
        if job.unsaved_best is not None:
            step, best = job.unsaved_best
            if best is not None:
                self._store.save(job.id, "best", step, lambda folder: self._write_adapter(folder, job, best))
            else:
                self._store.saved_elsewhere(job.id, "best")
            job.saved_best_step, job.unsaved_best = step, None
        if job.slot is None or job.saved_step == job.step:
            return
        if job.is_resumable:
            if self._is_written_here(job):
                local_slot = self._local_slot(job)
                state = self.trainer.bank.read(local_slot), self.trainer.optimizer.read(local_slot)
                self._save_last(job, job.step, *state)
            else:
                self._store.saved_elsewhere(job.id, "last")
        job.saved_step = job.step

    def _save_last(self, job: JobState, step: int, weights: AdapterWeights, optimizer: OptimizerState) -> None:
        def fill(folder: Path) -> None:
            self._write_adapter(folder, job, weights)
            write_state(folder, optimizer)

        self._store.save(job.id, "last", step, fill)

    def saved(self, job: JobState, kind: Literal["best", "last"]) -> Path:
        """Return the folder of the job's current adapter (``last``) or best adapter; save it if it is not on disk."""
        self.save(job)
        return self._store.folder(job.id, kind)

    def remove_predecessors(self, jobs: Iterable[JobState]) -> None:
        """Remove outdated states of jobs, and the ``last`` states of jobs that cannot be resumed. The checkpoint in the
        journal must not refer to them."""
        self._store.remove_predecessors()
        for job in jobs:
            if not job.is_resumable:
                self._store.remove(job.id, "last")

    def seal(self, jobs: Iterable[JobState]) -> None:
        """Make the saved states that a checkpoint of ``jobs`` refers to durable."""
        with self.stopwatch.timing("saving"):
            self._store.seal((job.id, "last") for job in jobs if not job.is_resumable)

    def commit(self) -> None:
        """Commit the saved states: a resumed run starts from them."""
        self._store.commit()

    def has_free_slot(self) -> bool:
        """Return whether a slot of the bank is free."""
        return any(map(self.is_free, range(self.num_slots)))

    @contextlib.contextmanager
    def holding_best(self, job: JobState) -> Iterator[None]:
        """Put the saved best adapter of an ended job into a free slot for the duration of the ``with`` block."""
        job.slot = next(slot for slot in range(self.num_slots) if self.is_free(slot))
        local_slot = self.trainer.passes.local_slot(job)
        if local_slot is not None:
            self.trainer.admit(job, local_slot, read_adapter(self._store.folder(job.id, "best")))
        try:
            yield
        finally:
            self._free(job)

    def give_start(self, clone: JobState, origin: JobState) -> None:
        """Make ``clone`` start from the best adapter of ``origin``."""
        self.save(origin)
        self._ranks.barrier()  # until the rank that saves it has done so
        if self._ranks.is_first:
            weights = read_adapter(self._store.folder(origin.id, "best"))
            self._write_adapter(self._run_dir.job(clone.id, "start"), clone, weights)
        self._ranks.barrier()
        clone.starts_warm = True

    def give_state(self, fork: JobState, origin: JobState) -> None:
        """Make ``fork`` continue the training of ``origin``: weights, optimizer state and step are copied bit by
        bit."""
        self.save(origin)
        self._ranks.barrier()  # until the rank that saves it has done so
        if self._ranks.is_first:
            self._save_last(fork, origin.step, *read_state(self._store.folder(origin.id, "last")))
        else:
            self._store.saved_elsewhere(fork.id, "last")
        self._ranks.barrier()
        fork.step = fork.saved_step = origin.step

    def fit(self, jobs: Iterable[JobState]) -> None:
        """Make the bank large enough for ``jobs``, which include the resident jobs. A job that loses its slot because
        the new bank has fewer slots is reported to ``on_lost_slot``; its state is on disk.

        Raises:
            DeviceMemoryError: Not even one slot of the needed size fits; the bank is as before.
        """
        before, self.jobs = self.jobs, tuple(jobs)
        try:
            self.bank.fit()
        except DeviceMemoryError:
            self.jobs = before
            raise

    def lose_slot(self, job: JobState, slot: int) -> None:
        """Report that the bank no longer has a slot for ``job``; errors are as in :meth:`leave`."""
        with self._own_errors():
            self.on_lost_slot(job, slot)

    def _free(self, job: JobState) -> int:
        slot, local_slot = slot_of(job), self.trainer.passes.local_slot(job)
        if local_slot is not None:
            self.trainer.bank.release(local_slot)
        job.slot, job.is_data_parallel = None, False
        return slot

    def _rank_of(self, job: JobState) -> int:
        return self.trainer.passes.slots.rank_of(slot_of(job))

    def _is_written_here(self, job: JobState) -> bool:
        """Return whether this rank writes the states of a resident job. For a data-parallel job, the first rank that
        has it does."""
        return self._rank_of(job) == self._ranks.rank

    def _local_slot(self, job: JobState) -> int:
        return self.trainer.passes.slots.local_slot_of(slot_of(job))

    def _write_adapter(self, folder: Path, job: JobState, weights: AdapterWeights) -> None:
        write_adapter(folder, weights, job.config, self.context.backbone.path, self._names)


@dataclass(slots=True, kw_only=True, eq=False)
class TrainingState:
    """The state of a running task, identical on all ranks except for the contents of the banks.

    Attributes:
        jobs: Every job by id; jobs that are added while the task runs come last.
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
        return job.id in self.ahead or not self.selection.rungs.is_waiting(job.id)
