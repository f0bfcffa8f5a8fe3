"""Putting a trainer together: the one place where a bank is made and wrapped around a base model, for training and for
profiling alike."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from alto.backbone import Backbone
from alto.executor.micro_batches import MicroBatches
from alto.executor.planned_job import PlannedJob
from alto.executor.ranks import Ranks
from alto.executor.trainer import Trainer
from alto.lora import (
    ADAPTER_DTYPES,
    AdapterBank,
    BankLayout,
    SlotAdamW,
    TargetModule,
    bank_bytes,
    find_shared_inputs,
    inject,
    linear_modules,
)
from alto.spec import AdapterDtype
from alto.spec.job_config import OptimizerName

__all__ = ["BankSize", "build_trainer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BankSize:
    """Of the bank of one rank, and what its jobs are trained with; all ranks have the same.

    Attributes:
        modules: Every module that some job targets, in the order of the model.
        max_rank: The largest rank of any job.
        rank_step: What the ranks of all jobs are multiples of.
        num_slots: Jobs that it holds.
        optims: Optimizers of its jobs.
        adapter_dtype: Of adapters, their gradients and the moments of ``adamw_torch``.
    """

    modules: tuple[TargetModule, ...]
    max_rank: int
    rank_step: int
    num_slots: int
    optims: frozenset[OptimizerName]
    adapter_dtype: AdapterDtype = "float32"

    @classmethod
    def of(
        cls,
        jobs: Sequence[PlannedJob],
        backbone: Backbone,
        *,
        num_slots: int,
        adapter_dtype: AdapterDtype = "float32",
    ) -> Self:
        """The smallest bank in whose every slot any of ``jobs`` fits.

        Args:
            jobs: One or more.
            backbone: The base model they were planned for, with or without injected adapters.
            num_slots: Slots of one rank's bank.
            adapter_dtype: As ``task.adapter_dtype``.
        """
        targeted = {module for job in jobs for module in job.shape.targets}
        return cls(
            modules=tuple(module for module in linear_modules(backbone.model) if module in targeted),
            max_rank=max(job.shape.rank for job in jobs),
            rank_step=math.gcd(*(job.shape.rank for job in jobs)),
            num_slots=num_slots,
            optims=frozenset(job.config.optim for job in jobs),
            adapter_dtype=adapter_dtype,
        )

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of an adapter of the largest rank on all modules, its gradient and its optimizer state."""
        layout = BankLayout(modules=self.modules, max_rank=self.max_rank)
        return bank_bytes(layout, 1, self.optims, ADAPTER_DTYPES[self.adapter_dtype])


def build_trainer(
    backbone: Backbone, size: BankSize, micro_batches: MicroBatches, ranks: Ranks | None = None
) -> Trainer:
    """A trainer with an empty bank. The targeted modules of ``backbone`` are wrapped in place, instead of what another
    bank has wrapped.

    Args:
        backbone: The base model; one forward pass is run on it, of a few tokens.
        size: Of this rank's bank.
        micro_batches: Cuts steps and evaluations into what fits into memory, and is told where it runs out.
        ranks: This process among those that train together; None where it is alone.
    """
    layout = BankLayout(
        modules=size.modules,
        max_rank=size.max_rank,
        rank_step=size.rank_step,
        shared_inputs=find_shared_inputs(backbone.model, backbone.run_once),
    )
    bank = AdapterBank(layout, size.num_slots, device=backbone.device, dtype=ADAPTER_DTYPES[size.adapter_dtype])
    optimizer = SlotAdamW(bank, size.optims)
    forward_context = inject(backbone.model, bank)
    return Trainer(backbone, bank, optimizer, forward_context, micro_batches, ranks or Ranks())
