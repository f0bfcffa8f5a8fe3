"""Held-out loss: the very number the trainer calls validation loss."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import PreTrainedModel

from alto.backbone import Backbone
from alto.data import EncodedDataset, JobRows, collate, split_into_passes
from alto.errors import NoResultError
from alto.objectives import find_objective, pass_terms

__all__ = ["heldout_loss", "padding_free"]


@contextlib.contextmanager
def padding_free(network: PreTrainedModel, tokenizer: Any, base: str) -> Iterator[Backbone]:
    """``network`` with padding-free attention while the context lasts; then its own attention again.

    Raises:
        UnsupportedModelError: See :class:`Backbone`.
    """
    own = network.config._attn_implementation
    try:
        yield Backbone(network, tokenizer, base)
    finally:
        network.set_attn_implementation(own)


@torch.no_grad()
def heldout_loss(
    backbone: Backbone, dataset: EncodedDataset, *, max_tokens_per_pass: int, on_done: Callable[[int], None]
) -> float:
    """Nats per trained token over all rows.

    Args:
        on_done: Called after every pass with the number of its rows.

    Raises:
        NoResultError: The loss is not a finite number.
    """
    objective, rows, total = find_objective("sft"), JobRows(0, tuple(range(len(dataset)))), 0.0
    for jobs in split_into_passes(dataset, [rows], max_tokens_per_pass, split_jobs=True):
        total += float(pass_terms(objective, backbone, collate(dataset, jobs, backbone.device)).sums_J)
        on_done(sum(len(job.rows) for job in jobs))
    loss = total / dataset.num_trained_tokens
    if not math.isfinite(loss):
        raise NoResultError(
            f"expected a finite held-out loss, found {loss}; the adapter or its base model holds broken weights, or "
            "the base's precision is too low for it"
        )
    return loss
