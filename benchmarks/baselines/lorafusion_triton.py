"""The kernels of ``lorafusion`` on a GPU; the first and the third are one kernel with different strides.

At the first pass of a shape, tiles are chosen by measurement among those that LoRAFusion's authors use.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from alto.kernels.triton_config import KernelConfig, ceil_div, launch
from benchmarks.baselines.lorafusion_pass import TokenBlocks

__all__ = ["LINEAR_CONFIGS", "NARROW_CONFIGS", "fused_linear", "fused_narrow", "linear_kernel", "narrow_kernel"]

_GROUP = 8
"""Number of blocks of tokens that read a tile of the weights one after the other, while it is in the L2 cache."""


def _config(num_warps: int, num_stages: int, **tiles: int) -> KernelConfig:
    return KernelConfig(constants={**tiles, "GROUP": _GROUP}, num_warps=num_warps, num_stages=num_stages)


LINEAR_CONFIGS = tuple(
    _config(num_warps, num_stages, BLOCK_T=block_t, BLOCK_N=block_n, BLOCK_C=block_c)
    for block_t, block_n, block_c, num_warps, num_stages in (
        (128, 256, 64, 8, 4),  # the authors' choice for an H100
        (128, 256, 64, 8, 3),
        (128, 128, 64, 8, 4),
        (128, 128, 32, 4, 4),
        (64, 256, 64, 8, 4),
        (64, 128, 64, 4, 4),
    )
)
NARROW_CONFIGS = tuple(
    _config(8, num_stages, BLOCK_T=block_t, BLOCK_N=128, TILES=tiles)
    for block_t, tiles, num_stages in (
        (128, 1, 5),  # the authors' choice for an H100
        (128, 4, 3),
        (64, 1, 4),
        (64, 4, 3),
    )
)

_Candidate = TypeVar("_Candidate")

_chosen: dict[Hashable, KernelConfig] = {}
"""Fastest configuration by kernel and shape."""


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
    (num_in, num_out), num_tokens = weight_CN.shape, in_TC.shape[0]
    out_TN = in_TC.new_empty(num_tokens, num_out)
    strides = (in_TC.stride(0), *weight_CN.stride(), narrow_TR.stride(0), lora_PN.stride(0), num_out)

    def run(config: KernelConfig) -> None:
        blocks_B4, scales_B = blocks.table(config.constants["BLOCK_T"])
        num_blocks = len(scales_B)
        launch(
            linear_kernel,
            (num_blocks * ceil_div(num_out, config.constants["BLOCK_N"]), 1, 1),
            (in_TC, weight_CN, in_TC if bias_N is None else bias_N, narrow_TR, lora_PN, out_TN, blocks_B4, scales_B),
            (num_blocks, num_in, num_out, *strides),
            config,
            HAS_BIAS=bias_N is not None,
            IS_SCALED=is_scaled,
            RANKS=blocks.num_ranks,
        )

    run(_tuned(LINEAR_CONFIGS, ("linear", num_in, num_out, is_scaled), blocks, run))
    return out_TN


def fused_narrow(dy_TN: Tensor, s_TR: Tensor, b_PN: Tensor, blocks: TokenBlocks) -> tuple[Tensor, Tensor]:
    num_tokens, num_out = dy_TN.shape
    num_ds = num_tokens * blocks.num_ranks
    sums = torch.empty(num_ds + b_PN.numel(), dtype=torch.float32, device=dy_TN.device)
    ds_TR, db_PN = sums[:num_ds].view(num_tokens, blocks.num_ranks), sums[num_ds:].view(b_PN.shape)

    def run(config: KernelConfig) -> None:
        blocks_B4, scales_B = blocks.table(config.constants["BLOCK_T"])
        num_blocks = len(scales_B)
        columns = config.constants["BLOCK_N"] * config.constants["TILES"]
        launch(
            narrow_kernel,
            (num_blocks * ceil_div(num_out, columns), 1, 1),
            (dy_TN, s_TR, b_PN, ds_TR, db_PN, blocks_B4, scales_B),
            (num_blocks, num_out, dy_TN.stride(0), s_TR.stride(0), b_PN.stride(0)),
            config,
            RANKS=blocks.num_ranks,
        )

    config = _tuned(NARROW_CONFIGS, ("narrow", num_out), blocks, run)
    sums.zero_()  # after the tuning, which adds to them
    run(config)
    return ds_TR, db_PN


@triton.jit(do_not_specialize=["num_blocks"])
def linear_kernel(
    in_TC,
    weight_CN,
    bias_N,
    narrow_TR,
    lora_PN,
    out_TN,
    blocks_B4,
    scales_B,
    num_blocks,
    num_in,
    num_out,
    stride_in_t,
    stride_weight_c,
    stride_weight_n,
    stride_narrow_t,
    stride_lora_p,
    stride_out_t,
    HAS_BIAS: tl.constexpr,
    IS_SCALED: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Compute ``out[i] = in[i] @ weight + bias + scale_i * narrow[i] @ lora_i``. Grid: tiles of columns times blocks of
    tokens, ``GROUP`` blocks at a time."""
    block, tile = _block_and_tile(num_blocks, tl.cdiv(num_out, BLOCK_N), GROUP)
    entry = blocks_B4 + 4 * block
    first = tl.load(entry).to(tl.int64)
    num_tokens = tl.load(entry + 1)
    t, c, r = tl.arange(0, BLOCK_T)[:, None], tl.arange(0, BLOCK_C), tl.arange(0, RANKS)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    is_token, is_column, is_rank = t < num_tokens, n < num_out, r < tl.load(entry + 3)

    # No mask by ranks, which would split reads of 16 bytes: these values are finite, and lora is zero there.
    narrow_TR += first * stride_narrow_t + (t * stride_narrow_t + r[None, :])
    narrow = tl.load(narrow_TR, mask=is_token, other=0.0)
    lora = tl.load(
        lora_PN + tl.load(entry + 2).to(tl.int64) * stride_lora_p + (r[:, None] * stride_lora_p + n),
        mask=is_rank[:, None] & is_column,
        other=0.0,
    )
    total = tl.dot(narrow, lora, input_precision="ieee")
    if IS_SCALED:
        total *= tl.load(scales_B + block)

    in_TC += first * stride_in_t + (t * stride_in_t + c[None, :])
    weight_CN += c[:, None] * stride_weight_c + n * stride_weight_n
    for start in range(0, num_in, BLOCK_C):
        is_in = c < num_in - start
        rows = tl.load(in_TC, mask=is_token & is_in[None, :], other=0.0)
        weight = tl.load(weight_CN, mask=is_in[:, None] & is_column, other=0.0)
        total = tl.dot(rows, weight, total, input_precision="ieee")
        in_TC += BLOCK_C
        weight_CN += BLOCK_C * stride_weight_c
    if HAS_BIAS:
        total += tl.load(bias_N + n, mask=is_column, other=0.0)
    out_TN += first * stride_out_t + (t * stride_out_t + n)
    tl.store(out_TN, total.to(out_TN.dtype.element_ty), mask=is_token & is_column)


