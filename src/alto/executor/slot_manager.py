"""Moves the jobs of a task between the banks of the ranks and the disk."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Self

from alto.backbone import release_memory
from alto.errors import DeviceMemoryError
from alto.executor.assembly import BankSize, build_trainer
from alto.executor.checkpoint import StateStore, read_state, write_state
from alto.executor.context import TaskContext
from alto.executor.job_state import JobState
from alto.executor.memory_errors import MemoryEvent, NoMemoryError, watching
from alto.executor.micro_batches import MicroBatches, OnMemoryEvent
from alto.executor.trainer import Trainer
from alto.lora import AdapterWeights, ModuleNames, eject, read_adapter, write_adapter
from alto.runs import RunDir

__all__ = ["SlotManager"]


class SlotManager:
    """Moves jobs between the slots of the banks and their folders.

    A bank that does not fit into memory is made with half the slots, down to one. Every rank has a slot manager and
    makes the same calls; jobs that are resident on another rank are only noted. Made by :meth:`build`.

    Args:
        context: Base model, limits and ranks; jobs that are admitted may have contexts of their own.
        run_dir: Holds the states of jobs.
        names: Of the base model's modules, for adapters on disk.
        on_memory_event: Called each time memory ran out, with the jobs involved.

    Attributes:
        trainer: Trains the resident jobs; replaced by :meth:`fit`.
    """

    trainer: Trainer

    def __init__(
        self, context: TaskContext, run_dir: RunDir, names: ModuleNames, on_memory_event: OnMemoryEvent
    ) -> None:
        self._context = context
        self._ranks = context.ranks
        self._backbone = context.backbone
        self._names = names
        self._run_dir = run_dir
        self._store = StateStore(run_dir)
        self._on_memory_event = on_memory_event
        self._residents: dict[int, JobState] = {}

    @classmethod
    def build(
        cls,
        context: TaskContext,
        jobs: Sequence[JobState],
        run_dir: RunDir,
        *,
        max_tokens_per_pass: int,
        on_memory_event: OnMemoryEvent,
    ) -> Self:
        """With a bank for ``jobs``, none of which is resident yet.

        Args:
            context, run_dir, on_memory_event: As of the constructor.
            jobs: Every job that may be admitted before the next :meth:`fit`.
            max_tokens_per_pass: Initial largest number of tokens of a micro-batch.

        Raises:
            DeviceMemoryError: Not even one slot fits.
        """
        manager = cls(context, run_dir, ModuleNames.of(context.backbone.model), on_memory_event)
        manager._build(manager._size_for(jobs), max_tokens_per_pass)
        return manager

    @property
    def num_slots(self) -> int:
        """Number of slots of all ranks together."""
        return self.trainer.slots.num_slots

    @property
    def largest_micro_batch(self) -> int:
        """Tokens of the largest micro-batch that fitted into memory so far; 0 before the first."""
        return self.trainer.micro_batches.largest

    def ranks_of(self, job: JobState) -> list[int]:
        """The ranks that train a resident job."""
        if job.is_data_parallel:
            return list(range(self._ranks.size))
        return [self._rank_of(job)]

    def admit(self, job: JobState, slot: int, *, is_data_parallel: bool = False) -> None:
        """Put a job without a slot into ``slot``, as it was when it left its last one.

        Args:
            job: The job; its state says where it was.
            slot: Counted over all ranks.
            is_data_parallel: Put it into the same local slot of every rank's bank.
        """
        job.slot, job.is_data_parallel = slot, is_data_parallel
        self._residents[slot] = job
        local_slot = self.trainer.local_slot(job)
        if local_slot is None:
            return
        if job.step:
            self.trainer.readmit(job, local_slot, *read_state(self._store.folder(job.id, "last")))
        elif job.starts_warm:
            self.trainer.admit_warm(job, local_slot, read_adapter(self._run_dir.job(job.id, "start")))
        else:
            self.trainer.admit_fresh(job, local_slot)

    def evict(self, job: JobState) -> int:
        """Save the job's state, then free its slot and return the slot's number."""
        assert job.slot is not None
        self.save(job)
        local_slot = self.trainer.local_slot(job)
        if local_slot is not None:
            self.trainer.release(local_slot)
        del self._residents[job.slot]
        slot, job.slot, job.is_data_parallel = job.slot, None, False
        return slot

    def keep_best(self, job: JobState) -> None:
        """Note that the adapter in the job's slot is its best so far."""
        job.unsaved_best = (job.step, self.trainer.bank.read(self._local_slot(job)) if self._is_ours(job) else None)

    def save(self, job: JobState) -> None:
        """Save the job's state, where it is not on disk already."""
        if job.unsaved_best is not None:
            step, best = job.unsaved_best
            if best is not None:
                self._store.save(job.id, "best", step, lambda folder: self._write_adapter(folder, job, best))
            else:
                self._store.saved_elsewhere(job.id, "best")
            job.saved_best_step, job.unsaved_best = step, None
        if job.slot is not None and job.saved_step != job.step:
            if self._is_ours(job):
                local_slot = self._local_slot(job)
                weights, optimizer = self.trainer.bank.read(local_slot), self.trainer.optimizer.read(local_slot)

                def fill(folder: Path) -> None:
                    self._write_adapter(folder, job, weights)
                    write_state(folder, optimizer)

                self._store.save(job.id, "last", job.step, fill)
            else:
                self._store.saved_elsewhere(job.id, "last")
            job.saved_step = job.step

    def commit(self) -> None:
        """Commit the saved states: a resumed run starts from them."""
        self._store.commit()

    def give_start(self, clone: JobState, origin: JobState) -> None:
        """Let ``clone`` begin with the best adapter of ``origin``."""
        self.save(origin)
        self._ranks.barrier()  # until the rank that saves it has done so
        if self._ranks.is_first:
            weights = read_adapter(self._store.folder(origin.id, "best"))
            self._write_adapter(self._run_dir.job(clone.id, "start"), clone, weights)
        self._ranks.barrier()
        clone.starts_warm = True

    def fit(self, jobs: Iterable[JobState]) -> tuple[JobState, ...]:
        """Make the bank large enough for ``jobs``, those that are resident included.

        Returns:
            Jobs that have lost their slot, as the new bank has fewer; their states are on disk.

        Raises:
            DeviceMemoryError: Not even one slot of that size fits; the bank is as large as before.
        """
        jobs = list(jobs)
        before, wanted = self._size, self._size_for(jobs)
        if wanted == self._wanted:
            return ()
        # A job that was data-parallel goes where the first of its copies was, until the next plan.
        residents = [(job, job.slot) for job in jobs if job.slot is not None]
        for job, _ in residents:
            self.evict(job)
        self._ranks.barrier()
        max_tokens = self.trainer.micro_batches.max_tokens
        del self.trainer
        eject(self._backbone.model)  # which holds the bank too
        try:
            self._build(wanted, max_tokens)
        except DeviceMemoryError:
            self._build(before, max_tokens)
            self._readmit(residents)
            raise
        self._readmit(residents)
        return tuple(job for job, _ in residents if job.slot is None)

    def _rank_of(self, job: JobState) -> int:
        assert job.slot is not None, f"{job.id} has no slot"
        return self.trainer.slots.rank_of(job.slot)

    def _is_ours(self, job: JobState) -> bool:
        """Whether this rank writes the states of a resident job; those of a data-parallel one are written by the first
        rank that has it."""
        return self._rank_of(job) == self._ranks.rank

    def _local_slot(self, job: JobState) -> int:
        assert job.slot is not None
        return self.trainer.slots.local_slot_of(job.slot)

    def _readmit(self, residents: Iterable[tuple[JobState, int]]) -> None:
        for job, slot in residents:
            if slot < self.num_slots:
                self.admit(job, slot)

    def _size_for(self, jobs: Sequence[JobState]) -> BankSize:
        task = self._context.task
        return BankSize.of(
            [job.planned for job in jobs],
            self._backbone,
            num_slots=math.ceil(min(task.max_slots or len(jobs), len(jobs)) / self._ranks.size),
            adapter_dtype=task.adapter_dtype,
        )

    def _build(self, size: BankSize, max_tokens: int) -> None:
        """Make a bank of ``size``, or with as many of its slots as fit."""
        self._wanted = size
        while True:
            trainer = self._try_build_trainer(size, max_tokens)
            if not self._ranks.any(trainer is None):
                assert trainer is not None
                self.trainer, self._size = trainer, size
                return
            del trainer
            eject(self._backbone.model)  # which holds the bank too
            release_memory()
            if size.num_slots == 1:
                raise DeviceMemoryError(self._no_bank(size))
            size = replace(size, num_slots=size.num_slots // 2)
            num_slots = size.num_slots * self._ranks.size
            self._on_memory_event(
                MemoryEvent(phase="bank", slots=(), num_tokens=0, max_tokens_per_pass=max_tokens, num_slots=num_slots)
            )

    def _try_build_trainer(self, size: BankSize, max_tokens: int) -> Trainer | None:
        """None where it does not fit."""
        micro_batches = MicroBatches(max_tokens, self._memory_ran_out, can_retry=self._ranks.is_alone)
        try:
            with watching("bank"):
                return build_trainer(self._backbone, size, micro_batches, self._ranks)
        except NoMemoryError:
            return None

    def _memory_ran_out(self, event: MemoryEvent) -> None:
        here = (job for job in self._residents.values() if self.trainer.local_slot(job) in event.slots)
        self._on_memory_event(replace(event, jobs=tuple(sorted(job.id for job in here))))

    def _no_bank(self, size: BankSize) -> str:
        return (
            f"expected memory for one adapter of rank {size.max_rank} on {len(size.modules)} modules with its gradient "
            f"and optimizer state, {size.bytes_per_slot / 2**20:,.1f} MiB, found less left on {self._backbone.device} "
            "beside the base model; lower r, target fewer modules, or free memory on the device"
        )

    def _write_adapter(self, folder: Path, job: JobState, weights: AdapterWeights) -> None:
        write_adapter(folder, weights, job.config, self._backbone.path, self._names)
