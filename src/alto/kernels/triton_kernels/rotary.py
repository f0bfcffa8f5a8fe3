"""Rotary position embeddings, forward and backward; queries and keys share one launch."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["rotary_kernel"]


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
        along1, across1 = _rounded(along1, out), _rounded(across1, out)
        along2, across2 = _rounded(along2, out), _rounded(across2, out)
    tl.store(out, (along1 - across1).to(out.dtype.element_ty), mask=is_inside)
    tl.store(out + half, (along2 + across2).to(out.dtype.element_ty), mask=is_inside)


@triton.jit
def _rounded(x, like):
    return x.to(like.dtype.element_ty).to(x.dtype)
