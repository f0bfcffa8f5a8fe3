"""Supervised fine-tuning: the mean cross-entropy of the trained tokens, per job."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from alto.backbone import Backbone
from alto.data import TokenBatch

__all__ = ["sft_losses", "sft_sums"]


def sft_losses(backbone: Backbone, batch: TokenBatch) -> Tensor:
    """Loss of every job of the batch: the mean over its trained tokens, as Hugging Face models compute it alone.

    Returns:
        ``[J]`` float32, nats per token.
    """
    return _reduce(_token_losses(backbone, batch), batch.job_targets, "mean")


def sft_sums(backbone: Backbone, batch: TokenBatch) -> Tensor:
    """Summed loss of every job's trained tokens, ``[J]`` float32 nats; for means over several passes."""
    return _reduce(_token_losses(backbone, batch), batch.job_targets, "sum")


def _token_losses(backbone: Backbone, batch: TokenBatch) -> Tensor:
    hidden_TH = backbone.hidden_states(batch.input_ids_T, batch.position_ids_T, batch.sequence_lengths)
    return backbone.token_losses(hidden_TH.index_select(0, batch.loss_positions_S), batch.loss_targets_S)


def _reduce(losses_S: Tensor, job_targets: Sequence[int], how: str) -> Tensor:
    """Each job's own run of ``losses_S`` to one number, all jobs in one launch.

    Each is reduced by itself, in an order that its own length decides, so its bits depend on nobody else's losses. In
    float64, as that order is one after the other on a CPU.
    """
    lengths_J = torch.tensor(job_targets, pin_memory=losses_S.is_cuda).to(losses_S.device, non_blocking=True)
    # unsafe: the lengths are ours; to check them would make the host wait for the device.
    return torch.segment_reduce(losses_S.double(), how, lengths=lengths_J, unsafe=True).float()
