"""Kernels of a decoder layer: RMS norm, SwiGLU, rotary embeddings, cross entropy."""

from __future__ import annotations

import triton
import triton.language as tl

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
    activation = _rounded_product(gate * _sigmoid(gate), y_TI)
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
    dup = dy * _rounded_product(gate * sigmoid, dup_TI)
    dgate = _rounded_product(dy * up, dgate_TI) * (sigmoid * (1.0 + gate * (1.0 - sigmoid)))
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
def _rounded_product(x, like):
    """Return ``x`` after a round trip through the dtype of ``like``."""
    return x.to(like.dtype.element_ty).to(x.dtype)


@triton.jit(do_not_specialize=["num_tokens"])
def rotary_kernel(
    q_TND,
    k_TGD,
    cos_TD,
    sin_TD,
    q_out_TND,
    k_out_TGD,
    stride_q_t,
    stride_q_n,
    stride_k_t,
    stride_k_g,
    stride_cos_t,
    stride_sin_t,
    num_q,
    num_k,
    half,
    num_tokens,
    IS_BACKWARD: tl.constexpr,
    IS_ROUNDED: tl.constexpr,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    ACCUMULATOR: tl.constexpr,
):
    """Compute ``x cos + (-x2, x1) sin`` for heads ``x = (x1, x2)``, or in the backward pass the gradient with respect
    to ``x``.

    In the backward pass, ``q_TND`` and ``k_TGD`` are the gradients of the outputs. Grid: runs of ``ROWS`` tokens times
    blocks of ``HEADS`` heads, query heads first.

    Args:
        q_TND: ``num_q`` heads per token, each of ``2 · half`` adjacent elements.
        k_TGD: ``num_k`` heads per token, in the same form.
        cos_TD, sin_TD: Adjacent values for every token.
        q_out_TND, k_out_TGD: Contiguous.
        IS_ROUNDED: Whether the two products are rounded to the dtype of the output before they are added.
        BLOCK: A power of two, at least ``half``.
    """
    blocks_q, blocks_k = tl.cdiv(num_q, HEADS), tl.cdiv(num_k, HEADS)
    blocks = blocks_q + blocks_k
    block = tl.program_id(0) % blocks
    tokens = ((tl.program_id(0) // blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None, None]
    columns = tl.arange(0, BLOCK)[None, None, :]
    is_inside = (tokens < num_tokens) & (columns < half)
    cos, sin = cos_TD + tokens * stride_cos_t + columns, sin_TD + tokens * stride_sin_t + columns
    cos1 = tl.load(cos, mask=is_inside, other=0.0).to(ACCUMULATOR)
    cos2 = tl.load(cos + half, mask=is_inside, other=0.0).to(ACCUMULATOR)
    sin1 = tl.load(sin, mask=is_inside, other=0.0).to(ACCUMULATOR)
    sin2 = tl.load(sin + half, mask=is_inside, other=0.0).to(ACCUMULATOR)
    if IS_BACKWARD:
        # In the gradient, each sine applies to the other half, with the opposite sign.
        sin1, sin2 = -sin2, -sin1
    if block < blocks_q:
        heads = (block * HEADS + tl.arange(0, HEADS))[None, :, None]
        _rotate(
            q_TND + tokens * stride_q_t + heads * stride_q_n + columns,
            q_out_TND + (tokens * num_q + heads) * 2 * half + columns,
            (heads < num_q) & is_inside,
            cos1,
            cos2,
            sin1,
            sin2,
            half,
            IS_ROUNDED,
        )
    else:
        heads = ((block - blocks_q) * HEADS + tl.arange(0, HEADS))[None, :, None]
        _rotate(
            k_TGD + tokens * stride_k_t + heads * stride_k_g + columns,
            k_out_TGD + (tokens * num_k + heads) * 2 * half + columns,
            (heads < num_k) & is_inside,
            cos1,
            cos2,
            sin1,
            sin2,
            half,
            IS_ROUNDED,
        )


@triton.jit
def _rotate(x, out, is_inside, cos1, cos2, sin1, sin2, half, IS_ROUNDED: tl.constexpr):
    x1 = tl.load(x, mask=is_inside, other=0.0).to(cos1.dtype)
    x2 = tl.load(x + half, mask=is_inside, other=0.0).to(cos1.dtype)
    along1, across1, along2, across2 = x1 * cos1, x2 * sin1, x2 * cos2, x1 * sin2
    if IS_ROUNDED:
        along1, across1 = _rounded_rotation(along1, out), _rounded_rotation(across1, out)
        along2, across2 = _rounded_rotation(along2, out), _rounded_rotation(across2, out)
    tl.store(out, (along1 - across1).to(out.dtype.element_ty), mask=is_inside)
    tl.store(out + half, (along2 + across2).to(out.dtype.element_ty), mask=is_inside)


@triton.jit
def _rounded_rotation(x, like):
    return x.to(like.dtype.element_ty).to(x.dtype)


@triton.jit(do_not_specialize=["num_tokens"])
def cross_entropy_kernel(
    logits_CV,
    targets_C,
    losses_C,
    gradient_CV,
    stride_c,
    stride_gradient_c,
    width,
    num_tokens,
    HAS_GRADIENT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    ACCUMULATOR: tl.constexpr,
):
    """Compute ``losses = logsumexp(logits) - logits[target]`` and its gradient. Grid: runs of ``ROWS`` tokens.

    Args:
        logits_CV: Read once for the loss, and once more for the gradient.
        targets_C: int64.
        gradient_CV: May be ``logits_CV`` itself; any tensor without ``HAS_GRADIENT``.
    """
    tokens = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_token = tokens < num_tokens
    logits_V = logits_CV + (tokens * stride_c)[:, None]
    targets = tl.load(targets_C + tokens, mask=is_token, other=0)
    at_targets = tl.load(logits_CV + tokens * stride_c + targets, mask=is_token, other=0.0).to(ACCUMULATOR)
    totals = tl.full((ROWS,), 0.0, ACCUMULATOR)
    highest = tl.full((ROWS,), -float("inf"), ACCUMULATOR)
    for first in range(0, width, BLOCK):
        columns = (first + tl.arange(0, BLOCK))[None, :]
        is_inside = is_token[:, None] & (columns < width)
        logits = tl.load(logits_V + columns, mask=is_inside, other=-float("inf")).to(ACCUMULATOR)
        next_highest = tl.maximum(highest, tl.max(logits, axis=1))
        # If all logits so far are -inf, any finite reference works.
        reference = tl.where(next_highest == -float("inf"), 0.0, next_highest)
        totals = totals * tl.exp(highest - reference) + tl.sum(tl.exp(logits - reference[:, None]), axis=1)
        highest = next_highest
    # Rows past the last token get 0.
    log_totals = tl.where(is_token, highest, 0.0) + tl.log(tl.where(is_token, totals, 1.0))
    tl.store(losses_C + tokens, log_totals - at_targets, mask=is_token)
    if HAS_GRADIENT:
        gradient_V = gradient_CV + (tokens * stride_gradient_c)[:, None]
        # Make sure that all threads have read the target's logit before any thread overwrites it with a gradient.
        tl.debug_barrier()
        for first in range(0, width, BLOCK):
            columns = (first + tl.arange(0, BLOCK))[None, :]
            is_inside = is_token[:, None] & (columns < width)
            logits = tl.load(logits_V + columns, mask=is_inside, other=0.0).to(ACCUMULATOR)
            gradient = tl.exp(logits - log_totals[:, None]) - tl.where(columns == targets[:, None], 1.0, 0.0)
            tl.store(gradient_V + columns, gradient.to(gradient_CV.dtype.element_ty), mask=is_inside)
