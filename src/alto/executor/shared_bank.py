"""The bank of an executor, which the jobs of all its tasks share."""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, Self

import torch

from alto.backbone import Backbone, release_memory
from alto.errors import DeviceMemoryError
from alto.executor.context import JobState, TaskContext
from alto.executor.forward_plan import Passes
from alto.executor.micro_batches import MemoryEvent, MicroBatches, NoMemoryError, watching
from alto.executor.planned_job import PlannedJob
from alto.executor.ranks import Ranks
from alto.executor.trainer import Trainer
from alto.kernels import choose_backend
from alto.lora import (
    ADAPTER_DTYPES,
    AdapterBank,
    BankLayout,
    BankOptimizer,
    ExtraTensor,
    TargetModule,
    adaptable,
    bank_bytes,
    eject,
    find_shared_inputs,
    initial_values,
)
from alto.spec import AdapterDtype, OptimizerName

# Builds a trainer. This is the only place where a bank is made and injected into a base model, for training and for
# profiling.


@dataclass(frozen=True, slots=True, kw_only=True)
class BankSize:
    """The size of one rank's bank and the optimizers of its jobs; equal on all ranks.

    Attributes:
        modules: Every module that at least one job targets, in the model's order.
        rank_step: Greatest common divisor of the ranks of all jobs.
        working_dtype: Dtype of the bank's working copies of its weights; None if it keeps none.
        state_dtype: Dtype of the moments of ``adamw_torch``; see :class:`alto.lora.BankOptimizer`.
    """

    modules: tuple[TargetModule, ...]
    max_rank: int
    rank_step: int
    num_slots: int
    optims: frozenset[OptimizerName]
    extras: tuple[ExtraTensor, ...] = ()
    adapter_dtype: AdapterDtype = "float32"
    working_dtype: torch.dtype | None = None
    state_dtype: torch.dtype | None = None

    @classmethod
    def of(
        cls,
        jobs: Sequence[PlannedJob],
        backbone: Backbone,
        *,
        num_slots: int,
        adapter_dtype: AdapterDtype = "float32",
        optim_state_dtype: AdapterDtype | None = None,
    ) -> Self:
        """Return the smallest bank size whose slots fit each of ``jobs``.

        Args:
            jobs: At least one job.
            backbone: The base model for which the jobs were planned, with or without injected adapters.
        """
        targeted = {module for job in jobs for module in job.shape.targets}
        return cls(
            modules=tuple(module for module in adaptable(backbone.model) if module in targeted),
            max_rank=max(job.shape.rank for job in jobs),
            rank_step=math.gcd(*(rank for job in jobs for rank in job.shape.ranks)),
            num_slots=num_slots,
            optims=frozenset(job.config.optim for job in jobs),
            extras=BankLayout.extras_of(job.shape for job in jobs),
            adapter_dtype=adapter_dtype,
            working_dtype=working_dtype_on(backbone, adapter_dtype),
            state_dtype=state_dtype_of(optim_state_dtype),
        )

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one slot: an adapter of the largest rank on all modules, its gradient and its optimizer state."""
        layout = BankLayout(modules=self.modules, max_rank=self.max_rank, extras=self.extras)
        dtypes = (ADAPTER_DTYPES[self.adapter_dtype], self.working_dtype, self.state_dtype)
        return bank_bytes(layout, 1, self.optims, *dtypes)


def working_dtype_on(backbone: Backbone, adapter_dtype: AdapterDtype) -> torch.dtype | None:
    """Return the dtype of the working copies that a bank on ``backbone`` keeps of its weights; None if there are
    none."""
    ops = choose_backend(device=backbone.device)
    found: torch.dtype | None = ops.working_dtype(backbone.dtype, ADAPTER_DTYPES[adapter_dtype])
    return found


def state_dtype_of(optim_state_dtype: AdapterDtype | None) -> torch.dtype | None:
    """Return the dtype of the moments of ``adamw_torch`` for ``task.optim_state_dtype``; see
    :class:`alto.lora.BankOptimizer`."""
    return None if optim_state_dtype is None else ADAPTER_DTYPES[optim_state_dtype]


def build_trainer(
    backbone: Backbone, size: BankSize, micro_batches: MicroBatches, ranks: Ranks | None = None
) -> Trainer:
    """Build a trainer with an empty bank. It wraps the targeted modules of ``backbone`` in place and replaces a bank
    that was injected before.

    Args:
        backbone: The base model; this runs one forward pass of a few tokens on it.
        ranks: This process among the ranks that train together; None if it is alone.
    """
    layout = BankLayout(
        modules=size.modules,
        max_rank=size.max_rank,
        rank_step=size.rank_step,
        shared_inputs=find_shared_inputs(backbone.model, backbone.run_once),
        extras=size.extras,
    )
    bank = AdapterBank(
        layout,
        size.num_slots,
        device=backbone.device,
        dtype=ADAPTER_DTYPES[size.adapter_dtype],
        initial=initial_values(backbone.model, size.extras),
    )
    bank.keep_copies(size.working_dtype)
    bank.keep_square_sums(bank.ops.gradient_tiles(backbone.dtype, bank.params_ZP.dtype))
    optimizer = BankOptimizer(bank, size.optims, size.state_dtype)
    return Trainer(Passes(backbone, bank, micro_batches, ranks or Ranks()), optimizer)


class BankMember(Protocol):
    """A task that has jobs in the bank."""

    @property
    def context(self) -> TaskContext:
        """The task's context."""

    @property
    def jobs(self) -> Collection[JobState]:
        """Every job that may be admitted before the bank is fitted again."""

    def leave(self, job: JobState) -> None:
        """Save a job, then free its slot. An error of this method or of the next two ends only this task, before its
        next step."""

    def enter_again(self, job: JobState, slot: int) -> None:
        """Put a job that has left the bank into a slot."""

    def lose_slot(self, job: JobState, slot: int) -> None:
        """Record that the bank has no slot for ``job`` any more. The state of the job is on disk."""

    def memory_ran_out(self, event: MemoryEvent) -> None:
        """Record an out-of-memory event that involves jobs of this task."""


