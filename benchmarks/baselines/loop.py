"""The ``loop`` baseline: every adapter's own small GEMMs, one after the other in each layer, as in mLoRA.

It is plain PyTorch, as fast as it can be written: GEMMs apply the scales, and results are added in place.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from benchmarks.baselines.stacked import JobTokens, Stack

__all__ = ["add", "add_backward", "prepare", "rows_per_job"]


def rows_per_job(ranks: Sequence[int]) -> Sequence[int]:
    return ranks


def prepare(tokens: JobTokens, stack: Stack) -> JobTokens:
    return tokens


def add(x_TK: Tensor, y_TN: Tensor, stack: Stack, tokens: JobTokens) -> list[Tensor]:
    saved = []
    parts = zip(tokens.jobs, tokens.scales, x_TK.split(tokens.lengths), y_TN.split(tokens.lengths), strict=True)
    for job, scale, x, y in parts:
        s = x @ stack.a_QK[stack.rows[job]].T
        y.addmm_(s, stack.b_QN[stack.rows[job]], alpha=scale)
        saved.append(s)
    return saved


def add_backward(
    x_TK: Tensor, saved: list[Tensor], dy_TN: Tensor, dx_TK: Tensor | None, stack: Stack, tokens: JobTokens
) -> None:
    dx_parts = dx_TK.split(tokens.lengths) if dx_TK is not None else [None] * len(tokens.jobs)
    parts = zip(
        tokens.jobs,
        tokens.scales,
        x_TK.split(tokens.lengths),
        saved,
        dy_TN.split(tokens.lengths),
        dx_parts,
        strict=True,
    )
    for job, scale, x, s, dy, dx in parts:
        rows = stack.rows[job]
        ds = torch.mm(dy, stack.b_QN[rows].T)
        if dx is not None:
            dx.addmm_(ds, stack.a_QK[rows], alpha=scale)
        stack.da_QK[rows].addmm_(ds.T, x, alpha=scale)
        stack.db_QN[rows].addmm_(s.T, dy, alpha=scale)
