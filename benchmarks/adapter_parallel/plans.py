"""The plan of each scale, and its goals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.kernels.shapes import SHAPES

__all__ = ["GOALS", "PLANS", "Plan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The plan of one scale.

    Attributes:
        device: ``cpu``, or ``cuda`` for one GPU per rank.
        num_ranks: Number of ranks; on CUDA, the largest number. The float32 copy of the model that the gate uses has as
            many layers.
        shape: Configuration of the Llama that is the base.
        num_jobs: Number of adapters; with adapter parallelism every rank has equally many.
        adapter_rank: Rank of every adapter. All linear layers except the output head have one.
        length: Tokens of a row, of which all but the first are trained.
        batch_sizes: Rows in a step of one adapter.
        repeats: Number of timed rounds.
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
    """Return a small base whose heads can be split over the ranks, and whose embeddings are separate from the output
    head."""
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
