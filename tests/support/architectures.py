"""Tiny random-weight models of transformers' own classes, one for every architecture that is known to train
correctly."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GemmaConfig,
    GemmaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

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
    "smollm": (LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": True}),
    "qwen2": (
        Qwen2ForCausalLM,
        Qwen2Config,
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1, "tie_word_embeddings": True},
    ),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 16}),
    "gemma": (GemmaForCausalLM, GemmaConfig, {"head_dim": 16}),
    "gemma2": (Gemma2ForCausalLM, Gemma2Config, {"head_dim": 16}),
    "gemma2-plain-attention": (
        Gemma2ForCausalLM,
        Gemma2Config,
        {"head_dim": 16, "attn_logit_softcapping": None, "final_logit_softcapping": 5.0, "sliding_window": 6},
    ),
    "gemma3": (
        Gemma3ForCausalLM,
        Gemma3TextConfig,
        {"head_dim": 16, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": 5}),
    "phi": (PhiForCausalLM, PhiConfig, {"partial_rotary_factor": 0.5, "qk_layernorm": True}),
    "phi3": (Phi3ForCausalLM, Phi3Config, {"sliding_window": None}),
    "smollm3": (SmolLM3ForCausalLM, SmolLM3Config, {"no_rope_layers": [1, 0]}),
}


def build_tiny(architecture: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Return a new float32 model; ``changes`` go into its config."""
    model_class, config_class, extras = ARCHITECTURES[architecture]
    torch.manual_seed(seed)
    model: PreTrainedModel = model_class(config_class(**(SIZES | extras | changes))).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):  # zero in a new model, so that one that is forgotten would not show
            torch.nn.init.normal_(parameter, std=0.3)
    return model