class SharedBank:
    """The bank that the jobs of all members share, and its trainer.

    A bank that does not fit into memory is made with half the slots, down to one. Every rank has a bank and makes the
    same calls.

    Args:
        backbone: The base model of all members.
        ranks: This process among the ranks that train together; several members need a single rank.

    Attributes:
        trainer: Trains the jobs in the slots; replaced when the bank is fitted. It exists once the first member is
            attached.
    """

    trainer: Trainer

    def __init__(
        self,
        backbone: Backbone,
        ranks: Ranks,
        adapter_dtype: AdapterDtype,
        optim_state_dtype: AdapterDtype | None = None,
    ) -> None:
        self._backbone = backbone
        self._ranks = ranks
        self.adapter_dtype = adapter_dtype
        self.optim_state_dtype = optim_state_dtype
        self._members: dict[BankMember, int] = {}
        self._fitting_tokens = sys.maxsize
        self._wanted: BankSize | None = None
        self._size: BankSize | None = None

    @property
    def num_slots(self) -> int:
        """Number of slots of all ranks together."""
        return self.trainer.passes.slots.num_slots

    def attach(self, member: BankMember, *, max_tokens: int) -> None:
        """Add the jobs of another task; the bank grows if they need more slots, more modules or a larger rank.

        Args:
            max_tokens: Largest number of tokens of a micro-batch that the task allows.

        Raises:
            DeviceMemoryError: Not even one slot fits; the bank is as before.
        """
        self._remember_pass_size()
        self._members[member] = max_tokens
        try:
            self.fit()
        except BaseException:
            del self._members[member]
            raise
        self.trainer.passes.micro_batches.max_tokens = self._max_tokens

    def detach(self, member: BankMember) -> None:
        """Remove a task, none of whose jobs has a slot; the bank keeps its size."""
        self._remember_pass_size()
        del self._members[member]
        self.trainer.passes.micro_batches.max_tokens = self._max_tokens

    def fit(self) -> None:
        """Make the bank large enough for the jobs of all members; resident jobs stay if there are enough slots.

        Raises:
            DeviceMemoryError: Not even one slot of the needed size fits; the bank is as before.
        """
        wanted, before = self._size_for_all(), self._size
        if wanted == self._wanted:
            return
        residents = [(member, job, job.slot) for member in self._members for job in member.jobs if job.slot is not None]
        # A data-parallel job returns to the slot of its first copy only, until the next plan.
        for member, job, _ in residents:
            member.leave(job)
        self._ranks.barrier()
        if before is not None:
            self._remember_pass_size()
            del self.trainer
            eject(self._backbone.model)  # its wrapped modules hold the bank too
        try:
            self._build(wanted)
        except DeviceMemoryError:
            if before is not None:
                self._build(before)
                self._readmit(residents)
            raise
        self._readmit(residents)

    def bytes_for(self, job: JobState) -> int:
        """Return the bytes of the adapter of ``job``, with its gradient and its optimizer state."""
        return self._size_for([job.planned], num_slots=1).bytes_per_slot

    def reinject(self) -> None:
        """Wrap the base model's modules again after other code has wrapped or unwrapped them."""
        self.trainer.passes.inject()

    @property
    def _max_tokens(self) -> int:
        """Largest number of tokens of a micro-batch that all members allow and that fits into memory."""
        return min(self._fitting_tokens, *self._members.values(), sys.maxsize)

    def _remember_pass_size(self) -> None:
        """Store the current size of micro-batches, if out-of-memory events have made it smaller than the tasks
        allow."""
        if self._size is not None and (tokens := self.trainer.passes.micro_batches.max_tokens) < self._max_tokens:
            self._fitting_tokens = tokens

    def _readmit(self, residents: Iterable[tuple[BankMember, JobState, int]]) -> None:
        for member, job, slot in residents:
            if slot < self.num_slots:
                member.enter_again(job, slot)
            else:
                member.lose_slot(job, slot)

    def _size_for_all(self) -> BankSize:
        num_slots = sum(
            min(member.context.task.max_slots or sys.maxsize, sum(job.needs_own_slot for job in member.jobs))
            for member in self._members
        )
        planned = [job.planned for member in self._members for job in member.jobs]
        return self._size_for(planned, num_slots=math.ceil(num_slots / self._ranks.size))

    def _size_for(self, jobs: Sequence[PlannedJob], *, num_slots: int) -> BankSize:
        return BankSize.of(
            jobs,
            self._backbone,
            num_slots=num_slots,
            adapter_dtype=self.adapter_dtype,
            optim_state_dtype=self.optim_state_dtype,
        )

    def _build(self, size: BankSize) -> None:
        """Make a bank of ``size``, or with as many of its slots as fit."""
        self._wanted = size
        events: list[MemoryEvent] = []
        while True:
            trainer = self._try_build_trainer(size)
            if not self._ranks.any(trainer is None):
                assert trainer is not None
                self.trainer, self._size = trainer, size
                for event in events:
                    list(self._members)[-1].memory_ran_out(event)
                return
            del trainer
            eject(self._backbone.model)  # its wrapped modules hold the bank too
            release_memory()
            if size.num_slots == 1:
                raise DeviceMemoryError(self._no_bank(size))
            size = replace(size, num_slots=size.num_slots // 2)
            events.append(
                MemoryEvent(
                    phase="bank",
                    slots=(),
                    num_tokens=0,
                    max_tokens_per_pass=self._max_tokens,
                    num_slots=size.num_slots * self._ranks.size,
                )
            )

    def _try_build_trainer(self, size: BankSize) -> Trainer | None:
        """Return a trainer with a bank of ``size``; None if the bank does not fit."""
        micro_batches = MicroBatches(
            self._max_tokens,
            self._memory_ran_out,
            can_retry=self._ranks.is_alone,
            is_padded=self._backbone.is_padded,
        )
        try:
            with watching("bank"):
                return build_trainer(self._backbone, size, micro_batches, self._ranks)
        except NoMemoryError:
            return None

    def _memory_ran_out(self, event: MemoryEvent) -> None:
        """Report ``event`` to every member with jobs in its slots."""
        local_slot = self.trainer.passes.local_slot
        for member in self._members:
            affected = [job for job in member.jobs if job.slot is not None and local_slot(job) in event.slots]
            if affected or len(self._members) == 1:
                member.memory_ran_out(replace(event, jobs=tuple(sorted(job.id for job in affected))))

    def _no_bank(self, size: BankSize) -> str:
        return (
            f"not enough memory on {self._backbone.device} for the base model and one adapter of rank {size.max_rank} "
            f"on {len(size.modules)} modules with its gradient and optimizer state "
            f"({size.bytes_per_slot / 2**20:,.1f} MiB); lower r, target fewer modules, or free memory on the device"
        )
