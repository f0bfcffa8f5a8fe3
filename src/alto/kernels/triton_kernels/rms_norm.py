"""RMS norms of a frozen base, forward and backward; whole rows stay in registers, and are read and written once."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["FLOAT32", "ONE_PLUS", "ROUNDED", "rms_norm_backward_kernel", "rms_norm_kernel"]

ROUNDED, FLOAT32, ONE_PLUS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""The values of :class:`alto.kernels.layer_reference.NormKind`."""


@triton.jit(do_not_specialize=["num_rows"])
def rms_norm_kernel(
    x_MH,
    weight_H,
    y_MH,
    stride_m,
    width,
    num_rows,
    KIND: tl.constexpr,
    EPSILON: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    ACCUMULATOR: tl.constexpr,
):
    """Compute RMS norms. Grid: runs of ``ROWS`` rows.

    Args:
        x_MH: Rows of ``width`` adjacent elements, ``stride_m`` apart.
        y_MH: Contiguous.
        KIND: The rounding; see :class:`alto.kernels.layer_reference.NormKind`.
        BLOCK: A power of two, at least ``width``.
    """
    rows, columns, is_inside = _tile(width, num_rows, ROWS, BLOCK)
    x = tl.load(x_MH + rows * stride_m + columns, mask=is_inside, other=0.0).to(ACCUMULATOR)
    weight = tl.load(weight_H + columns, mask=columns < width, other=0.0).to(ACCUMULATOR)
    x *= _inverse_rms(x, width, EPSILON)
    if KIND == ROUNDED:
        x = x.to(y_MH.dtype.element_ty).to(ACCUMULATOR)
    if KIND == ONE_PLUS:
        weight += 1.0
    tl.store(y_MH + rows * width + columns, (x * weight).to(y_MH.dtype.element_ty), mask=is_inside)


@triton.jit(do_not_specialize=["num_rows"])
def rms_norm_backward_kernel(
    dy_MH,
    x_MH,
    weight_H,
    dx_MH,
    stride_dy_m,
    stride_m,
    width,
    num_rows,
    KIND: tl.constexpr,
    EPSILON: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    ACCUMULATOR: tl.constexpr,
):
    """Compute the gradient with respect to ``x_MH``.

    The root mean squares are recomputed, because ``x_MH`` is read anyway. Grid and arguments are those of
    :func:`rms_norm_kernel`.
    """
    rows, columns, is_inside = _tile(width, num_rows, ROWS, BLOCK)
    x = tl.load(x_MH + rows * stride_m + columns, mask=is_inside, other=0.0).to(ACCUMULATOR)
    inverse = _inverse_rms(x, width, EPSILON)
    x *= inverse
    weight = tl.load(weight_H + columns, mask=columns < width, other=0.0).to(ACCUMULATOR)
    if KIND == ONE_PLUS:
        weight += 1.0
    gradient = tl.load(dy_MH + rows * stride_dy_m + columns, mask=is_inside, other=0.0).to(ACCUMULATOR) * weight
    if KIND == ROUNDED:
        gradient = gradient.to(dx_MH.dtype.element_ty).to(ACCUMULATOR)
    mean = tl.sum(gradient * x, axis=1)[:, None] / width
    dx = (gradient - x * mean) * inverse
    tl.store(dx_MH + rows * width + columns, dx.to(dx_MH.dtype.element_ty), mask=is_inside)


@triton.jit
def _tile(width, num_rows, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    rows = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    columns = tl.arange(0, BLOCK)[None, :]
    return rows, columns, (rows < num_rows) & (columns < width)


@triton.jit
def _inverse_rms(x, width, EPSILON: tl.constexpr):
    return tl.rsqrt(tl.sum(x * x, axis=1)[:, None] / width + EPSILON)
