"""Padding-free batches: the rows of many jobs end to end in one row of tokens.

Shapes: ``T`` tokens, ``S`` positions that predict a trained token, ``J`` jobs of the batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from alto.data.encode import EncodedDataset

__all__ = ["JobRows", "TokenBatch", "collate", "split_into_passes"]


@dataclass(frozen=True, slots=True)
class JobRows:
    """Rows of one job in one batch; ``slot`` is where the job's adapter lies."""

    slot: int
    rows: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBatch:
    """Tokens of one forward pass, job after job, row after row.

    Attributes:
        slots: Slot of every job, ``J`` of them, in token order.
        input_ids_T, position_ids_T: Token ids, and positions that start at 0 for every row.
        sequence_lengths: Tokens of every row.
        job_tokens: Tokens of every job.
        loss_positions_S: Indices into ``T`` of the positions that predict a trained token, ascending.
        loss_targets_S: What they have to predict.
        job_targets: How many of the ``S`` positions are each job's.
    """

    slots: tuple[int, ...]
    input_ids_T: Tensor
    position_ids_T: Tensor
    sequence_lengths: tuple[int, ...]
    job_tokens: tuple[int, ...]
    loss_positions_S: Tensor
    loss_targets_S: Tensor
    job_targets: tuple[int, ...]


def collate(dataset: EncodedDataset, jobs: Sequence[JobRows], device: torch.device | str = "cpu") -> TokenBatch:
    """Lay the rows of ``jobs`` end to end."""
    rows = [row for job in jobs for row in job.rows]
    lengths = [dataset.input_ids[row].numel() for row in rows]
    targets_T = torch.cat([dataset.targets[row] for row in rows])
    loss_positions_S = (targets_T >= 0).nonzero().squeeze(1)
    job_tokens = tuple(sum(dataset.input_ids[row].numel() for row in job.rows) for job in jobs)
    counts = [int((part >= 0).sum()) for part in targets_T.split(job_tokens)]
    return TokenBatch(
        slots=tuple(job.slot for job in jobs),
        input_ids_T=_send(torch.cat([dataset.input_ids[row] for row in rows]), device),
        position_ids_T=_send(torch.cat([torch.arange(length) for length in lengths]), device),
        sequence_lengths=tuple(lengths),
        job_tokens=job_tokens,
        loss_positions_S=_send(loss_positions_S, device),
        loss_targets_S=_send(targets_T[loss_positions_S], device),
        job_targets=tuple(counts),
    )


def split_into_passes(
    dataset: EncodedDataset, jobs: Sequence[JobRows], max_tokens: int, *, split_jobs: bool = False
) -> Iterator[list[JobRows]]:
    """Cut the work of a step into passes of at most ``max_tokens`` tokens, in order.

    Args:
        split_jobs: Whether a job's rows may be spread over passes. Where not, a job larger than ``max_tokens`` is a
            pass of its own; likewise always a row.
    """
    current: list[JobRows] = []
    filled = 0
    for job in jobs:
        for rows in [(row,) for row in job.rows] if split_jobs else [job.rows]:
            tokens = sum(dataset.input_ids[row].numel() for row in rows)
            if current and filled + tokens > max_tokens:
                yield current
                current, filled = [], 0
            if current and current[-1].slot == job.slot:
                current[-1] = JobRows(job.slot, current[-1].rows + rows)
            else:
                current.append(JobRows(job.slot, rows))
            filled += tokens
    if current:
        yield current


def _send(tensor: Tensor, device: torch.device | str) -> Tensor:
    """To ``device``, without waiting for what a GPU is doing."""
    pinned = tensor.pin_memory() if torch.device(device).type == "cuda" else tensor
    return pinned.to(device, non_blocking=True)
