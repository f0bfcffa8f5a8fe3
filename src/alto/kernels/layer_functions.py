"""The Triton kernels of :mod:`alto.kernels.layer_triton` as autograd functions. Weights are frozen and get no gradient.

Import this module only if Triton is the backend (:func:`alto.kernels.layer_functions_on`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from alto.kernels import layer_triton
from alto.kernels.layer_reference import NormKind
from alto.kernels.layer_triton import MAX_NORM_WIDTH

__all__ = ["MAX_NORM_WIDTH", "cross_entropy", "rms_norm", "rotary", "swiglu"]

cross_entropy = layer_triton.cross_entropy
"""The kernel itself, without autograd, because it writes its own gradient."""


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
    """See :func:`alto.kernels.layer_reference.rms_norm`; of the activations, only ``x`` is kept for the backward
    pass."""
    y: Tensor = _RmsNorm.apply(x, weight_H, epsilon, kind)
    return y


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return layer_triton.swiglu(gate, up)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        return layer_triton.swiglu_backward(dy, *ctx.saved_tensors)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """See :func:`alto.kernels.layer_reference.swiglu`; the backward pass recomputes the activation."""
    y: Tensor = _Swiglu.apply(gate, up)
    return y


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        return layer_triton.rotary(q, k, cos, sin)

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Tensor | None, ...]:
        return *layer_triton.rotary(dq, dk, *ctx.saved_tensors, is_backward=True), None, None


def rotary(q_BNTD: Tensor, k_BGTD: Tensor, cos_BTD: Tensor, sin_BTD: Tensor) -> tuple[Tensor, Tensor]:
    """See :func:`alto.kernels.layer_reference.rotary`; neither queries nor keys are kept for the backward pass."""
    rotated: tuple[Tensor, Tensor] = _Rotary.apply(q_BNTD, k_BGTD, cos_BTD, sin_BTD)
    return rotated
