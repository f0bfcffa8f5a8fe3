"""Operations of a base model's layers in plain PyTorch, with the same rounding as transformers' own modules.

Shapes: ``M`` rows, ``H`` elements of a row; ``B`` rows of ``T`` tokens with ``N`` query heads, ``G`` key heads, ``D``
elements of a head; ``C`` tokens of a chunk of logits, ``V`` vocabulary.
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["NormKind", "cross_entropy", "rms_norm", "rotary", "swiglu"]


class NormKind(IntEnum):
    """The values that an RMS norm rounds to the dtype of its input.

    Attributes:
        ROUNDED: The normalised input, before it is multiplied by the weight (Llama, Qwen, Mistral).
        FLOAT32: Only the product (OLMo 2, Helium).
        ONE_PLUS: Only the product, of the normalised input and one plus the weight (Gemma).
    """

    ROUNDED = 0
    FLOAT32 = 1
    ONE_PLUS = 2


def rms_norm(x: Tensor, weight_H: Tensor, epsilon: float, kind: NormKind) -> Tensor:
    """Compute ``x / sqrt(mean(x²) + epsilon) · weight`` over the last dimension, in float32 or wider."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    if kind is NormKind.ROUNDED:
        return weight_H * normed.to(x.dtype)
    weight_H = weight_H.to(wide.dtype)
    return (normed * (1.0 + weight_H if kind is NormKind.ONE_PLUS else weight_H)).to(x.dtype)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Compute ``silu(gate) · up``; the activation is rounded before the product."""
    return F.silu(gate) * up


def rotary(q_BNTD: Tensor, k_BGTD: Tensor, cos_BTD: Tensor, sin_BTD: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys by the positions of their tokens: ``x cos + (-x2, x1) sin`` for heads ``x = (x1, x2)``.

    Computed in the wider of the two dtypes, then rounded to that of the input.

    Args:
        cos_BTD: Cosines of every token; a single row of tokens may serve all ``B``.
    """
    cos, sin = cos_BTD[:, None], sin_BTD[:, None]

    def rotated(x: Tensor) -> Tensor:
        x1, x2 = x.chunk(2, dim=-1)
        return (x * cos + torch.cat((-x2, x1), dim=-1) * sin).to(x.dtype)

    return rotated(q_BNTD), rotated(k_BGTD)


def cross_entropy(logits_CV: Tensor, targets_C: Tensor, gradient_CV: Tensor | None = None) -> Tensor:
    """Compute ``logsumexp(logits) - logits[target]`` of every token, ``[C]``, in float32 or wider.

    Args:
        gradient_CV: Overwritten with the gradient of every token's loss with respect to its logits; may be
            ``logits_CV``.
    """
    log_probabilities = F.log_softmax(logits_CV, dim=1, dtype=torch.promote_types(logits_CV.dtype, torch.float32))
    losses_C = log_probabilities.gather(1, targets_C[:, None]).squeeze(1).neg_()
    if gradient_CV is not None:
        gradient = log_probabilities.exp_()
        gradient.scatter_add_(1, targets_C[:, None], gradient.new_full((len(gradient), 1), -1.0))
        gradient_CV.copy_(gradient)
    return losses_C
