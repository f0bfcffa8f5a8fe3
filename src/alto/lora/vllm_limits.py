"""What vLLM serves of an adapter. Source: vLLM, ``vllm/config/lora.py`` and ``vllm/lora/peft_helper.py``, as read, not
run."""

from __future__ import annotations

from alto.lora.saved import SavedAdapter

__all__ = ["vllm_obstacle", "vllm_rank"]

_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM allocates for (``--max-lora-rank``); an adapter gets the next larger."""


def vllm_obstacle(adapter: SavedAdapter) -> tuple[str, str] | None:
    """Why vLLM cannot serve ``adapter``: what it reads, and what is there instead, as parts of a message; None where it
    can."""
    if adapter.has_patterns:
        return (
            "one rank and one scale for all modules of an adapter, which is what vLLM reads",
            f"several in {adapter.config_file} (rank_pattern, alpha_pattern)",
        )
    if adapter.weights.extras:
        return (
            "an adapter of low-rank matrices alone, which is what vLLM reads",
            f"more in {adapter.folder} (bias, use_dora, modules_to_save or a classification head)",
        )
    if adapter.rank > _RANKS[-1]:
        return f"adapters of rank {_RANKS[-1]} at most, which vLLM takes", f"rank {adapter.rank}"
    return None


def vllm_rank(rank: int) -> int:
    """The smallest value of ``--max-lora-rank`` for adapters of ``rank``, which :func:`vllm_obstacle` lets through."""
    return min(allowed for allowed in _RANKS if allowed >= rank)
