"""The assignment of a forward pass's tokens to slots, and the dropout masks and noise drawn for them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TypeAlias

import torch

from alto.backbone import Backbone, changed_embeddings
from alto.data import EncodedDataset, JobRows, TokenBatch, collate, dummy_batch, share_rows
from alto.executor.job_state import JobState
from alto.executor.micro_batches import MicroBatches
from alto.executor.ranks import Ranks
from alto.kernels import DropoutKey, NoiseKey, TokenNoise, TokenSchedule
from alto.lora import ForwardContext, adapter_scale
from alto.scheduler import RankSlots

# The batches and schedules of the next step's micro-batches, made on the host while the device computes the present
# step.


class PreparedStep:
    """Batches and schedules of the micro-batches that are expected next, found by their inputs.

    If a step turns out differently (a job ended, or memory ran out and the micro-batches are smaller), it finds nothing
    here and makes its own. The computed values never depend on what was prepared.
    """

    def __init__(self) -> None:
        # Keys contain ids of datasets; the stored parts keep the datasets alive, so that no other object gets their id.
        self._batches: dict[tuple[tuple[int, JobRows], ...], tuple[tuple[JobRows, ...], TokenBatch]] = {}
        self._schedules: dict[TokenSchedule, TokenSchedule] = {}
        self._last: TokenSchedule | None = None

    def add(self, parts: Sequence[JobRows], batch: TokenBatch, schedule: TokenSchedule) -> None:
        """Keep the batch and the schedule of a micro-batch. ``schedule`` is copied at once to the devices that the last
        used schedule was copied to."""
        if self._last is not None:
            schedule.copy_as(self._last)
        self._batches[_key(parts)] = (tuple(parts), batch)
        self._schedules[schedule] = schedule

    def forget(self) -> None:
        """Forget everything that was prepared."""
        self._batches, self._schedules = {}, {}

    def batch(self, parts: Sequence[JobRows]) -> TokenBatch | None:
        """Return the batch of a micro-batch, once; None if it was not prepared."""
        prepared = self._batches.pop(_key(parts), None)
        return None if prepared is None else prepared[1]

    def schedule(self, schedule: TokenSchedule) -> TokenSchedule:
        """Return the prepared schedule that equals this one, with its copies on devices; if there is none, return
        ``schedule``."""
        self._last = self._schedules.pop(schedule, schedule)
        return self._last


def _key(parts: Sequence[JobRows]) -> tuple[tuple[int, JobRows], ...]:
    return tuple((id(part.dataset), part) for part in parts)


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


def training_pass(
    backbone: Backbone,
    forward_context: ForwardContext,
    batch: TokenBatch,
    by_local_slot: Mapping[int, JobState],
    prepared: PreparedStep,
) -> AbstractContextManager[None]:
    """Enter a context in which a forward pass over ``batch`` is part of a training step, with dropout and noise."""
    schedule = prepared.schedule(schedule_of(batch, by_local_slot, training=True))
    return _drawn(backbone, forward_context, schedule, _noise_of(batch, by_local_slot, backbone.device))


@contextmanager
def _drawn(
    backbone: Backbone, forward_context: ForwardContext, schedule: TokenSchedule, noise: TokenNoise | None
) -> Iterator[None]:
    noisy = nullcontext() if noise is None else changed_embeddings(backbone, noise.add_to)
    with forward_context.use(schedule), noisy:
        yield


def schedule_of(
    batch: TokenBatch, by_local_slot: Mapping[int, JobState], *, training: bool, steps_ahead: int = 0
) -> TokenSchedule:
    """Return the schedule that assigns the tokens of ``batch`` to slots.

    Args:
        batch: The tokens of a micro-batch.
        by_local_slot: The jobs in the slots.
        training: Whether dropout applies.
        steps_ahead: Number of steps after the next step of the jobs.
    """
    jobs = [by_local_slot[local_slot] for local_slot in batch.slots]
    dropout = [
        DropoutKey(job.config.lora_dropout, job.config.seed, job.step + steps_ahead, first_token)
        for job, first_token in zip(jobs, batch.job_first_tokens, strict=True)
    ]
    return TokenSchedule.build(
        batch.slots,
        batch.job_tokens,
        scales=[adapter_scale(job.config) for job in jobs],
        dropout=dropout if training else None,
    )


def _noise_of(batch: TokenBatch, by_local_slot: Mapping[int, JobState], device: torch.device) -> TokenNoise | None:
    """Return the noise on the embeddings of the jobs that train with it; None if no job does."""
    jobs = [by_local_slot[local_slot] for local_slot in batch.slots]
    if not any(job.config.neftune_noise_alpha for job in jobs):
        return None
    keys = [
        NoiseKey(job.config.neftune_noise_alpha, job.config.seed, job.step, first_token)
        if job.config.neftune_noise_alpha
        else None
        for job, first_token in zip(jobs, batch.job_first_tokens, strict=True)
    ]
    lengths = iter(batch.sequence_lengths)
    return TokenNoise.build(keys, [list(itertools.islice(lengths, count)) for count in batch.job_sequences], device)
