"""The operations of :mod:`alto.kernels.layer_reference` as Triton kernels, each of them one launch forward and one
backward.

What an operation gives for a token depends on that token alone, to the bit: sums are over one row, in an order that its
width decides.
"""

from __future__ import annotations

import torch
from torch import Tensor

from alto.kernels.layer_reference import NormKind
from alto.kernels.triton_config import MAX_NORM_WIDTH, rms_norm_config
from alto.kernels.triton_kernels.rms_norm import rms_norm_backward_kernel, rms_norm_kernel
from alto.kernels.triton_launch import ceil_div, launch

__all__ = ["MAX_NORM_WIDTH", "rms_norm", "rms_norm_backward"]


def rms_norm(x: Tensor, weight_H: Tensor, epsilon: float, kind: NormKind) -> Tensor:
    """See :func:`alto.kernels.layer_reference.rms_norm`; contiguous."""
    x_MH = _rows(x)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    num_rows, width = x_MH.shape
    config = rms_norm_config(width, x.dtype)
    if num_rows:
        launch(
            rms_norm_kernel,
            (ceil_div(num_rows, config.constants["ROWS"]), 1, 1),
            (x_MH, weight_H, y),
            (_distance(x_MH), width),
            config,
            (num_rows,),
            KIND=int(kind),
            EPSILON=epsilon,
        )
    return y


def rms_norm_backward(dy: Tensor, x: Tensor, weight_H: Tensor, epsilon: float, kind: NormKind) -> Tensor:
    """The gradient towards ``x`` of :func:`rms_norm`, with the roundings of autograd; contiguous."""
    dy_MH, x_MH = _rows(dy), _rows(x)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    num_rows, width = x_MH.shape
    config = rms_norm_config(width, x.dtype)
    if num_rows:
        launch(
            rms_norm_backward_kernel,
            (ceil_div(num_rows, config.constants["ROWS"]), 1, 1),
            (dy_MH, x_MH, weight_H, dx),
            (_distance(dy_MH), _distance(x_MH), width),
            config,
            (num_rows,),
            KIND=int(kind),
            EPSILON=epsilon,
        )
    return dx


def _rows(x: Tensor) -> Tensor:
    """``x`` as rows ``[M, H]``, the numbers of a row next to each other; a copy only where strides do not allow it."""
    x_MH = x.reshape(-1, x.shape[-1])
    return x_MH if x_MH.stride(1) == 1 else x_MH.contiguous()


def _distance(x_MH: Tensor) -> int:
    """Of two rows. Of one row alone it is arbitrary, and each would be compiled for."""
    return x_MH.stride(0) if len(x_MH) > 1 else x_MH.shape[1]
