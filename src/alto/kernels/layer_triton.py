"""The operations of :mod:`alto.kernels.layer_reference` as Triton kernels, each with one launch forward and one
backward.

The result for a token depends, bit for bit, only on that token: each sum is over one row, in an order that depends only
on the row's width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from alto.kernels.layer_reference import NormKind
from alto.kernels.triton_config import (
    MAX_NORM_WIDTH,
    KernelConfig,
    ceil_div,
    cross_entropy_config,
    launch,
    rms_norm_config,
    rotary_config,
    swiglu_config,
)
from alto.kernels.triton_kernels.layers import (
    cross_entropy_kernel,
    rms_norm_backward_kernel,
    rms_norm_kernel,
    rotary_kernel,
    swiglu_backward_kernel,
    swiglu_kernel,
)

__all__ = [
    "MAX_NORM_WIDTH",
    "cross_entropy",
    "rms_norm",
    "rms_norm_backward",
    "rotary",
    "swiglu",
    "swiglu_backward",
]


def rms_norm(x: Tensor, weight_H: Tensor, epsilon: float, kind: NormKind) -> Tensor:
    """See :func:`alto.kernels.layer_reference.rms_norm`; the result is contiguous."""
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
    """Return the gradient of :func:`rms_norm` with respect to ``x``, contiguous, with the same rounding as autograd."""
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


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """See :func:`alto.kernels.layer_reference.swiglu`; the result is contiguous."""
    gate_TI, up_TI = _rows(gate), _rows(up)
    y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    num_tokens, width = gate_TI.shape
    config = swiglu_config(width, gate.dtype)
    if num_tokens:
        launch(
            swiglu_kernel,
            (_tiles(num_tokens, width, config), 1, 1),
            (gate_TI, up_TI, y),
            (_distance(gate_TI), _distance(up_TI), width),
            config,
            (num_tokens,),
        )
    return y


def swiglu_backward(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of :func:`swiglu` with respect to both inputs, contiguous, with the same rounding as
    autograd."""
    dy_TI, gate_TI, up_TI = _rows(dy), _rows(gate), _rows(up)
    dgate, dup = (torch.empty(gate.shape, dtype=gate.dtype, device=gate.device) for _ in range(2))
    num_tokens, width = gate_TI.shape
    config = swiglu_config(width, gate.dtype)
    if num_tokens:
        launch(
            swiglu_backward_kernel,
            (_tiles(num_tokens, width, config), 1, 1),
            (dy_TI, gate_TI, up_TI, dgate, dup),
            (_distance(dy_TI), _distance(gate_TI), _distance(up_TI), width),
            config,
            (num_tokens,),
        )
    return dgate, dup


def rotary(
    q_BNTD: Tensor, k_BGTD: Tensor, cos_BTD: Tensor, sin_BTD: Tensor, *, is_backward: bool = False
) -> tuple[Tensor, Tensor]:
    """See :func:`alto.kernels.layer_reference.rotary`; in the results, the heads of a token are adjacent in memory.

    Args:
        cos_BTD: Cosines of every token; they need not repeat in the second half of a head.
        is_backward: Whether the first two arguments are gradients of the outputs; the results are then gradients of the
            inputs, with the same rounding as autograd.
    """
    num_rows, num_q, num_tokens, width = q_BNTD.shape
    num_k, half = k_BGTD.shape[1], width // 2
    outputs = [
        torch.empty(num_rows, num_tokens, heads, width, dtype=q_BNTD.dtype, device=q_BNTD.device)
        for heads in (num_q, num_k)
    ]
    q, k = _tokens(q_BNTD), _tokens(k_BGTD)
    cos, sin = (_rows(table.expand(num_rows, -1, -1)) for table in (cos_BTD, sin_BTD))
    config = rotary_config(width, max(num_q, num_k), q_BNTD.dtype)
    blocks = sum(ceil_div(heads, config.constants["HEADS"]) for heads in (num_q, num_k))
    if num_rows * num_tokens:
        launch(
            rotary_kernel,
            (ceil_div(num_rows * num_tokens, config.constants["ROWS"]) * blocks, 1, 1),
            (q, k, cos, sin, *outputs),
            (
                *(_distance(q), q.stride(1), _distance(k), k.stride(1), _distance(cos), _distance(sin)),
                *(num_q, num_k, half),
            ),
            config,
            (num_rows * num_tokens,),
            IS_BACKWARD=is_backward,
            IS_ROUNDED=is_backward or cos_BTD.dtype == q_BNTD.dtype,
        )
    q_out, k_out = (output.transpose(1, 2) for output in outputs)
    return q_out, k_out


def cross_entropy(logits_CV: Tensor, targets_C: Tensor, gradient_CV: Tensor | None = None) -> Tensor:
    """See :func:`alto.kernels.layer_reference.cross_entropy`."""
    assert logits_CV.stride(1) == 1
    assert gradient_CV is None or gradient_CV.stride(1) == 1
    exact = torch.promote_types(logits_CV.dtype, torch.float32)
    num_tokens, width = logits_CV.shape
    losses_C = torch.empty(num_tokens, dtype=exact, device=logits_CV.device)
    written_CV = logits_CV if gradient_CV is None else gradient_CV
    config = cross_entropy_config(width, logits_CV.dtype)
    if num_tokens:
        launch(
            cross_entropy_kernel,
            (ceil_div(num_tokens, config.constants["ROWS"]), 1, 1),
            (logits_CV, targets_C.contiguous(), losses_C, written_CV),
            (_distance(logits_CV), _distance(written_CV), width),
            config,
            (num_tokens,),
            HAS_GRADIENT=gradient_CV is not None,
        )
    return losses_C


def _tiles(num_rows: int, width: int, config: KernelConfig) -> int:
    return ceil_div(num_rows, config.constants["ROWS"]) * ceil_div(width, config.constants["BLOCK"])


def _tokens(x_BNTD: Tensor) -> Tensor:
    """Return ``[B · T, N, D]``, token by token in memory; a copy only if the input is not laid out this way."""
    x_BTND = x_BNTD.transpose(1, 2)
    if x_BTND.stride(3) != 1 or (x_BTND.shape[1] > 1 and x_BTND.stride(1) < x_BTND.stride(2)):
        x_BTND = x_BTND.contiguous()
    return x_BTND.flatten(0, 1)


def _rows(x: Tensor) -> Tensor:
    """Return ``x`` as rows ``[M, H]``, each contiguous; a copy only if the strides do not allow a view."""
    x_MH = x.reshape(-1, x.shape[-1])
    return x_MH if x_MH.stride(1) == 1 else x_MH.contiguous()


def _distance(x: Tensor) -> int:
    """Return the distance between two rows. A single row may have any stride, which would be compiled for; use its
    size."""
    return x.stride(0) if len(x) > 1 else x[0].numel()
