"""What each scale measures, and its goals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.kernels.shapes import SHAPES

__all__ = ["PLANS", "Plan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What one scale measures.

    Attributes:
        device: ``cpu``, or ``cuda`` for a GPU a rank.
        num_ranks: On CUDA, the most.
        shape: Configuration of the Llama that is the base.
        gate_layers: Layers of the float32 copy on which the gate is held; no fewer than ranks.
        num_jobs: Adapters that are trained; as many on each rank with adapter parallelism.
        adapter_rank: Of every adapter; all linear layers but the output head have one.
        length: Tokens of a row, of which all but the first are trained.
        batch_sizes: Rows of a step of one adapter.
        repeats: Timed rounds.
    """

    device: str
    dtype: torch.dtype
    num_ranks: int
    shape: Mapping[str, Any]
    gate_layers: int
    num_jobs: int
    adapter_rank: int
    length: int
    batch_sizes: tuple[int, ...]
    repeats: int
    goals: Mapping[str, tuple[str, float]] = field(default_factory=dict)


GOALS = {
    "over_fsdp_bs1": (">=", 4.7),
    "over_fsdp_bs2": (">=", 4.7),
    "over_best_other": (">", 1.0),
    "adapter_bytes": ("<=", 0.0),
}

PLANS = {
    "smoke": Plan(
        device="cpu",
        dtype=torch.float32,
        num_ranks=2,
        shape={
            "vocab_size": 64,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "tie_word_embeddings": False,
        },
        gate_layers=2,
        num_jobs=4,
        adapter_rank=4,
        length=16,
        batch_sizes=(1, 2),
        repeats=2,
    ),
    "cpu": Plan(
        device="cpu",
        dtype=torch.float32,
        num_ranks=4,
        shape={
            "vocab_size": 2048,
            "hidden_size": 128,
            "intermediate_size": 384,
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "tie_word_embeddings": False,
        },
        gate_layers=4,
        num_jobs=8,
        adapter_rank=16,
        length=256,
        batch_sizes=(1, 2, 4, 8),
        repeats=5,
        goals=GOALS,
    ),
    "gpu": Plan(
        device="cuda",
        dtype=torch.bfloat16,
        num_ranks=8,
        shape=SHAPES["8b"],
        gate_layers=8,
        num_jobs=8,
        adapter_rank=16,
        length=256,
        batch_sizes=(1, 2, 4, 8),
        repeats=7,
        goals=GOALS,
    ),
}
