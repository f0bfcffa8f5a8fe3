"""Where the jobs of a task are: in the bank of some rank, or on disk."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from alto.backbone import Backbone, release_memory
from alto.data import TaskData
from alto.errors import DeviceMemoryError
from alto.executor.checkpoint import StateStore, read_state, write_state
from alto.executor.job_run import JobRun
from alto.executor.memory_errors import MemoryEvent, NoMemoryError, watching
from alto.executor.micro_batches import OnMemoryEvent
from alto.executor.ranks import Ranks
from alto.executor.trainer import Trainer
from alto.lora import (
    ADAPTER_DTYPES,
    AdapterWeights,
    BankLayout,
    ModuleNames,
    TargetModule,
    bank_bytes,
    eject,
    linear_modules,
    read_adapter,
    write_adapter,
)
from alto.objectives import find_objective
from alto.runs import RunDir
from alto.spec import Task
from alto.spec.job_config import OptimizerName

__all__ = ["SlotManager"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _BankSize:
    """Of the bank of one rank; all have the same."""

    modules: tuple[TargetModule, ...]
    max_rank: int
    rank_step: int
    num_slots: int
    optims: frozenset[OptimizerName]


class SlotManager:
    """Moves jobs between the slots of the banks and their folders.

    A bank that does not fit into memory is made with half the slots, down to one. Every rank has a slot manager and
    does the same with it; what concerns a job that sits with another rank is only noted.

    Args:
        max_tokens_per_pass: Most tokens of a pass to begin with.
        on_memory_event: Is told whenever memory ran out.

    Raises:
        DeviceMemoryError: Not even one slot fits.

    Attributes:
        trainer: Trains those that have a slot.
    """

    def __init__(
        self,
        task: Task,
        runs: Iterable[JobRun],
        backbone: Backbone,
        data: TaskData,
        *,
        run_dir: RunDir,
        max_tokens_per_pass: int,
        on_memory_event: OnMemoryEvent,
        ranks: Ranks,
    ) -> None:
        self._task = task
        self._ranks = ranks
        self._backbone = backbone
        self._data = data
        self._modules = linear_modules(backbone.model)
        self._names = ModuleNames.of(backbone.model)
        self._run_dir = run_dir
        self._store = StateStore(run_dir)
        self._on_memory_event = on_memory_event
        self._build(self._size_for(list(runs)), max_tokens_per_pass)

    @property
    def num_slots(self) -> int:
        """Of all ranks together."""
        return self.trainer.slots.num_slots

    def admit(self, run: JobRun, slot: int, *, is_data_parallel: bool = False) -> None:
        """Put a job without a slot into ``slot``, as it was when it left its last one; one that is spread into the
        same place of every rank's bank."""
        run.slot, run.is_data_parallel = slot, is_data_parallel
        local_slot = self.trainer.local_slot(run)
        if local_slot is None:
            return
        if run.step:
            self.trainer.readmit(run, local_slot, *read_state(self._store.folder(run.id, "last")))
        elif run.starts_warm:
            self.trainer.admit_warm(run, local_slot, read_adapter(self._run_dir.job(run.id, "start")))
        else:
            self.trainer.admit_fresh(run, local_slot)

    def evict(self, run: JobRun) -> int:
        """Put everything the slot holds of the job on disk, then free the slot and return it."""
        assert run.slot is not None
        self.save(run)
        local_slot = self.trainer.local_slot(run)
        if local_slot is not None:
            self.trainer.release(local_slot)
        slot, run.slot, run.is_data_parallel = run.slot, None, False
        return slot

    def keep_best(self, run: JobRun) -> None:
        """The adapter in the job's slot is its best so far."""
        run.unsaved_best = (run.step, self.trainer.bank.read(self._local_slot(run)) if self._is_ours(run) else None)

    def save(self, run: JobRun) -> None:
        """Put what the job's slot holds on disk, where it is not there already."""
        if run.unsaved_best is not None:
            step, best = run.unsaved_best
            if best is not None:
                self._store.save(run.id, "best", step, lambda folder: self._write_adapter(folder, run, best))
            else:
                self._store.saved_elsewhere(run.id, "best")
            run.saved_best_step, run.unsaved_best = step, None
        if run.slot is not None and run.saved_step != run.step:
            if self._is_ours(run):
                local_slot = self._local_slot(run)
                weights, optimizer = self.trainer.bank.read(local_slot), self.trainer.optimizer.read(local_slot)

                def fill(folder: Path) -> None:
                    self._write_adapter(folder, run, weights)
                    write_state(folder, optimizer)

                self._store.save(run.id, "last", run.step, fill)
            else:
                self._store.saved_elsewhere(run.id, "last")
            run.saved_step = run.step

    def commit(self) -> None:
        """From now on what was saved is what a resumed run goes on from."""
        self._store.commit()

    def give_start(self, clone: JobRun, origin: JobRun) -> None:
        """Let ``clone`` begin with the best adapter of ``origin``."""
        self.save(origin)
        self._ranks.wait()  # for whoever has saved it
        if self._ranks.is_first:
            weights = read_adapter(self._store.folder(origin.id, "best"))
            self._write_adapter(self._run_dir.job(clone.id, "start"), clone, weights)
        self._ranks.wait()
        clone.starts_warm = True

    def fit(self, runs: Iterable[JobRun]) -> tuple[JobRun, ...]:
        """Make the bank large enough for ``runs``, whoever sits in it already.

        Returns:
            Those who have lost their slot, as the new bank has fewer; everything of them is on disk.

        Raises:
            DeviceMemoryError: Not even one slot of that size fits; the bank is as large as before.
        """
        runs = list(runs)
        before, wanted = self._size, self._size_for(runs)
        if wanted == self._wanted:
            return ()
        # Whoever was spread sits where the first of its copies was, until the next plan.
        residents = [(run, run.slot) for run in runs if run.slot is not None]
        for run, _ in residents:
            self.evict(run)
        self._ranks.wait()
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
        return tuple(run for run, _ in residents if run.slot is None)

    def _is_ours(self, run: JobRun) -> bool:
        """Whether this rank writes the states of a resident job; one that is spread is written by the first of those
        that have it."""
        assert run.slot is not None
        return self.trainer.slots.rank_of(run.slot) == self._ranks.rank

    def _local_slot(self, run: JobRun) -> int:
        assert run.slot is not None
        return self.trainer.slots.local_slot_of(run.slot)

    def _readmit(self, residents: Iterable[tuple[JobRun, int]]) -> None:
        for run, slot in residents:
            if slot < self.num_slots:
                self.admit(run, slot)

    def _size_for(self, runs: Sequence[JobRun]) -> _BankSize:
        targeted = {module for run in runs for module in run.shape.targets}
        return _BankSize(
            modules=tuple(module for module in self._modules if module in targeted),
            max_rank=max(run.shape.rank for run in runs),
            rank_step=math.gcd(*(run.shape.rank for run in runs)),
            num_slots=math.ceil(min(self._task.max_slots or len(runs), len(runs)) / self._ranks.size),
            optims=frozenset(run.config.optim for run in runs),
        )

    def _build(self, size: _BankSize, max_tokens: int) -> None:
        """Set up a bank of ``size``, or with as many of its slots as fit."""
        self._wanted = size
        while True:
            trainer = self._try_new_trainer(size, max_tokens)
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

    def _try_new_trainer(self, size: _BankSize, max_tokens: int) -> Trainer | None:
        """None where it does not fit."""
        try:
            with watching("bank"):
                return self._new_trainer(size, max_tokens)
        except NoMemoryError:
            return None

    def _new_trainer(self, size: _BankSize, max_tokens: int) -> Trainer:
        return Trainer(
            self._backbone,
            self._data,
            modules=size.modules,
            max_rank=size.max_rank,
            rank_step=size.rank_step,
            num_slots=size.num_slots,
            max_tokens_per_pass=max_tokens,
            optims=size.optims,
            objective=find_objective(self._task.method),
            metric=self._task.metric,
            adapter_dtype=self._task.adapter_dtype,
            on_memory_event=self._on_memory_event,
            ranks=self._ranks,
        )

    def _no_bank(self, size: _BankSize) -> str:
        layout = BankLayout(modules=size.modules, max_rank=size.max_rank)
        num_bytes = bank_bytes(layout, 1, size.optims, ADAPTER_DTYPES[self._task.adapter_dtype])
        return (
            f"expected memory for one adapter of rank {size.max_rank} on {len(size.modules)} modules with its gradient "
            f"and optimizer state, {num_bytes / 2**20:,.1f} MiB, found less left on {self._backbone.device} beside the "
            "base model; lower r, target fewer modules, or free memory on the device"
        )

    def _write_adapter(self, folder: Path, run: JobRun, weights: AdapterWeights) -> None:
        write_adapter(folder, weights, run.config, self._backbone.path, self._names)
