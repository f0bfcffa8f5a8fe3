"""The ``grouped_mm`` baseline: PyTorch's grouped GEMM, which was made for mixtures of experts.

There is one launch for all adapters, but all must have one shape, so every adapter is padded to the largest rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

from benchmarks.baselines.stacked import JobTokens, Stack

__all__ = ["add", "add_backward", "is_supported", "prepare", "rows_per_job"]


class _Groups(NamedTuple):
    """The end of each job's tokens, the scale of every token, and the jobs; jobs without tokens are left out."""

    ends_J: Tensor
    scales_T1: Tensor
    jobs: slice


def is_supported(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether PyTorch has the grouped GEMM for ``dtype`` on ``device``, by calling it."""
    x_TK, w_ZKN = torch.ones(16, 16, device=device, dtype=dtype), torch.ones(2, 16, 16, device=device, dtype=dtype)
    try:
        grouped_mm(x_TK, w_ZKN, offs=torch.tensor([7, 16], device=device, dtype=torch.int32))
    except (RuntimeError, NotImplementedError):
        return False
    return True


def rows_per_job(ranks: Sequence[int]) -> Sequence[int]:
    return [max(ranks)] * len(ranks)


def prepare(tokens: JobTokens, stack: Stack) -> _Groups:
    jobs = slice(tokens.jobs[0], tokens.jobs[-1] + 1)
    assert tokens.jobs == tuple(range(jobs.start, jobs.stop)), "the jobs of a pass are neighbours"
    device = stack.a_QK.device
    lengths_J = torch.tensor(tokens.lengths)
    scales_J = torch.tensor(tokens.scales, dtype=stack.a_QK.dtype)
    return _Groups(
        lengths_J.cumsum(0).to(torch.int32).to(device, non_blocking=True),
        scales_J.repeat_interleave(lengths_J)[:, None].to(device, non_blocking=True),
        jobs,
    )


def add(x_TK: Tensor, y_TN: Tensor, stack: Stack, groups: _Groups) -> Tensor:
    a_JRK, b_JRN = (_by_job(rows, stack, groups) for rows in (stack.a_QK, stack.b_QN))
    s_TR = grouped_mm(x_TK, a_JRK.transpose(1, 2), offs=groups.ends_J).mul_(groups.scales_T1)
    y_TN += grouped_mm(s_TR, b_JRN, offs=groups.ends_J)
    return s_TR


def add_backward(
    x_TK: Tensor, s_TR: Tensor, dy_TN: Tensor, dx_TK: Tensor | None, stack: Stack, groups: _Groups
) -> None:
    a_JRK, b_JRN, da_JRK, db_JRN = (
        _by_job(rows, stack, groups) for rows in (stack.a_QK, stack.b_QN, stack.da_QK, stack.db_QN)
    )
    ds_TR = grouped_mm(dy_TN, b_JRN.transpose(1, 2), offs=groups.ends_J).mul_(groups.scales_T1)
    if dx_TK is not None:
        dx_TK += grouped_mm(ds_TR, a_JRK, offs=groups.ends_J)
    da_JRK += grouped_mm(ds_TR.T, x_TK, offs=groups.ends_J)
    db_JRN += grouped_mm(s_TR.T, dy_TN, offs=groups.ends_J)


def _by_job(rows_Q: Tensor, stack: Stack, groups: _Groups) -> Tensor:
    return rows_Q.unflatten(0, (stack.num_jobs, -1))[groups.jobs]
