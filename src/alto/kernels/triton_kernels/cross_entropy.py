"""The loss of every token of a chunk of logits, and its gradient, which may overwrite the logits."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["cross_entropy_kernel"]


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