@triton.jit(do_not_specialize=["num_blocks"])
def narrow_kernel(
    dy_TN,
    s_TR,
    b_PN,
    ds_TR,
    db_PN,
    blocks_B4,
    scales_B,
    num_blocks,
    num_out,
    stride_dy_t,
    stride_s_t,
    stride_b_p,
    RANKS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TILES: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Compute ``ds[i] += scale_i * dy[i] @ b_iᵀ`` and ``db_i += scale_i * s[i]ᵀ @ dy[i]``, atomically. Grid: ``TILES``
    tiles of columns times blocks of tokens, ``GROUP`` blocks at a time."""
    block, span = _block_and_tile(num_blocks, tl.cdiv(num_out, BLOCK_N * TILES), GROUP)
    entry = blocks_B4 + 4 * block
    first, row = tl.load(entry).to(tl.int64), tl.load(entry + 2).to(tl.int64)
    scale = tl.load(scales_B + block)
    t, r = tl.arange(0, BLOCK_T)[:, None], tl.arange(0, RANKS)
    is_token, is_rank = t < tl.load(entry + 1), r < tl.load(entry + 3)
    s = tl.load(s_TR + first * stride_s_t + (t * stride_s_t + r[None, :]), mask=is_token, other=0.0)
    dy_TN += first * stride_dy_t + t * stride_dy_t
    b_PN += row * stride_b_p
    db_PN += row * num_out

    ds = tl.zeros((BLOCK_T, RANKS), dtype=tl.float32)
    for tile in range(TILES):
        n = (span * TILES + tile) * BLOCK_N + tl.arange(0, BLOCK_N)
        is_column = n < num_out
        dy = tl.load(dy_TN + n[None, :], mask=is_token & is_column[None, :], other=0.0)
        b = tl.load(b_PN + r[:, None] * stride_b_p + n[None, :], mask=is_rank[:, None] & is_column[None, :], other=0.0)
        ds = tl.dot(dy, tl.trans(b), ds, input_precision="ieee")
        db = tl.dot(tl.trans(dy), s, input_precision="ieee") * scale
        tl.atomic_add(
            db_PN + r[None, :] * num_out + n[:, None], db, mask=is_rank[None, :] & is_column[:, None], sem="relaxed"
        )
    # Write zeros past the rank, four at a time; a mask by ranks would prevent this.
    tl.atomic_add(ds_TR + first * RANKS + (t * RANKS + r[None, :]), ds * scale, mask=is_token, sem="relaxed")


@triton.jit
def _block_and_tile(num_blocks, num_tiles, GROUP: tl.constexpr):
    """Return block and tile of a program: ``GROUP`` blocks take turns with every tile before the next blocks begin."""
    program = tl.program_id(0)
    per_group = GROUP * num_tiles
    first_block = program // per_group * GROUP
    num_grouped = tl.minimum(num_blocks - first_block, GROUP)
    place = program % per_group
    return first_block + place % num_grouped, place // num_grouped


def _tuned(
    configs: Sequence[KernelConfig],
    shape: tuple[Hashable, ...],
    blocks: TokenBlocks,
    run: Callable[[KernelConfig], None],
) -> KernelConfig:
    """Return the fastest of ``configs`` for a shape with about as many tokens and jobs as these; it is measured
    once."""
    if triton.knobs.runtime.interpret:
        return configs[-1]
    num_tokens = sum(segment.length for segment in blocks.segments)
    num_jobs = len(blocks.segments)
    key = (*shape, blocks.num_ranks, num_tokens.bit_length(), (num_tokens // num_jobs).bit_length())
    if key not in _chosen:
        _chosen[key] = fastest(
            configs, lambda config: triton.testing.do_bench(lambda: run(config), warmup=5, rep=20, return_mode="median")
        )
    return _chosen[key]


def fastest(candidates: Sequence[_Candidate], measure: Callable[[_Candidate], float]) -> _Candidate:
    """Return the candidate with the smallest measure; candidates that need more than the GPU has are left out.

    Raises:
        triton.OutOfResources: All candidates do.
    """
    found: list[tuple[float, int]] = []
    refused: triton.OutOfResources | None = None
    for number, candidate in enumerate(candidates):
        try:
            found.append((measure(candidate), number))
        except triton.OutOfResources as error:
            refused = error
    if not found:
        assert refused is not None
        raise refused
    return candidates[min(found)[1]]
