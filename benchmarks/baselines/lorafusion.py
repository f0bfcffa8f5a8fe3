"""The ``lorafusion`` baseline: LoRAFusion's fused kernels for several adapters, rebuilt.

LoRAFusion (arXiv 2510.00206, github.com/CentML/lorafusion) splits a layer with its adapters at the narrow tensors, and
fuses all operations that read or write a wide tensor into three kernels. A table maps each block of tokens to its
adapter:

1. ``y = x Wᵀ + scale_i · s B_i``: the frozen GEMM begins its sum with the adapter's part (``fused_linear``);

2. ``ds = scale_i · dy B_iᵀ`` and ``dB_i = scale_i · sᵀ dy``: one read of ``dy``, and both sums by atomic additions in
float32, so bits differ from run to run (``fused_narrow``);

3. ``dx = dy W + ds A_i``: like the first kernel (``fused_linear``).

It leaves ``s = x Aᵀ`` and ``dA = dsᵀ x`` to PyTorch. This baseline differs from the original in the following points,
to its advantage unless stated otherwise:

- The original takes four adapters per pass; here a pass may have any number. The original multiplies ``s`` with the
  ranks of all adapters in one GEMM and keeps each token's own, and computes ``dA`` adapter by adapter. With dozens of
  adapters, the first would multiply and the second would launch many times as much as with four, so PyTorch's grouped
  GEMM computes both.
- The original pads the tokens of every adapter to a multiple of its blocks, through the whole model. Here blocks begin
  at the adapter's first token, and only the kernels see an incomplete last block.
- The original tunes its tiles once per GPU, with blocks of 128 tokens. Here they are tuned once per shape
  (``lorafusion_triton``), with blocks of 64 or 128.
- Blocks and pointers go to the device once per pass, gradients are added in place, atomic additions are relaxed, the
  second kernel may take several tiles of ``dy``, and launches go through ALTO's shortened launcher.
- A disadvantage: the grouped GEMM needs a copy of ``A`` with padded ranks, and the original's version for passes of
  one adapter, which loads by TMA, is not rebuilt.
- No variant has dropout. Its parts (a kernel that stores mask and masked input, the mask in the third kernel) are left
  out, and so is the scheduler, which forms passes.

On a CPU ``lorafusion_torch`` computes the same as the kernels, for the gate; its times do not represent LoRAFusion.

Shapes: as in ``stacked``; ``R`` ranks that the kernels multiply, ``P`` rows of the stack that a pass has.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.baselines import grouped_mm
from benchmarks.baselines.lorafusion_pass import Segment, TokenBlocks
from benchmarks.baselines.stacked import BaseLayer, JobTokens, Stack

__all__ = ["FusedOps", "backward", "forward", "fused_ops", "is_supported", "prepare", "rows_per_job"]

_SMALLEST_RANK = 16
"""Smallest number of ranks that tensor cores multiply at a time."""


class FusedOps(Protocol):
    """The kernels; ``lorafusion_triton`` on a GPU, ``lorafusion_torch`` on a CPU."""

    def fused_linear(
        self,
        in_TC: Tensor,
        weight_CN: Tensor,
        bias_N: Tensor | None,
        narrow_TR: Tensor,
        lora_PN: Tensor,
        blocks: TokenBlocks,
        *,
        is_scaled: bool,
    ) -> Tensor:
        """Return ``in[i] weight + bias + scale_i · narrow[i] lora_i``, ``[T, N]``; without the scale unless
        ``is_scaled``.

        Columns of ``narrow_TR`` past a job's rank are undefined but finite.
        """

    def fused_narrow(self, dy_TN: Tensor, s_TR: Tensor, b_PN: Tensor, blocks: TokenBlocks) -> tuple[Tensor, Tensor]:
        """Return ``scale_i · dy[i] b_iᵀ``, ``[T, R]`` with zeros past a job's rank, and ``scale_i · s[i]ᵀ dy[i]``,
        ``[P, N]``; both in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pass:
    """The jobs of a pass, which are neighbours.

    Attributes:
        rows: Rows of the jobs in the stack.
        blocks: Tokens of the jobs, for the kernels.
        ends_J: End of the tokens of each job.
        padded_JR: Rows of ``A`` for each job, as many as the kernels multiply; rows past the job's own rank are
            undefined.
        own_P: Positions of a job's own rows in ``padded_JR``.
    """

    rows: slice
    blocks: TokenBlocks
    ends_J: Tensor
    padded_JR: Tensor
    own_P: Tensor


