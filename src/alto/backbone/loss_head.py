"""Next-token loss without ever holding the logits of all tokens, and without a gradient for the frozen head.

Shapes: ``S`` trained tokens, ``H`` hidden size, ``V`` vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["token_losses"]

_CHUNK_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 26}


class _ChunkedTokenLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_SH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, targets_S: Tensor, softcap: float | None
    ) -> Tensor:
        keep_gradient = ctx.needs_input_grad[0]
        chunk = max(1, _CHUNK_ELEMENTS.get(hidden_SH.device.type, 1 << 20) // weight_VH.shape[0])
        losses, gradients = [], []
        for hidden, targets in zip(hidden_SH.split(chunk), targets_S.split(chunk), strict=True):
            logits = F.linear(hidden, weight_VH, bias_V).float()
            if softcap is not None:
                logits = torch.tanh(logits / softcap) * softcap
            index = targets[:, None]
            normaliser = torch.logsumexp(logits, dim=1, keepdim=True)
            losses.append((normaliser - logits.gather(1, index)).squeeze(1))
            if keep_gradient:
                slope = 1.0 - (logits / softcap) ** 2 if softcap is not None else None
                error = logits.sub_(normaliser).exp_()
                error.scatter_add_(1, index, error.new_full(index.shape, -1.0))
                if slope is not None:
                    error *= slope
                gradients.append(error.to(weight_VH.dtype) @ weight_VH)
        ctx.save_for_backward(*([torch.cat(gradients)] if keep_gradient else []))
        return torch.cat(losses)

    @staticmethod
    def backward(ctx: Any, dloss_S: Tensor) -> tuple[Tensor, None, None, None, None]:
        (gradient_SH,) = ctx.saved_tensors
        return (gradient_SH * dloss_S[:, None].to(gradient_SH.dtype)), None, None, None, None


def token_losses(
    hidden_SH: Tensor,
    weight_VH: Tensor,
    targets_S: Tensor,
    *,
    bias_V: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Cross-entropy of every token: ``logsumexp(z) - z[target]`` with ``z = softcap(hidden @ weightᵀ + bias)``.

    The gradient towards ``hidden_SH`` is formed chunk by chunk in the forward pass, while the logits are there;
    the backward pass only scales it.

    Returns:
        ``[S]`` float32, nats.
    """
    if hidden_SH.shape[0] == 0:
        return hidden_SH.new_zeros(0, dtype=torch.float32)
    result: Tensor = _ChunkedTokenLoss.apply(hidden_SH, weight_VH, bias_V, targets_S, softcap)
    return result
