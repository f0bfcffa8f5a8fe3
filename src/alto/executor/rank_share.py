"""This rank's share of the jobs and rows of a step or an evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from alto.backbone import Backbone
from alto.data import EncodedDataset, JobRows, TokenBatch, collate, dummy_batch, share_rows
from alto.executor.job_state import JobState
from alto.executor.micro_batches import MicroBatches
from alto.executor.ranks import Ranks
from alto.scheduler import RankSlots

__all__ = ["JobBatch", "RankShare", "slot_of"]

JobBatch: TypeAlias = tuple[JobState, EncodedDataset, tuple[int, ...]]
"""A job, its dataset, and the rows of one of its batches."""


class RankShare:
    """This rank's share of the work. All ranks are given the same work.

    Args:
        backbone: The base model.
        micro_batches: Splits work into micro-batches that fit into memory.
        ranks: This process among the ranks that train together.
        per_rank: Slots of every rank's bank.

    Attributes:
        slots: Maps slots to ranks and local slots.
    """

    def __init__(self, backbone: Backbone, micro_batches: MicroBatches, ranks: Ranks, per_rank: int) -> None:
        self._backbone = backbone
        self._micro_batches = micro_batches
        self._ranks = ranks
        self.slots = RankSlots(num_ranks=ranks.size, per_rank=per_rank)

    def local_slot(self, job: JobState) -> int | None:
        """Return the local slot of a resident job in this rank's bank; None if the job is on another rank."""
        slot = slot_of(job)
        if job.is_data_parallel or self.slots.rank_of(slot) == self._ranks.rank:
            return self.slots.local_slot_of(slot)
        return None

    def here(self, jobs: Sequence[JobState]) -> dict[int, JobState]:
        """Return the jobs among ``jobs`` that are in this rank's bank, by local slot."""
        return {local_slot: job for job in jobs if (local_slot := self.local_slot(job)) is not None}

    def work(
        self, batches: Sequence[JobBatch], *, split_jobs: bool = False, is_step: bool = False
    ) -> tuple[list[JobRows], int]:
        """Return this rank's share of ``batches``, and the largest number of micro-batches of any rank.

        Args:
            batches: Rows of every job.
            split_jobs: Whether the rows of a job may be split over micro-batches.
            is_step: Whether the rows of each job are the rows of one training step.
        """
        of_rank: list[list[JobRows]] = [[] for _ in range(self._ranks.size)]
        for job, dataset, rows in batches:
            slot = slot_of(job)
            has_means = is_step and job.context.objective.has_head  # transformers' Trainer takes means of micro-steps
            factors = job.config.row_factors(len(rows)) if has_means else ()
            shares = self._backbone.shares_beginnings and job.planned.treats_tokens_alike
            part = JobRows(dataset, self.slots.local_slot_of(slot), rows, factors=factors, shares_beginnings=shares)
            if job.is_data_parallel:
                for work, share in zip(of_rank, share_rows(part, len(of_rank)), strict=True):
                    work += [share] if share is not None else []
            else:
                of_rank[self.slots.rank_of(slot)].append(part)
        if self._ranks.is_alone:
            return of_rank[0], 0
        num_micro_batches = max(self._micro_batches.count(work, split_jobs=split_jobs) for work in of_rank)
        return of_rank[self._ranks.rank], num_micro_batches

    def collate(self, parts: Sequence[JobRows]) -> TokenBatch:
        """Return a micro-batch of ``parts``; a dummy batch if this rank has none."""
        return collate(parts, self._backbone.device) if parts else dummy_batch(self._backbone.device)


def slot_of(job: JobState) -> int:
    """Return the slot of a resident job."""
    assert job.slot is not None, f"{job.id} has no slot"
    return job.slot
