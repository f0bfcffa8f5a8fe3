"""Classification heads: each job has its own, an extra tensor ``[K, H]`` of its adapter.

Shapes: ``Q`` rows, ``H`` hidden size, ``K`` labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from alto.lora.bank import AdapterBank
from alto.lora.layout import ExtraTensor
from alto.records import LabelSet

__all__ = ["HEAD", "BankHeads", "head_tensor"]

HEAD = "score.weight"
"""Name of the head's weight in transformers' ``...ForSequenceClassification`` models."""


def head_tensor(model: PreTrainedModel, labels: LabelSet) -> ExtraTensor:
    """Return the head of a job that learns ``labels`` on ``model``."""
    return ExtraTensor(name=HEAD, shape=(labels.num_labels, model.config.get_text_config().hidden_size))


class BankHeads:
    """The classification heads of the jobs in a bank; a slot may have none."""

    def __init__(self, bank: AdapterBank) -> None:
        self._bank = bank

    def initialise(self, slot: int, model: PreTrainedModel, seed: int) -> None:
        """Initialise the head of ``slot`` as transformers initialises the head of a model without one.

        The values depend only on the seed, the model and the number of labels.
        """
        weight_KH = self._of(self._bank.params_ZP, slot)
        linear = nn.Linear(weight_KH.shape[1], weight_KH.shape[0], bias=False)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            model._init_weights(linear)
        weight_KH.copy_(linear.weight.detach())

    def logits(self, hidden_QH: Tensor, slots: Sequence[int], counts: Sequence[int]) -> Tensor:
        """Return the logits ``[Q, K]`` in the dtype of the bank; the backward pass adds the gradients of the heads to
        those in the bank.

        Every head is multiplied only with the rows of its own job, so results are bit-identical whatever other jobs are
        present.

        Args:
            hidden_QH: Hidden state of every row.
            slots: Slot of every job; all their heads have the same number of labels.
            counts: Number of rows of every job, in order.
        """
        bank = self._bank
        weights = [self._of(bank.params_ZP, slot) for slot in slots]
        gradients = [self._of(bank.grads_ZP, slot) for slot in slots]
        logits_QK: Tensor = _HeadProducts.apply(
            hidden_QH.to(bank.params_ZP.dtype), bank.anchor, weights, gradients, tuple(counts)
        )
        return logits_QK

    def _of(self, rows_ZP: Tensor, slot: int) -> Tensor:
        return next(tensor for extra, tensor in self._bank.extras(rows_ZP, slot) if extra.name == HEAD)


class _HeadProducts(torch.autograd.Function):
    """Products with several weights, whose gradients are added in place; autograd sees only activations."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_QH: Tensor,
        anchor: Tensor,
        weights: list[Tensor],
        gradients: list[Tensor],
        counts: tuple[int, ...],
    ) -> Tensor:
        ctx.save_for_backward(hidden_QH)
        ctx.weights, ctx.gradients, ctx.counts = weights, gradients, counts
        parts = zip(hidden_QH.split(counts), weights, strict=True)
        return torch.cat([F.linear(part_QH, weight_KH) for part_QH, weight_KH in parts])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, None, None, None]:
        (hidden_QH,) = ctx.saved_tensors
        parts = list(zip(gradients[0].split(ctx.counts), hidden_QH.split(ctx.counts), strict=True))
        for (d_logits_QK, part_QH), gradient_KH in zip(parts, ctx.gradients, strict=True):
            gradient_KH.addmm_(d_logits_QK.T, part_QH)
        if not ctx.needs_input_grad[0]:
            return None, None, None, None, None
        d_hidden = [d_logits_QK @ weight_KH for (d_logits_QK, _), weight_KH in zip(parts, ctx.weights, strict=True)]
        return torch.cat(d_hidden), None, None, None, None
