"""The gated product of an MLP, ``silu(gate) · up``, and its gradients, which recompute the activation."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["swiglu_backward_kernel", "swiglu_kernel"]


@triton.jit(do_not_specialize=["num_tokens"])
def swiglu_kernel(
    gate_TI,
    up_TI,
    y_TI,
    stride_gate_t,
    stride_up_t,
    width,
    num_tokens,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    ACCUMULATOR: tl.constexpr,
):
    """Compute the gated product. Grid: runs of ``ROWS`` tokens times blocks of ``BLOCK`` columns.

    Args:
        gate_TI: Rows of ``width`` adjacent elements, ``stride_gate_t`` apart.
        up_TI: Rows in the same form, ``stride_up_t`` apart.
        y_TI: Contiguous.
    """
    token, columns, is_inside = _block(width, num_tokens, ROWS, BLOCK)
    gate = tl.load(gate_TI + token * stride_gate_t + columns, mask=is_inside, other=0.0).to(ACCUMULATOR)
    up = tl.load(up_TI + token * stride_up_t + columns, mask=is_inside, other=0.0).to(ACCUMULATOR)
    activation = _rounded(gate * _sigmoid(gate), y_TI)
    tl.store(y_TI + token * width + columns, (activation * up).to(y_TI.dtype.element_ty), mask=is_inside)


@triton.jit(do_not_specialize=["num_tokens"])
def swiglu_backward_kernel(
    dy_TI,
    gate_TI,
    up_TI,
    dgate_TI,
    dup_TI,
    stride_dy_t,
    stride_gate_t,
    stride_up_t,
    width,
    num_tokens,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    ACCUMULATOR: tl.constexpr,
):
    """Compute both gradients, contiguous; grid and arguments are those of :func:`swiglu_kernel`."""
    token, columns, is_inside = _block(width, num_tokens, ROWS, BLOCK)
    dy = tl.load(dy_TI + token * stride_dy_t + columns, mask=is_inside, other=0.0).to(ACCUMULATOR)
    gate = tl.load(gate_TI + token * stride_gate_t + columns, mask=is_inside, other=0.0).to(ACCUMULATOR)
    up = tl.load(up_TI + token * stride_up_t + columns, mask=is_inside, other=0.0).to(ACCUMULATOR)
    sigmoid = _sigmoid(gate)
    dup = dy * _rounded(gate * sigmoid, dup_TI)
    dgate = _rounded(dy * up, dgate_TI) * (sigmoid * (1.0 + gate * (1.0 - sigmoid)))
    tl.store(dgate_TI + token * width + columns, dgate.to(dgate_TI.dtype.element_ty), mask=is_inside)
    tl.store(dup_TI + token * width + columns, dup.to(dup_TI.dtype.element_ty), mask=is_inside)


@triton.jit
def _block(width, num_tokens, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    blocks = tl.cdiv(width, BLOCK)
    columns = (tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK))[None, :]
    tokens = ((tl.program_id(0) // blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    return tokens, columns, (tokens < num_tokens) & (columns < width)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _rounded(x, like):
    """Return ``x`` after a round trip through the dtype of ``like``."""
    return x.to(like.dtype.element_ty).to(x.dtype)
