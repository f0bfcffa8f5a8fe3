"""Builds a trainer. This is the only place where a bank is made and injected into a base model, for training and for
profiling."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch

from alto.backbone import Backbone
from alto.executor.micro_batches import MicroBatches
from alto.executor.planned_job import PlannedJob
from alto.executor.ranks import Ranks
from alto.executor.trainer import Trainer
from alto.kernels import choose_backend
from alto.lora import (
    ADAPTER_DTYPES,
    AdapterBank,
    BankLayout,
    ExtraTensor,
    SlotAdamW,
    TargetModule,
    adaptable,
    bank_bytes,
    find_shared_inputs,
    initial_values,
    inject,
)
from alto.spec import AdapterDtype
from alto.spec.optimizers import OptimizerName

__all__ = ["BankSize", "build_trainer", "state_dtype_of", "working_dtype_on"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BankSize:
    """The size of one rank's bank and the optimizers of its jobs; equal on all ranks.

    Attributes:
        modules: Every module that at least one job targets, in the model's order.
        max_rank: Largest rank of any job.
        rank_step: Greatest common divisor of the ranks of all jobs.
        num_slots: Number of jobs that the bank can hold.
        optims: Optimizers of the jobs.
        extras: Further trained tensors of all jobs.
        adapter_dtype: Precision of adapters and their gradients.
        working_dtype: Dtype of the bank's working copies of its weights; None if it keeps none.
        state_dtype: Dtype of the moments of ``adamw_torch``; see :class:`alto.lora.SlotAdamW`.
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
            num_slots: Number of slots of one rank's bank.
            adapter_dtype: The task's ``adapter_dtype``.
            optim_state_dtype: The task's ``optim_state_dtype``.
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
    :class:`alto.lora.SlotAdamW`."""
    return None if optim_state_dtype is None else ADAPTER_DTYPES[optim_state_dtype]


def build_trainer(
    backbone: Backbone, size: BankSize, micro_batches: MicroBatches, ranks: Ranks | None = None
) -> Trainer:
    """Build a trainer with an empty bank. It wraps the targeted modules of ``backbone`` in place and replaces a bank
    that was injected before.

    Args:
        backbone: The base model; this runs one forward pass of a few tokens on it.
        size: Size of this rank's bank.
        micro_batches: Splits steps and evaluations into micro-batches that fit into memory.
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
    bank.keep_square_sums(choose_backend(device=backbone.device).gradient_tiles(backbone.dtype, bank.params_ZP.dtype))
    optimizer = SlotAdamW(bank, size.optims, size.state_dtype)
    forward_context = inject(backbone.model, bank, backbone.rows_in_pass)
    return Trainer(backbone, bank, optimizer, forward_context, micro_batches, ranks or Ranks())
