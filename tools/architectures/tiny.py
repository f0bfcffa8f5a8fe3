"""Tiny random-weight models of any causal-LM class of transformers, made by shrinking its default configuration."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from alto.backbone.reading import auto_class

__all__ = ["build_tiny", "model_types", "tiny_settings"]

HIDDEN, HEADS, KV_HEADS, HEAD_SIZE, WINDOW, CHUNK = 32, 4, 2, 8, 5, 7
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
"""Split of half a head into time, height and width."""
MAX_LAYERS = 4

SIZES: Mapping[str, Any] = {
    r"hidden_size|d_model|n_embd|dim|(input_)?embedding_size|embed_dim|word_embed_proj_dim|lru_width": HIDDEN,
    r"intermediate_size(_mlp)?|ffn_dim|d_ff|n_inner|ffn_hidden_size|inner_dim|(en|de)coder_ffn_dim|d_inner": 48,
    r"(dense_|shared_)?(moe_|expert_)?(shared_expert_|ffn_)?intermediate_size|moe_intermediate_dim": 24,
    r"num_attention_heads|n_heads?|(en|de)coder_attention_heads|num_heads|num_encoder_heads": HEADS,
    r"num_key_value_heads|num_kv_heads|multi_query_group_num": KV_HEADS,
    r"head_dim|kv_channels|global_head_dim|swa_head_dim|d_kv": HEAD_SIZE,
    r"(num_local_|num_|n_routed_|moe_num_|num_routed_)experts|num_local_experts": 4,
    r"num_experts_per_tok(en)?|num_selected_experts|moe_topk|moe_k|top_k_experts|moe_router_topk": 2,
    r"n_shared_experts|num_shared_experts|moe_num_shared_experts": 1,
    r"n_group|topk_group": 1,
    r"q_lora_rank|kv_lora_rank": 16,
    r"rotary_dim": 4,
    r"mamba_n_heads|n_mamba_heads|mamba_num_heads|mamba_d_head|mamba_head_dim|mamba_d_state|ssm_state_size": 8,
    r"state_size|mamba_d_ssm|mamba_ngroups": 8,
    r"linear_num_(key|value)_heads": 2,
    r"linear_(key|value)_head_dim": 8,
    r"index_n_heads": 4,
    r"index_head_dim": 16,
    r"index_topk": 64,
    r"qk_rope_head_dim|qk_nope_head_dim|v_head_dim": 8,
    r"sliding_window|attention_window_size|local_attention|window_size|sliding_window_size": WINDOW,
    r"attention_chunk_size": CHUNK,
    r"keep_window_size": WINDOW,
    r"use_sliding_window": True,
    r"max_window_layers": 1,
    r"max_position_embeddings|n_positions|n_ctx|max_target_positions|max_source_positions|max_seq_len": 128,
    r"initializer_range|init_std": 0.2,
    r"use_cache": False,
}
"""Value by pattern: a field whose full name matches gets this value if the default configuration has a number there."""

DROPOUTS = re.compile(r".*(dropout|pdrop|layerdrop|jitter).*")
NUM_LAYERS = re.compile(r"num_hidden_layers|n_layers?|num_layers|(en|de)coder_layers|num_(en|de)coder_layers")

ENCODERS = [
    "bert",
    "bert-generation",
    "big_bird",
    "camembert",
    "data2vec-text",
    "electra",
    "ernie",
    "megatron-bert",
    "reformer",
    "rembert",
    "roberta",
    "roberta-prelayernorm",
    "roc_bert",
    "roformer",
    "xlm-roberta",
    "xlm-roberta-xl",
    "xmod",
]

EXTRAS: Mapping[str, Mapping[str, Any]] = {
    # As language models they are decoders; transformers says so too when they are made.
    **{model_type: {"is_decoder": True} for model_type in ENCODERS},
    "deepseek_v2": {"num_experts_per_tok": 2, "n_routed_experts": 4},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    **{
        name: {"text_config.rope_parameters": MROPE}
        for name in ("glm4v", "glm4v_moe", "glm_ocr", "qwen2_5_vl", "qwen2_vl")
    },
    "xmod": {"default_language": "en_XX", "is_decoder": True},
    "zaya": {"num_experts_per_tok": 1},
}
"""Settings by model type, for fields that the patterns above would set wrongly."""


def model_types() -> list[str]:
    """Return the model types for which transformers has a causal-LM class, then those for which it has only a
    vision-language class."""
    causal = {config.model_type for config in MODEL_FOR_CAUSAL_LM_MAPPING}
    return [*sorted(causal), *sorted({c.model_type for c in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING} - causal)]


def tiny_settings(model_type: str, vocabulary: int) -> dict[str, Any]:
    """Return the arguments of the configuration class of ``model_type``."""
    default = CONFIG_MAPPING[model_type]().to_dict()
    settings = _shrunk(default, vocabulary)
    for path, value in EXTRAS.get(model_type, {}).items():
        *parents, name = path.split(".")
        part = settings
        for parent in parents:
            part = part[parent]
        part[name] = value
    return settings


def build_tiny(model_type: str, vocabulary: int, seed: int = 0) -> PreTrainedModel:
    """Return a float32 model of ``model_type`` with random weights, in evaluation mode."""
    config = CONFIG_MAPPING[model_type](**tiny_settings(model_type, vocabulary))
    torch.manual_seed(seed)
    model: PreTrainedModel = auto_class(config).from_config(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):  # biases are zero in a new model, so a forgotten one would not be noticed
            nn.init.normal_(parameter, std=0.2)
        elif parameter.dim() == 2 and parameter.std() < 0.1:
            # Attention that is far from uniform, so that an error in it shows in the losses.
            nn.init.normal_(parameter, std=0.2)
    return model


def _shrunk(default: Mapping[str, Any], vocabulary: int) -> dict[str, Any]:
    settings = dict(default)
    settings.pop("transformers_version", None)
    settings.pop("model_type", None)
    settings.pop("dtype", None)
    layers = [name for name in settings if NUM_LAYERS.fullmatch(name) and isinstance(settings[name], int)]
    kept = _kept_layers(settings, max((settings[name] for name in layers), default=0))
    for name, value in default.items():
        if name == "per_layer_config":
            settings[name] = {kept.index(int(key)): part for key, part in value.items() if int(key) in kept}
        elif _is_configuration(value):
            settings[name] = _shrunk(value, vocabulary)
        elif name in layers:
            settings[name] = len(kept) or 2
        elif isinstance(value, list | tuple) and kept and layers and len(value) == default[layers[0]]:
            settings[name] = [value[index] for index in kept]
        elif name in ("vocab_size", "vocab_size_per_layer_input"):
            settings[name] = vocabulary
        elif name in ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"):
            settings[name] = {"eos_token_id": 1, "bos_token_id": 2}.get(name, 0)
        elif DROPOUTS.fullmatch(name) and isinstance(value, float):
            settings[name] = 0.0
        elif name in ("num_key_value_heads", "head_dim", "sliding_window") or (
            value is not None and not isinstance(value, str | list | dict)
        ):
            settings[name] = next((size for pattern, size in SIZES.items() if re.fullmatch(pattern, name)), value)
    if "use_sliding_window" in settings:
        settings.pop("layer_types", None)  # follows from it
    if isinstance(settings.get("kv_lora_rank"), int):  # latent attention has keys for every head
        settings |= {name: HEADS for name in ("num_key_value_heads",) if name in settings}
    return settings


_SYNONYMS = {"hidden_size", "d_model", "n_embd", "vocab_size"}


def _is_configuration(value: object) -> bool:
    """Return whether ``value`` is the configuration of a model, or holds such configurations."""
    if not isinstance(value, dict):
        return False
    return bool(_SYNONYMS.intersection(value)) or any(_is_configuration(part) for part in value.values())


def _kept_layers(settings: Mapping[str, Any], num_layers: int) -> list[int]:
    """Return the numbers of layers that include every kind of layer of the default: at least two, at most four."""
    lists = [value for value in settings.values() if isinstance(value, list | tuple) and len(value) == num_layers]
    if num_layers < 2 or not lists:
        return list(range(2))
    kinds: dict[tuple[str, ...], int] = {}
    for layer in range(num_layers):
        kinds.setdefault(tuple(str(value[layer]) for value in lists), layer)
    kept = sorted(kinds.values())[:MAX_LAYERS]
    return kept if len(kept) > 1 else [0, 1]
