"""The Triton kernels of :mod:`alto.kernels.layer_triton` in autograd. Weights are frozen: they get no gradient.

Import it where Triton is the backend (:func:`alto.kernels.layer_functions_on`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from alto.kernels import layer_triton
from alto.kernels.layer_reference import NormKind
from alto.kernels.layer_triton import MAX_NORM_WIDTH

__all__ = ["MAX_NORM_WIDTH", "rms_norm"]


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_H: Tensor, epsilon: float, kind: NormKind) -> Tensor:
        ctx.save_for_backward(x, weight_H)
        ctx.epsilon, ctx.kind = epsilon, kind
        return layer_triton.rms_norm(x, weight_H, epsilon, kind)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_H = ctx.saved_tensors
        return layer_triton.rms_norm_backward(dy, x, weight_H, ctx.epsilon, ctx.kind), None, None, None


def rms_norm(x: Tensor, weight_H: Tensor, epsilon: float, kind: NormKind) -> Tensor:
    """See :func:`alto.kernels.layer_reference.rms_norm`; for the backward pass it keeps ``x`` alone."""
    y: Tensor = _RmsNorm.apply(x, weight_H, epsilon, kind)
    return y
