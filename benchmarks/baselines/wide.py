"""The ``wide`` baseline: one GEMM over the ranks of all adapters, masked to each token's own.

Few launches, but every token is multiplied with every adapter, in both products. LoRAFusion does so in the shrink only,
so times of this baseline are not LoRAFusion's.
"""

from __future__ import annotations

from collections.abc import Sequence

from baselines.stacked import JobTokens, Stack
from torch import Tensor

__all__ = ["add", "add_backward", "prepare", "rows_per_job"]


def rows_per_job(ranks: Sequence[int]) -> Sequence[int]:
    return ranks


def prepare(tokens: JobTokens, stack: Stack) -> Tensor:
    """``[T, Q]``: the scale of a token's own adapter in its columns, zero in all others."""
    mask_TQ = stack.a_QK.new_zeros(sum(tokens.lengths), stack.a_QK.shape[0])
    for job, scale, part in zip(tokens.jobs, tokens.scales, mask_TQ.split(tokens.lengths), strict=True):
        part[:, stack.rows[job]] = scale
    return mask_TQ


def add(x_TK: Tensor, y_TN: Tensor, stack: Stack, mask_TQ: Tensor) -> Tensor:
    s_TQ = (x_TK @ stack.a_QK.T).mul_(mask_TQ)
    y_TN.addmm_(s_TQ, stack.b_QN)
    return s_TQ


def add_backward(
    x_TK: Tensor, s_TQ: Tensor, dy_TN: Tensor, dx_TK: Tensor | None, stack: Stack, mask_TQ: Tensor
) -> None:
    ds_TQ = (dy_TN @ stack.b_QN.T).mul_(mask_TQ)
    if dx_TK is not None:
        dx_TK.addmm_(ds_TQ, stack.a_QK)
    stack.da_QK.addmm_(ds_TQ.T, x_TK)
    stack.db_QN.addmm_(s_TQ.T, dy_TN)
