"""How each kernel is compiled: tiles, warps and pipeline stages, from shapes and dtypes that never change in a task.

A fixed table instead of autotuning. The choice depends on the largest rank of the bank and on two dtypes, not on the
number of tokens nor on ``K`` and ``N``, which only set how many tiles there are. So every step runs what the first one
compiled, the same task gives the same bits on every run, and all that can ever run is known ahead: it is compiled
without a GPU by ``tools/compile_kernels.py``, and ``docs/kernels-compiled.md`` records what it takes.

One table for all GPUs from sm_80 on: every configuration fits the 99 KiB of shared memory that the smallest of them
gives to a program.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from alto.kernels.pass_table import BLOCK_TOKENS

__all__ = ["ADAMW_BLOCK", "KernelConfig", "adamw_config", "backward_weight_config", "expand_config", "shrink_config"]

ADAMW_BLOCK = 1024
"""Columns that one program of the optimizer updates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelConfig:
    """What a kernel is specialised for."""

    constants: dict[str, Any]
    num_warps: int
    num_stages: int

    @property
    def arguments(self) -> dict[str, Any]:
        """As keyword arguments of a launch."""
        return {**self.constants, **self.options}

    @property
    def options(self) -> dict[str, Any]:
        """What the compiler is told besides the constants.

        Fused multiply-add by name, because Triton's default changes between versions, and with it the bits.
        """
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": True}


def shrink_config(max_rank: int, wide: torch.dtype, bank: torch.dtype, *, scaled: bool) -> KernelConfig:
    """Of ``shrink_kernel``, for tokens of dtype ``wide`` and adapters of dtype ``bank``.

    The wide side is read once and decides the time; many of its bytes must be on their way at once.
    """
    rank_tile = _rank_tile(max_rank, largest=128)
    block_w = 256 // wide.itemsize if rank_tile < 64 else 32
    stages = 4 if rank_tile == 64 else 3
    return _product(rank_tile, block_w, wide, bank, scaled=scaled, num_warps=4, num_stages=stages)


def expand_config(max_rank: int, wide: torch.dtype, bank: torch.dtype, *, scaled: bool) -> KernelConfig:
    """Of ``expand_kernel``. Up to its tile of ranks the loop has one turn; there is little to pipeline."""
    rank_tile = _rank_tile(max_rank, largest=64 if wide.itemsize == 2 else 32)
    return _product(rank_tile, 64, wide, bank, scaled=scaled, num_warps=8, num_stages=2)


def backward_weight_config(max_rank: int, wide: torch.dtype, bank: torch.dtype, *, scaled: bool) -> KernelConfig:
    """Of ``backward_weight_kernel``. Narrow tiles, so that a few slots alone keep all of a GPU busy."""
    rank_tile = _rank_tile(max_rank, largest=128)
    block_t = 64 // max(1, wide.itemsize // 2)
    stages = 3 if rank_tile < 64 else 2
    return _product(rank_tile, 64, wide, bank, scaled=scaled, num_warps=4, num_stages=stages, block_t=block_t)


def adamw_config(bank: torch.dtype, alignment: int) -> KernelConfig:
    """Of ``adamw_kernel``, for a bank whose spans begin and end on multiples of ``alignment``."""
    accumulator = tl.float64 if bank == torch.float64 else tl.float32
    constants = {"ALIGNMENT": alignment, "BLOCK": ADAMW_BLOCK, "ACCUMULATOR": accumulator}
    return KernelConfig(constants=constants, num_warps=4, num_stages=1)


def _rank_tile(max_rank: int, *, largest: int) -> int:
    """Ranks that one program takes; 16 is the least that a matrix unit does."""
    return max(16, min(largest, triton.next_power_of_2(max_rank)))


def _product(
    rank_tile: int,
    block_w: int,
    wide: torch.dtype,
    bank: torch.dtype,
    *,
    scaled: bool,
    num_warps: int,
    num_stages: int,
    block_t: int = BLOCK_TOKENS,
) -> KernelConfig:
    operand, accumulator, precision = _arithmetic(wide, bank)
    constants = {
        "SCALED": scaled,
        "RANK_TILE": rank_tile,
        "BLOCK_T": block_t,
        "BLOCK_W": block_w,
        "OPERAND": operand,
        "ACCUMULATOR": accumulator,
        "PRECISION": precision,
    }
    # Three-pass products keep two parts of every factor in registers, more than four warps have for wide tiles.
    if precision == "tf32x3" and rank_tile >= 64:
        num_warps = 8
    return KernelConfig(constants=constants, num_warps=num_warps, num_stages=num_stages)


def _arithmetic(wide: torch.dtype, bank: torch.dtype) -> tuple[tl.dtype, tl.dtype, str]:
    """Dtype of the factors of a product, dtype of its sum, and how float32 factors are multiplied.

    A float32 adapter on a 16-bit base takes part with TF32's ten bits of mantissa: no fewer than its partner has.
    With a float32 base the product keeps float32's precision, in three passes of TF32.
    """
    if torch.float64 in (wide, bank):
        return tl.float64, tl.float64, "ieee"
    if wide == bank and wide.itemsize == 2:
        return {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[wide], tl.float32, "ieee"
    return tl.float32, tl.float32, "tf32" if wide.itemsize == 2 else "tf32x3"
