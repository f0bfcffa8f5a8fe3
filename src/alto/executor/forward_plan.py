"""The assignment of a forward pass's tokens to slots, and the dropout masks and noise drawn for them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from alto.backbone import Backbone, changed_embeddings
from alto.data import TokenBatch
from alto.executor.job_state import JobState
from alto.executor.prepared import PreparedStep
from alto.kernels import DropoutKey, NoiseKey, TokenNoise, TokenSchedule
from alto.lora import ForwardContext, adapter_scale

__all__ = ["schedule_of", "training_pass"]


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
