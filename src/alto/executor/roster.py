"""Where the jobs of a task are: in the bank, or on disk."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from alto.backbone import Backbone
from alto.data import TaskData
from alto.executor.checkpoint import StateStore, read_state, write_state
from alto.executor.job_run import JobRun
from alto.executor.trainer import Trainer
from alto.lora import AdapterWeights, TargetModule, linear_modules, read_adapter, write_adapter
from alto.runs import RunDir
from alto.spec import Task
from alto.spec.job_config import OptimizerName

__all__ = ["Roster"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _BankSize:
    modules: tuple[TargetModule, ...]
    max_rank: int
    num_slots: int
    optims: frozenset[OptimizerName]


class Roster:
    """Moves jobs between the bank's slots and their folders.

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
    ) -> None:
        self._task = task
        self._backbone = backbone
        self._data = data
        self._modules = linear_modules(backbone.model)
        self._run_dir = run_dir
        self._store = StateStore(run_dir)
        self._size = self._size_for(list(runs))
        self.trainer = self._new_trainer()

    @property
    def num_slots(self) -> int:
        return self._size.num_slots

    def seat(self, run: JobRun, slot: int) -> None:
        """Put a job without a slot into ``slot``, as it was when it left its last one."""
        if run.step:
            self.trainer.seat_again(run, slot, *read_state(self._store.folder(run.id, "last")))
        elif run.starts_warm:
            self.trainer.seat_warm(run, slot, read_adapter(self._run_dir.job(run.id, "start")))
        else:
            self.trainer.seat_fresh(run, slot)
        run.slot = slot

    def leave(self, run: JobRun) -> int:
        """Put everything the slot holds of the job on disk, then free the slot and return it."""
        assert run.slot is not None
        self.save(run)
        slot, run.slot = run.slot, None
        self.trainer.release(slot)
        return slot

    def keep_best(self, run: JobRun) -> None:
        """The adapter in the job's slot is its best so far."""
        assert run.slot is not None
        run.unsaved_best = (run.step, self.trainer.bank.read(run.slot))

    def save(self, run: JobRun) -> None:
        """Put what the job's slot holds on disk, where it is not there already."""
        if run.unsaved_best is not None:
            step, best = run.unsaved_best
            self._store.save(run.id, "best", step, lambda folder: self._write_adapter(folder, run, best))
            run.saved_best_step, run.unsaved_best = step, None
        if run.slot is not None and run.saved_step != run.step:
            weights, optimizer = self.trainer.bank.read(run.slot), self.trainer.optimizer.read(run.slot)

            def fill(folder: Path) -> None:
                self._write_adapter(folder, run, weights)
                write_state(folder, optimizer)

            self._store.save(run.id, "last", run.step, fill)
            run.saved_step = run.step

    def commit(self) -> None:
        """From now on what was saved is what a resumed run goes on from."""
        self._store.commit()

    def give_start(self, clone: JobRun, origin: JobRun) -> None:
        """Let ``clone`` begin with the best adapter of ``origin``."""
        self.save(origin)
        weights = read_adapter(self._store.folder(origin.id, "best"))
        self._write_adapter(self._run_dir.job(clone.id, "start"), clone, weights)
        clone.starts_warm = True

    def fit(self, runs: Iterable[JobRun]) -> None:
        """Make the bank large enough for ``runs``, whoever sits in it already."""
        runs = list(runs)
        size = self._size_for(runs)
        if size == self._size:
            return
        seated = [(run, run.slot) for run in runs if run.slot is not None]
        for run, _ in seated:
            self.leave(run)
        self._size = size
        self.trainer = self._new_trainer()
        for run, slot in seated:
            self.seat(run, slot)

    def _size_for(self, runs: Sequence[JobRun]) -> _BankSize:
        targeted = {module for run in runs for module in run.shape.targets}
        return _BankSize(
            modules=tuple(module for module in self._modules if module in targeted),
            max_rank=max(run.shape.rank for run in runs),
            num_slots=min(self._task.max_slots, len(runs)),
            optims=frozenset(run.config.optim for run in runs),
        )

    def _new_trainer(self) -> Trainer:
        return Trainer(
            self._backbone,
            self._data,
            modules=self._size.modules,
            max_rank=self._size.max_rank,
            num_slots=self._size.num_slots,
            max_tokens_per_pass=self._task.max_tokens_per_pass or sys.maxsize,
            optims=self._size.optims,
            adapter_dtype=self._task.adapter_dtype,
        )

    def _write_adapter(self, folder: Path, run: JobRun, weights: AdapterWeights) -> None:
        write_adapter(folder, weights, run.config, self._backbone.path, self._modules)
