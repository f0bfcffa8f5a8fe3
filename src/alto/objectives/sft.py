"""Supervised fine-tuning: the mean cross-entropy of the trained tokens, per job."""

from __future__ import annotations

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
    return torch.stack([losses.mean() for losses in _token_losses(backbone, batch).split(batch.job_targets)])


def sft_sums(backbone: Backbone, batch: TokenBatch) -> Tensor:
    """Summed loss of every job's trained tokens, ``[J]`` float32 nats; for means over several passes."""
    return torch.stack([losses.sum() for losses in _token_losses(backbone, batch).split(batch.job_targets)])


def _token_losses(backbone: Backbone, batch: TokenBatch) -> Tensor:
    hidden_TH = backbone.hidden_states(batch.input_ids_T, batch.position_ids_T, batch.sequence_lengths)
    return backbone.token_losses(hidden_TH.index_select(0, batch.loss_positions_S), batch.loss_targets_S)
