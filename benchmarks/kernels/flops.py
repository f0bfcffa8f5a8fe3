"""Floating-point operations of a step, counted by hand: only the necessary products."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from alto.lora import linear_modules
from benchmarks.kernels.workload import Workload

__all__ = ["base_flops", "lora_flops"]


def base_flops(model: PreTrainedModel, workload: Workload, batch_size: int) -> float:
    """Return the FLOPs of the forward pass, and of the backward pass of activations, through the frozen base.

    They are 2·K·N each way per token and linear layer, and likewise per trained token for the head. Causal attention
    over a sequence of L tokens takes 2·L²·(query features) forward, and two and a half times as many backward, where
    the scores are computed again.
    """
    config = model.config
    linear = sum(module.in_features * module.out_features for module in linear_modules(model))
    query_features = config.num_attention_heads * config.head_dim
    total = 0.0
    for batch in workload.batches(batch_size, torch.device("cpu")):
        total += 4.0 * linear * sum(batch.job_tokens)
        total += 4.0 * config.hidden_size * config.vocab_size * sum(batch.job_targets)
        total += 7.0 * config.num_hidden_layers * query_features * sum(length**2 for length in batch.sequence_lengths)
    return total


def lora_flops(model: PreTrainedModel, workload: Workload, batch_size: int) -> float:
    """Return the FLOPs of the adapters of all jobs: per token and module 2·r·(K + N) forward, and twice as many
    backward."""
    sides = sum(module.in_features + module.out_features for module in linear_modules(model))
    return sum(
        6.0 * workload.ranks[job] * sides * tokens
        for batch in workload.batches(batch_size, torch.device("cpu"))
        for job, tokens in zip(batch.slots, batch.job_tokens, strict=True)
    )