def is_supported(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether the kernels and PyTorch's grouped GEMM exist for ``dtype`` on ``device``."""
    has_kernels = device.type != "cuda" or find_spec("triton") is not None
    return has_kernels and grouped_mm.is_supported(device, dtype)


def fused_ops(device: torch.device) -> FusedOps:
    """Return the module of the kernels for ``device``; Triton is imported only if it is used."""
    ops: FusedOps = import_module(f"benchmarks.baselines.lorafusion_{'triton' if device.type == 'cuda' else 'torch'}")
    return ops


def rows_per_job(ranks: Sequence[int]) -> Sequence[int]:
    return ranks


def prepare(tokens: JobTokens, stack: Stack) -> _Pass:
    first, last = tokens.jobs[0], tokens.jobs[-1]
    assert tokens.jobs == tuple(range(first, last + 1)), "the jobs of a pass are neighbours"
    device = stack.a_QK.device
    own = [stack.rows[job] for job in tokens.jobs]
    ranks = [rows.stop - rows.start for rows in own]
    num_ranks = max(_SMALLEST_RANK, 1 << (max(ranks) - 1).bit_length())
    start = own[0].start
    ends = list(itertools.accumulate(tokens.lengths))
    segments = [
        Segment(first=end - length, length=length, row=rows.start - start, rank=rank, scale=scale)
        for end, length, rows, rank, scale in zip(ends, tokens.lengths, own, ranks, tokens.scales, strict=True)
    ]
    padded = [rows.start + min(r, rank - 1) for rows, rank in zip(own, ranks, strict=True) for r in range(num_ranks)]
    places = [job * num_ranks + r for job, rank in enumerate(ranks) for r in range(rank)]
    return _Pass(
        rows=slice(start, own[-1].stop),
        blocks=TokenBlocks(segments, num_ranks=num_ranks, device=device),
        ends_J=torch.tensor(ends, dtype=torch.int32).to(device, non_blocking=True),
        padded_JR=torch.tensor(padded).to(device, non_blocking=True),
        own_P=torch.tensor(places).to(device, non_blocking=True),
    )


def forward(x_TK: Tensor, base: BaseLayer, stack: Stack, part: _Pass) -> tuple[Tensor, Tensor]:
    a_JRK = stack.a_QK.index_select(0, part.padded_JR).unflatten(0, (len(part.ends_J), -1))
    s_TR = F.grouped_mm(x_TK, a_JRK.transpose(1, 2), offs=part.ends_J)
    ops = fused_ops(x_TK.device)
    b_PN = stack.b_QN[part.rows]
    y_TN = ops.fused_linear(x_TK, base.weight_NK.T, base.bias_N, s_TR, b_PN, part.blocks, is_scaled=True)
    return y_TN, s_TR


def backward(
    dy_TN: Tensor, x_TK: Tensor, s_TR: Tensor, base: BaseLayer, stack: Stack, part: _Pass, *, needs_dx: bool
) -> Tensor | None:
    ops = fused_ops(x_TK.device)
    ds_TR, db_PN = ops.fused_narrow(dy_TN, s_TR, stack.b_QN[part.rows], part.blocks)
    stack.db_QN[part.rows].add_(db_PN)
    ds_TR = ds_TR.to(dy_TN.dtype)
    da_JRK = F.grouped_mm(ds_TR.T, x_TK, offs=part.ends_J)
    stack.da_QK[part.rows].add_(da_JRK.flatten(0, 1).index_select(0, part.own_P))
    if not needs_dx:
        return None
    a_PK = stack.a_QK[part.rows]
    return ops.fused_linear(dy_TN, base.weight_NK, None, ds_TR, a_PK, part.blocks, is_scaled=False)
