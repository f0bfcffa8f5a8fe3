"""Limits of vLLM's LoRA support. Source: reading, not running, vLLM's ``vllm/config/lora.py`` and
``vllm/lora/peft_helper.py``."""

from __future__ import annotations

from collections.abc import Iterable

from alto.lora.heads import HEAD
from alto.lora.magnitudes import is_magnitude
from alto.lora.saved import SavedAdapter
from alto.lora.whole_modules import is_whole

__all__ = ["vllm_obstacle", "vllm_rank"]

_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM allocates memory for (``--max-lora-rank``); an adapter uses the smallest that is large enough."""


def vllm_obstacle(adapter: SavedAdapter) -> tuple[str, str] | None:
    """Return why vLLM cannot serve ``adapter``, as two parts of an error message: what vLLM expects, and what was
    found. None if vLLM can serve it."""
    if adapter.has_patterns:
        return (
            "one rank and one scale for all modules of an adapter, which is what vLLM reads",
            f"several in {adapter.config_file} (rank_pattern, alpha_pattern)",
        )
    if adapter.weights.extras:
        return (
            "an adapter of low-rank matrices alone, which is what vLLM reads",
            f"{_kinds(adapter.weights.extras)} in {adapter.folder}",
        )
    if adapter.rank > _RANKS[-1]:
        return f"adapters of rank {_RANKS[-1]} at most, which vLLM takes", f"rank {adapter.rank}"
    return None


def _kinds(extras: Iterable[str]) -> str:
    """Return a text that names the kinds of tensors besides the matrices."""
    return " and ".join(dict.fromkeys(map(_kind, extras)))


def _kind(name: str) -> str:
    if name == HEAD:
        return "a classification head"
    if is_magnitude(name):
        return "magnitudes (use_dora)"
    return "whole modules (modules_to_save)" if is_whole(name) else "biases (bias)"


def vllm_rank(rank: int) -> int:
    """Return the smallest value of ``--max-lora-rank`` for adapters of ``rank``, which must not exceed vLLM's largest
    rank."""
    return min(allowed for allowed in _RANKS if allowed >= rank)
