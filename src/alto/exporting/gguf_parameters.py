"""Hyperparameters of a model in a GGUF file, under the keys of llama.cpp.

Conventions are those of llama.cpp, ``convert_hf_to_gguf.py`` (``TextModel.set_gguf_parameters``) and
``gguf-py/gguf/constants.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from alto.errors import UnsupportedError

__all__ = ["USE_CONVERTER", "add_parameters", "architecture_of", "rope_factors"]

USE_CONVERTER = "write the merged model with --merged, and convert that folder with llama.cpp's convert_hf_to_gguf.py"

_ARCHITECTURES: Mapping[str, str] = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
"""Architectures of llama.cpp by the model types of transformers."""

_HEADS_DIFFER = "attention_factor", "mscale", "mscale_all_dim", "truncate"
"""Settings of YaRN that llama.cpp does not read, or interprets differently."""

_YARN_SPEEDS = ("beta_fast", "beta_slow")


def architecture_of(config: PreTrainedConfig) -> str:
    """Return llama.cpp's name of the architecture that ``config`` describes.

    Raises:
        UnsupportedError: ALTO cannot write this architecture, or llama.cpp computes one of its features differently.
    """
    kind = config.model_type
    if kind not in _ARCHITECTURES or not type(config).__module__.startswith("transformers."):
        raise _unsupported(f"a base model of the kinds {', '.join(_ARCHITECTURES)}", repr(kind))
    architecture, facts = _ARCHITECTURES[kind], config.to_dict()
    if facts.get("hidden_act") != "silu":
        raise _unsupported("hidden_act silu", repr(facts.get("hidden_act")))
    if architecture == "qwen3" and facts.get("attention_bias"):
        raise _unsupported("a Qwen3 model without biases", "attention_bias")
    rope = _rope(config)
    name = rope.get("rope_type", "default")
    known = ("default", "linear", "yarn", *(("llama3",) if architecture == "llama" else ()))
    if name not in known:
        raise _unsupported(f"rope_type {', '.join(known)}", repr(name))
    strange = [key for key in _HEADS_DIFFER if rope.get(key) is not None]
    if strange or rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise _unsupported(f"rope_type {name} with its usual factors", ", ".join(strange) or "partial_rotary_factor")
    return architecture


def add_parameters(writer: Any, config: PreTrainedConfig, architecture: str) -> tuple[str, ...]:
    """Add the hyperparameters of the model to the metadata of a file.

    Args:
        writer: A ``gguf.GGUFWriter``.
        architecture: See :func:`architecture_of`.

    Returns:
        Notices for the user, as sentences.
    """
    import gguf

    facts, rope = config.to_dict(), _rope(config)
    num_heads, head_dim = int(facts["num_attention_heads"]), _head_dim(config)
    length, notes = _context_length(config)
    writer.add_block_count(int(facts["num_hidden_layers"]))
    writer.add_context_length(length)
    writer.add_embedding_length(int(facts["hidden_size"]))
    writer.add_feed_forward_length(int(facts["intermediate_size"]))
    writer.add_head_count(num_heads)
    writer.add_head_count_kv(int(facts.get("num_key_value_heads") or num_heads))
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(float(facts["rms_norm_eps"]))
    writer.add_rope_freq_base(float(rope["rope_theta"]))
    if architecture == "llama":
        writer.add_vocab_size(int(facts["vocab_size"]))
        writer.add_rope_dimension_count(head_dim)
    if rope.get("rope_type") == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(float(rope["factor"]))
    elif rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(float(rope["factor"]))
        original = rope.get("original_max_position_embeddings") or facts["max_position_embeddings"]
        writer.add_rope_scaling_orig_ctx_len(int(original))
        for key in _YARN_SPEEDS:
            if rope.get(key) is not None:
                getattr(writer, f"add_rope_scaling_yarn_{key}")(float(rope[key]))
    return notes


def rope_factors(config: PreTrainedConfig, inverse_frequencies: Tensor) -> Tensor | None:
    """Return the factors by which llama.cpp divides the rotary frequencies (``rope_freqs.weight``).

    Args:
        inverse_frequencies: Inverse frequencies that the model computes, float32, ``[head_dim / 2]``.

    Returns:
        Factors, float32, ``[head_dim / 2]``; None if llama.cpp needs none.
    """
    rope, head_dim = _rope(config), _head_dim(config)
    if rope.get("rope_type") != "llama3":
        return None
    steps = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    return 1.0 / (float(rope["rope_theta"]) ** steps) / inverse_frequencies.float().cpu()


def _rope(config: PreTrainedConfig) -> dict[str, Any]:
    found: Any = getattr(config, "rope_parameters", None)
    return dict(found or {})


def _head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _context_length(config: Any) -> tuple[int, tuple[str, ...]]:
    """Return the context length and a notice.

    The length is limited to a sliding window of the model, because llama.cpp has no sliding windows in these
    architectures.
    """
    length, window = int(config.max_position_embeddings), getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"]
    if not window or window >= length or "sliding_attention" not in kinds:
        return length, ()
    return int(window), (
        f"The file's context length is {window} tokens, the base model's sliding window, because llama.cpp attends to "
        "the whole text.",
    )


def _unsupported(expected: str, found: str) -> UnsupportedError:
    return UnsupportedError(f"gguf: expected {expected}, found {found}; {USE_CONVERTER}")
