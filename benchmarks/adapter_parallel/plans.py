"""What each scale measures, and its goals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.kernels.shapes import SHAPES

__all__ = ["GOALS", "PLANS", "Plan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What one scale measures.

    Attributes:
        device: ``cpu``, or ``cuda`` for a GPU a rank.
        num_ranks: On CUDA, the most. The float32 copy on which the gate is held has as many layers.
        shape: Configuration of the Llama that is the base.
        num_jobs: Adapters that are trained; as many on each rank with adapter parallelism.
        adapter_rank: Of every adapter; all linear layers but the output head have one.
        length: Tokens of a row, of which all but the first are trained.
        batch_sizes: Rows of a step of one adapter.
        repeats: Timed rounds.
    """

    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    num_ranks: int
    shape: Mapping[str, Any]
    num_jobs: int = 8
    adapter_rank: int = 16
    length: int = 256
    batch_sizes: tuple[int, ...] = (1, 2, 4, 8)
    repeats: int


GOALS = {
    "over_fsdp_bs1": (">=", 4.7),
    "over_fsdp_bs2": (">=", 4.7),
    "over_best_other": (">", 1.0),
    "adapter_bytes": ("<=", 0.0),
}


def _shape(name: str, num_heads: int, num_key_value_heads: int) -> Mapping[str, Any]:
    """A small base whose heads, and embeddings apart from the output head, can be split over the ranks."""
    heads = {"num_attention_heads": num_heads, "num_key_value_heads": num_key_value_heads}
    return {**SHAPES[name], **heads, "tie_word_embeddings": False}


PLANS = {
    "smoke": Plan(
        num_ranks=2,
        shape=_shape("smoke", 2, 2),
        num_jobs=4,
        adapter_rank=4,
        length=16,
        batch_sizes=(1, 2),
        repeats=2,
    ),
    "cpu": Plan(num_ranks=4, shape=_shape("tiny", 8, 4), repeats=5),
    "gpu": Plan(device="cuda", dtype=torch.bfloat16, num_ranks=8, shape=SHAPES["8b"], repeats=7),
}
