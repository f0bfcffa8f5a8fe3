"""What every room's tests share: no network, and models small enough to run in milliseconds."""

from __future__ import annotations

import os

# Read by huggingface_hub when it is imported, so it has to stand before anything that imports transformers.
os.environ["HF_HUB_OFFLINE"] = "1"

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GemmaConfig,
    GemmaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

pytest_plugins = ["journals"]  # journals written by hand

VOCABULARY = 97
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
    # Larger than the usual 0.02, so that attention is far from uniform and an error in it shows in the losses.
    "initializer_range": 0.3,
}
ARCHITECTURES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "llama-bias": (LlamaForCausalLM, LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 16}),
    "gemma": (GemmaForCausalLM, GemmaConfig, {"head_dim": 16}),
    "gemma2": (Gemma2ForCausalLM, Gemma2Config, {"head_dim": 16}),
    "gemma2-plain-attention": (
        Gemma2ForCausalLM,
        Gemma2Config,
        {"head_dim": 16, "attn_logit_softcapping": None, "final_logit_softcapping": 5.0, "sliding_window": 6},
    ),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": 5}),
    "phi3": (Phi3ForCausalLM, Phi3Config, {"sliding_window": None}),
}


@pytest.fixture(scope="session")
def tiny_model() -> Callable[..., PreTrainedModel]:
    """``tiny_model(architecture, seed=0, **config)``: a new random-weight model of transformers' own class, float32."""

    def build(architecture: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
        model_class, config_class, extras = ARCHITECTURES[architecture]
        torch.manual_seed(seed)
        model: PreTrainedModel = model_class(config_class(**(SIZES | extras | changes))).eval()
        return model

    return build
