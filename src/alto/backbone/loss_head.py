"""Next-token loss, chunk by chunk: the logits of all tokens are never in memory together, and the frozen head gets no
gradient.

Shapes: ``S`` trained tokens, ``H`` hidden size, ``V`` vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["token_losses"]

_CHUNK_ELEMENTS = {"cpu": 1 << 21, "cuda": 1 << 26}
"""Logits of a chunk: 8 MiB of float32, which stay in a CPU's cache; 256 MiB on a GPU, enough to fill it."""

_MIN_CHUNK_TOKENS = {"cpu": 128, "cuda": 256}
"""Smallest number of tokens of a chunk: with fewer, as for a large vocabulary, reading the head's weight twice
dominates its time."""


class _ChunkedTokenLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_SH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        targets_S: Tensor,
        scale: float | None,
        softcap: float | None,
    ) -> Tensor:
        chunk = _chunk_tokens("cuda" if hidden_SH.is_cuda else "cpu", weight_VH.shape[0])
        losses_S = hidden_SH.new_empty(hidden_SH.shape[0], dtype=torch.float32)
        gradient_SH = torch.empty_like(hidden_SH) if ctx.needs_input_grad[0] else None
        for start in range(0, hidden_SH.shape[0], chunk):
            part = slice(start, start + chunk)
            logits = F.linear(hidden_SH[part], weight_VH, bias_V)
            if scale is not None:
                logits = logits.mul_(scale)
            if softcap is not None:
                logits = logits.float().div_(softcap).tanh_().mul_(softcap)
            log_probabilities = F.log_softmax(logits, dim=1, dtype=torch.float32)
            index = targets_S[part, None]
            losses_S[part] = log_probabilities.gather(1, index).squeeze(1).neg_()
            if gradient_SH is not None:
                error = log_probabilities.exp_()
                error.scatter_add_(1, index, error.new_full((1, 1), -1.0).expand_as(index))
                if softcap is not None:
                    error.mul_(logits.div_(softcap).square_().neg_().add_(1.0))  # the slope of the cap
                if scale is not None:
                    error.mul_(scale)
                torch.mm(error.to(weight_VH.dtype), weight_VH, out=gradient_SH[part])
        if gradient_SH is not None:
            ctx.save_for_backward(gradient_SH)
        return losses_S

    @staticmethod
    def backward(ctx: Any, dloss_S: Tensor) -> tuple[Tensor | None, ...]:
        (gradient_SH,) = ctx.saved_tensors
        return gradient_SH * dloss_S[:, None].to(gradient_SH.dtype), None, None, None, None, None


def _chunk_tokens(device: str, vocabulary: int) -> int:
    return max(_MIN_CHUNK_TOKENS[device], _CHUNK_ELEMENTS[device] // vocabulary)


def token_losses(
    hidden_SH: Tensor,
    weight_VH: Tensor,
    targets_S: Tensor,
    *,
    bias_V: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Cross-entropy of every token: ``logsumexp(z) - z[target]``, ``z = softcap(scale · (hidden @ weightᵀ + bias))``.

    The gradient towards ``hidden_SH`` is formed chunk by chunk in the forward pass, while the logits are there;
    the backward pass only scales it.

    Args:
        hidden_SH: Hidden states.
        weight_VH: Weight of the output head.
        targets_S: Target token ids.
        bias_V: Bias of the output head; None without one.
        scale: Factor of the logits; None without one.
        softcap: Cap of the logits; None without one.

    Returns:
        ``[S]`` float32, nats.
    """
    if hidden_SH.shape[0] == 0:
        return hidden_SH.new_zeros(0, dtype=torch.float32)
    result: Tensor = _ChunkedTokenLoss.apply(hidden_SH, weight_VH, bias_V, targets_S, scale, softcap)
    return result
