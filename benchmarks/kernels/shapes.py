"""The base models that are measured: real configurations with random weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

__all__ = ["SHAPES", "random_model"]

_LLAMA_3 = {
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
_LLAMA_3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

SHAPES: Mapping[str, Mapping[str, Any]] = {
    "smoke": {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
    },
    "tiny": {
        "vocab_size": 2048,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "25m": {
        "vocab_size": 16384,
        "hidden_size": 384,
        "intermediate_size": 1024,
        "num_hidden_layers": 12,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "1b": {
        **_LLAMA_3,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "tie_word_embeddings": True,
        "rope_parameters": {**_LLAMA_3_ROPE, "factor": 32.0},
    },
    "8b": {
        **_LLAMA_3,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "tie_word_embeddings": False,
        "rope_parameters": {**_LLAMA_3_ROPE, "factor": 8.0},
    },
}
"""Configurations by name: ``tiny`` is that of alto-tiny, ``1b`` that of Llama-3.2-1B, ``8b`` that of Llama-3.1-8B."""


def random_model(
    shape: Mapping[str, Any], *, device: torch.device, dtype: torch.dtype, seed: int = 0
) -> LlamaForCausalLM:
    """Return a Llama of ``shape`` with random weights, frozen and in evaluation mode; always the same weights."""
    torch.manual_seed(seed)
    config = LlamaConfig(**shape, bos_token_id=None, eos_token_id=1, pad_token_id=0, dtype=dtype)
    with device:
        model = LlamaForCausalLM._from_config(config, dtype=dtype)
    return model.requires_grad_(False).eval()
