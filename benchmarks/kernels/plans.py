"""The plan of each scale, and its goals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from benchmarks.kernels.variants import VARIANTS

__all__ = ["PLANS", "ModelPlan", "Plan", "ThroughputPlan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPlan:
    """The measurements of one base model.

    Attributes:
        shape: Name in ``SHAPES``, and in the names of figures.
        tokenizer: Tokenizer whose row lengths are used.
        ranks: Ranks of the jobs that train together.
        max_tokens_per_pass: Limit for every variant that batches jobs.
        whole: Variants whose step on the whole model is measured: all, or those that fit into the memory.
    """

    shape: str
    tokenizer: str
    ranks: tuple[int, ...]
    batch_sizes: tuple[int, ...]
    max_tokens_per_pass: int
    whole: tuple[str, ...] = tuple(VARIANTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputPlan:
    """Jobs of these ranks, with one row per step each, through ``num_rows`` rows of at most ``longest`` tokens."""

    shape: str
    ranks: tuple[int, ...]
    num_rows: int
    longest: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The plan of one scale.

    Attributes:
        repeats: Number of timed rounds.
        variants: Variants that take part.
        models: Base models; speed-ups over the baselines become figures only for the first one.
        throughput: Samples per second, compared with a bare PEFT loop; None leaves this out.
    """

    device: torch.device
    dtype: torch.dtype
    repeats: int
    models: tuple[ModelPlan, ...]
    variants: tuple[str, ...] = tuple(VARIANTS)
    throughput: ThroughputPlan | None = None
    goals: Mapping[str, tuple[str, float]] = field(default_factory=dict)


_MIXED_16 = (16, 32, 64, 32) * 4
_MIXED_32 = _MIXED_16 * 2

PLANS = {
    "smoke": Plan(
        device=torch.device("cpu"),
        dtype=torch.float32,
        repeats=2,
        models=(
            ModelPlan(shape="smoke", tokenizer="gpt2", ranks=(4, 16, 8), batch_sizes=(1, 2), max_tokens_per_pass=600),
        ),
        variants=tuple(name for name in VARIANTS if name != "compiled"),  # it waits for a compiler
        throughput=ThroughputPlan(shape="smoke", ranks=(4, 16, 8), num_rows=2, longest=200),
    ),
    "cpu": Plan(
        device=torch.device("cpu"),
        dtype=torch.float32,
        repeats=7,
        models=(
            ModelPlan(shape="tiny", tokenizer="alto-tiny", ranks=_MIXED_16, batch_sizes=(1,), max_tokens_per_pass=4096),
            ModelPlan(shape="25m", tokenizer="gpt2", ranks=_MIXED_16, batch_sizes=(1,), max_tokens_per_pass=4096),
        ),
        variants=tuple(name for name in VARIANTS if name != "lorafusion"),  # its kernels do not exist for a CPU
        # Under alto-tiny's tokenizer, rows of at most 236 tokens have 177 on average.
        throughput=ThroughputPlan(shape="tiny", ranks=_MIXED_16, num_rows=16, longest=236),
        goals={
            "step_over_floor_tiny": ("<=", 1.2),
            "step_over_floor_25m": ("<=", 1.2),
            "samples_per_s_over_peft": (">=", 2.0),
        },
    ),
    "gpu": Plan(
        device=torch.device("cuda"),
        dtype=torch.bfloat16,
        repeats=5,
        models=(
            ModelPlan(
                shape="1b", tokenizer="gpt2", ranks=_MIXED_32, batch_sizes=(1, 2, 4, 8), max_tokens_per_pass=16384
            ),
            # 32 float32 slots of 8B with their optimizer take 86 GB, so only the floor fits as well.
            ModelPlan(
                shape="8b",
                tokenizer="gpt2",
                ranks=_MIXED_32,
                batch_sizes=(1, 2, 4, 8),
                max_tokens_per_pass=3072,
                whole=("frozen", "ours"),
            ),
        ),
        goals={
            "loop_bs1": (">=", 2.5),
            "loop_bs2": (">=", 2.2),
            "loop_bs4": (">=", 1.8),
            "sequential_bs1": (">=", 8.0),
            "sequential_bs2": (">=", 5.5),
            "sequential_bs4": (">=", 3.5),
            "lorafusion": (">=", 1.2),
            "step_over_floor_1b": ("<=", 1.15),
            "step_over_floor_8b": ("<=", 1.15),
        },
    ),
}
