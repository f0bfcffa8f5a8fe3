"""Operations of a base model's layers in plain PyTorch, with the roundings of transformers' own modules.

Shapes: ``M`` rows, ``H`` numbers of a row.
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

__all__ = ["NormKind", "rms_norm"]


class NormKind(IntEnum):
    """What an RMS norm rounds to the dtype of its input, and when.

    Attributes:
        ROUNDED: The normalised input, before it is multiplied by the weight (Llama, Qwen, Mistral).
        FLOAT32: The product alone (OLMo 2, Helium).
        ONE_PLUS: The product alone, of the normalised input and one plus the weight (Gemma).
    """

    ROUNDED = 0
    FLOAT32 = 1
    ONE_PLUS = 2


def rms_norm(x: Tensor, weight_H: Tensor, epsilon: float, kind: NormKind) -> Tensor:
    """``x / sqrt(mean(x²) + epsilon) · weight`` over the last dimension, computed in float32 or wider.

    Args:
        x: ``[..., H]``.
        weight_H: Of the dtype of ``x``.
        epsilon: Added to the mean.
        kind: What is rounded when.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    if kind is NormKind.ROUNDED:
        return weight_H * normed.to(x.dtype)
    weight_H = weight_H.to(wide.dtype)
    return (normed * (1.0 + weight_H if kind is NormKind.ONE_PLUS else weight_H)).to(x.dtype)
