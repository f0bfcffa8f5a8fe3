"""The computations of ``lorafusion``'s kernels in PyTorch: job by job instead of block by block."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.baselines.lorafusion_pass import TokenBlocks

__all__ = ["fused_linear", "fused_narrow"]


def fused_linear(
    in_TC: Tensor,
    weight_CN: Tensor,
    bias_N: Tensor | None,
    narrow_TR: Tensor,
    lora_PN: Tensor,
    blocks: TokenBlocks,
    *,
    is_scaled: bool,
) -> Tensor:
    out_TN = in_TC @ weight_CN if bias_N is None else torch.addmm(bias_N, in_TC, weight_CN)
    for segment in blocks.segments:
        tokens, rows = (
            slice(segment.first, segment.first + segment.length),
            slice(segment.row, segment.row + segment.rank),
        )
        scale = segment.scale if is_scaled else 1.0
        out_TN[tokens].addmm_(narrow_TR[tokens, : segment.rank], lora_PN[rows], alpha=scale)
    return out_TN


def fused_narrow(dy_TN: Tensor, s_TR: Tensor, b_PN: Tensor, blocks: TokenBlocks) -> tuple[Tensor, Tensor]:
    ds_TR = torch.zeros(dy_TN.shape[0], blocks.num_ranks, dtype=torch.float32, device=dy_TN.device)
    db_PN = torch.zeros(b_PN.shape, dtype=torch.float32, device=dy_TN.device)
    for segment in blocks.segments:
        tokens, rows = (
            slice(segment.first, segment.first + segment.length),
            slice(segment.row, segment.row + segment.rank),
        )
        ds_TR[tokens, : segment.rank] = (dy_TN[tokens] @ b_PN[rows].T) * segment.scale
        db_PN[rows] = (s_TR[tokens, : segment.rank].T @ dy_TN[tokens]) * segment.scale
    return ds_TR, db_PN
