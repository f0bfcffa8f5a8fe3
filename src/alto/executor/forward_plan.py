"""The forward passes of a bank's jobs: their rows on this rank, the slots of their tokens, the dropout masks and the
noise drawn for them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TypeAlias

import torch

from alto.backbone import Backbone, changed_embeddings
from alto.data import EncodedDataset, JobRows, TokenBatch, collate, share_rows
from alto.executor.context import JobState
from alto.executor.micro_batches import MicroBatches
from alto.executor.ranks import Ranks
from alto.kernels import DropoutKey, NoiseKey, TokenNoise, TokenSchedule
from alto.lora import AdapterBank, BankHeads, adapter_scale, inject
from alto.objectives import Learners
from alto.scheduler import RankSlots


class PreparedStep:
    """Batches and schedules of the micro-batches that are expected next, by their inputs. The host makes them while the
    device computes the current step.

    The next step may differ from the expected one, because a job has ended, or memory ran out and micro-batches are
    smaller. Such a step makes its own batches and schedules. The computed values never depend on what was prepared.
    """

    def __init__(self) -> None:
        # Keys contain ids of datasets; the stored parts keep the datasets alive, so that no other object gets their id.
        self._batches: dict[tuple[tuple[int, JobRows], ...], tuple[tuple[JobRows, ...], TokenBatch]] = {}
        self._schedules: dict[TokenSchedule, TokenSchedule] = {}
        self._last: TokenSchedule | None = None

    def add(self, parts: Sequence[JobRows], batch: TokenBatch, schedule: TokenSchedule) -> None:
        """Keep the batch and the schedule of a micro-batch. ``schedule`` is copied immediately to the devices of the
        schedule that was used last."""
        if self._last is not None:
            schedule.copy_as(self._last)
        self._batches[_key(parts)] = (tuple(parts), batch)
        self._schedules[schedule] = schedule

    def forget(self) -> None:
        """Forget everything that was prepared."""
        self._batches, self._schedules = {}, {}

    def take_batch(self, parts: Sequence[JobRows]) -> TokenBatch | None:
        """Remove and return the batch of a micro-batch; None if it was not prepared."""
        prepared = self._batches.pop(_key(parts), None)
        return None if prepared is None else prepared[1]

    def take_schedule(self, schedule: TokenSchedule) -> TokenSchedule:
        """Remove and return the prepared schedule that equals ``schedule`` and already has copies on devices. If none
        was prepared, return ``schedule``."""
        self._last = self._schedules.pop(schedule, schedule)
        return self._last


def _key(parts: Sequence[JobRows]) -> tuple[tuple[int, JobRows], ...]:
    return tuple((id(part.dataset), part) for part in parts)


JobBatch: TypeAlias = tuple[JobState, EncodedDataset, tuple[int, ...]]
"""A job, its dataset, and the rows of one of its batches."""


class Passes:
    """The forward passes of the jobs in a bank, on this rank. All ranks are given the same work.

    Args:
        backbone: The base model; its targeted modules are wrapped in place.
        bank: Bank of this rank; the banks of all ranks have the same number of slots.

    Attributes:
        forward_context: Gives the wrapped modules the slots of a micro-batch's tokens.
        prepared: The micro-batches that are expected next.
    """

    def __init__(
        self,
        backbone: Backbone,
        bank: AdapterBank,
        micro_batches: MicroBatches,
        ranks: Ranks,
    ) -> None:
        self.backbone = backbone
        self.bank = bank
        self.micro_batches = micro_batches
        self.ranks = ranks
        self.slots = RankSlots(num_ranks=ranks.size, per_rank=bank.num_slots)
        self.heads = BankHeads(bank)
        self.prepared = PreparedStep()
        self.inject()

    def inject(self) -> None:
        """Wrap the targeted modules of the base model for the bank. A bank that was injected before is removed."""
        self.forward_context = inject(self.backbone.model, self.bank, self.backbone.rows_in_pass)

    def local_slot(self, job: JobState) -> int | None:
        """Return the local slot of a resident job in this rank's bank; None if the job is on another rank."""
        slot = slot_of(job)
        if job.is_data_parallel or self.slots.rank_of(slot) == self.ranks.rank:
            return self.slots.local_slot_of(slot)
        return None

    def local_jobs(self, jobs: Sequence[JobState]) -> dict[int, JobState]:
        """Return the jobs among ``jobs`` that are in this rank's bank, by local slot."""
        return {local_slot: job for job in jobs if (local_slot := self.local_slot(job)) is not None}

    def index_of(self, jobs: Sequence[JobState]) -> dict[int, int]:
        """Return the index in ``jobs`` of each job that is in this rank's bank, by local slot."""
        slots = map(self.local_slot, jobs)
        return {local_slot: index for index, local_slot in enumerate(slots) if local_slot is not None}

    def work(
        self, batches: Sequence[JobBatch], *, split_jobs: bool = False, is_step: bool = False
    ) -> tuple[list[JobRows], int]:
        """Return this rank's share of ``batches``, with local slots, and the largest number of micro-batches of any
        rank.

        Args:
            split_jobs: Whether the rows of a job may be split over micro-batches.
            is_step: Whether the rows of each job are the rows of one training step.
        """
        of_rank: list[list[JobRows]] = [[] for _ in range(self.ranks.size)]
        for job, dataset, rows in batches:
            slot = slot_of(job)
            has_means = is_step and job.context.objective.has_head  # transformers' Trainer takes means of micro-steps
            factors = job.config.row_factors(len(rows)) if has_means else ()
            shares = self.backbone.shares_beginnings and job.planned.treats_tokens_alike
            part = JobRows(dataset, self.slots.local_slot_of(slot), rows, factors=factors, shares_beginnings=shares)
            if job.is_data_parallel:
                for work, part_of_rank in zip(of_rank, share_rows(part, len(of_rank)), strict=True):
                    work += [part_of_rank] if part_of_rank is not None else []
            else:
                of_rank[self.slots.rank_of(slot)].append(part)
        if self.ranks.is_alone:
            return of_rank[0], 0
        num_micro_batches = max(self.micro_batches.count(work, split_jobs=split_jobs) for work in of_rank)
        return of_rank[self.ranks.rank], num_micro_batches

    def collate(self, parts: Sequence[JobRows]) -> TokenBatch:
        """Return a micro-batch of ``parts`` on the device; this rank may have none."""
        return collate(parts, self.backbone.device)

    def learners(self, jobs: Sequence[JobState]) -> list[Learners]:
        """Return the jobs of a micro-batch, grouped by task."""
        groups = [list(group) for _, group in itertools.groupby(jobs, key=lambda job: id(job.context))]
        return [
            Learners(of_task[0].context.objective, tuple(job.config for job in of_task), self.heads)
            for of_task in groups
        ]

    def evaluating(self, batch: TokenBatch, local_jobs: Mapping[int, JobState]) -> AbstractContextManager[None]:
        """Return a context in which a forward pass over ``batch`` has no dropout and no noise.

        Args:
            local_jobs: The jobs in this rank's bank, by local slot.
        """
        return self.forward_context.use(schedule_of(batch, local_jobs, training=False))

    def training(self, batch: TokenBatch, local_jobs: Mapping[int, JobState]) -> AbstractContextManager[None]:
        """Return a context in which a forward pass over ``batch`` is part of a training step, with dropout and noise;
        for the arguments see :meth:`evaluating`."""
        schedule = self.prepared.take_schedule(schedule_of(batch, local_jobs, training=True))
        return self._drawn(schedule, _noise_of(batch, local_jobs, self.backbone.device))

    @contextmanager
    def _drawn(self, schedule: TokenSchedule, noise: TokenNoise | None) -> Iterator[None]:
        noisy = nullcontext() if noise is None else changed_embeddings(self.backbone, noise.add_to)
        with self.forward_context.use(schedule), noisy:
            yield


def divided(rows: JobRows, micro_batches: MicroBatches, ranks: Ranks) -> tuple[list[JobRows], int]:
    """Return this rank's share of rows that belong to no single job, and the largest number of micro-batches of any
    rank."""
    work = [[] if part is None else [part] for part in share_rows(rows, ranks.size)]
    return work[ranks.rank], max(micro_batches.count(of_one, split_jobs=True) for of_one in work)


def slot_of(job: JobState) -> int:
    """Return the slot of a resident job."""
    assert job.slot is not None, f"{job.id} has no slot"
    return job.slot


def schedule_of(
    batch: TokenBatch, by_local_slot: Mapping[int, JobState], *, training: bool, steps_ahead: int = 0
) -> TokenSchedule:
    """Return the schedule that assigns the tokens of ``batch`` to slots.

    Args:
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
