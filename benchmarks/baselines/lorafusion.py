"""The ``lorafusion`` baseline: LoRAFusion's fused kernels for several adapters, rebuilt.

LoRAFusion (arXiv 2510.00206, github.com/CentML/lorafusion) divides a layer and its adapters at the narrow tensors, and
fuses what reads or writes a wide one into three kernels. A table says which adapter each block of tokens belongs to:

1. ``y = x Wᵀ + scale_i · s B_i``: the frozen GEMM begins its sum with the adapter's part (``fused_linear``);
2. ``ds = scale_i · dy B_iᵀ`` and ``dB_i = scale_i · sᵀ dy``: one reading of ``dy``, both sums by atomic additions in
   float32, so that bits differ from run to run (``fused_narrow``);
3. ``dx = dy W + ds A_i``: as the first (``fused_linear``).

``s = x Aᵀ`` and ``dA = dsᵀ x`` it leaves to PyTorch. Different from the original, in its favour unless said otherwise:

- It takes four adapters in a pass; here as many as the pass has. It multiplies ``s`` with the ranks of all of them in
  one GEMM and keeps a token's own, and ``dA`` adapter by adapter. With dozens of adapters the one would multiply, the
  other launch, many times as much as with four, so PyTorch's grouped GEMM does both.
- It fills the tokens of every adapter up to a multiple of its blocks, through the whole model. Here a block begins
  where the adapter's tokens do: the last is filled in the kernels alone.
- Its tiles are tuned once for a GPU, with blocks of 128 tokens there; here once for a shape (``lorafusion_triton``),
  with blocks of 64 or 128.
- Blocks and pointers go to the device once a pass, gradients are added in place, atomic additions are relaxed, the
  second kernel may take several tiles of ``dy``, launches go through ALTO's shortened launcher.
- Against it: the grouped GEMM needs a copy of ``A`` with padded ranks, and the original's version for passes of one
  adapter, which loads by TMA, is not rebuilt.
- No dropout: no variant has any. What it needs (a kernel that stores mask and masked input, the mask in the third
  kernel) is left out; so is the scheduler, which forms passes.

On a CPU ``lorafusion_torch`` does what the kernels do, for the gate; its times say nothing of LoRAFusion.

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
"""Tensor cores multiply no fewer ranks at a time."""


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
        """``in[i] weight + bias + scale_i · narrow[i] lora_i``, ``[T, N]``; without the scale unless ``is_scaled``.

        Columns of ``narrow_TR`` past a job's rank are finite, whatever they are.
        """

    def fused_narrow(self, dy_TN: Tensor, s_TR: Tensor, b_PN: Tensor, blocks: TokenBlocks) -> tuple[Tensor, Tensor]:
        """``scale_i · dy[i] b_iᵀ``, ``[T, R]`` with zeros past a job's rank, and ``scale_i · s[i]ᵀ dy[i]``, ``[P, N]``;
        both in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pass:
    """The jobs of a pass, which are neighbours.

    Attributes:
        rows: Theirs in the stack.
        blocks: Their tokens, for the kernels.
        ends_J: Where the tokens of each job end.
        padded_JR: Rows of ``A`` for each job, as many as the kernels multiply; past its own rank they are any.
        own_P: Where a job's own rows are in ``padded_JR``.
    """

    rows: slice
    blocks: TokenBlocks
    ends_J: Tensor
    padded_JR: Tensor
    own_P: Tensor


def is_supported(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether there are the kernels, and PyTorch's grouped GEMM for ``dtype`` on ``device``."""
    has_kernels = device.type != "cuda" or find_spec("triton") is not None
    return has_kernels and grouped_mm.is_supported(device, dtype)


def fused_ops(device: torch.device) -> FusedOps:
    """The kernels' module for ``device``; Triton is imported where it is used."""
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
