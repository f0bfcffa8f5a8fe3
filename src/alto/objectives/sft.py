"""Supervised fine-tuning: the mean cross-entropy of the trained tokens, per job."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from alto.backbone import Backbone
from alto.data import TokenBatch

__all__ = ["sft_losses", "sft_sums"]


def sft_losses(backbone: Backbone, batch: TokenBatch) -> Tensor:
    """Loss of every job: the mean over the trained tokens of its batch, as Hugging Face models compute it alone.

    Returns:
        ``[J]`` float32, nats per token. Of a job whose batch is spread over passes, what this pass adds to it.
    """
    sums_J = _sums(_token_losses(backbone, batch), batch.job_targets)
    return (sums_J / _send(batch.job_trained, sums_J.device)).float()


def sft_sums(backbone: Backbone, batch: TokenBatch) -> Tensor:
    """Summed loss of every job's trained tokens in the pass, ``[J]`` float32 nats."""
    return _sums(_token_losses(backbone, batch), batch.job_targets).float()


def _token_losses(backbone: Backbone, batch: TokenBatch) -> Tensor:
    hidden_TH = backbone.hidden_states(batch.input_ids_T, batch.position_ids_T, batch.sequence_lengths)
    return backbone.token_losses(hidden_TH.index_select(0, batch.loss_positions_S), batch.loss_targets_S)


def _sums(losses_S: Tensor, job_targets: Sequence[int]) -> Tensor:
    """The sum of each job's own run of ``losses_S``, all jobs in one launch.

    Each is summed by itself, in an order that its own length decides, so its bits depend on nobody else's losses. In
    float64, as that order is one after the other on a CPU.
    """
    lengths_J = _send(job_targets, losses_S.device)
    # unsafe: the lengths are ours; to check them would make the host wait for the device.
    return torch.segment_reduce(losses_S.double(), "sum", lengths=lengths_J, unsafe=True)


def _send(counts: Sequence[int], device: torch.device) -> Tensor:
    """To ``device``, without waiting for what a GPU is doing."""
    return torch.tensor(counts, pin_memory=device.type == "cuda").to(device, non_blocking=True)
