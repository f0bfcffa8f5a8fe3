"""A merged model, or an adapter alone, as a GGUF file: parameters, vocabulary, metadata."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from alto.artifacts.gguf_vocabulary import USE_CONVERTER, add_vocabulary, unsupported
from alto.artifacts.winner import Winner
from alto.backbone import load_config, load_tokenizer
from alto.errors import ModelError, UnsupportedError
from alto.records import GgufType
from alto.version import install_command

# Hyperparameters of a model in a GGUF file, under the keys of llama.cpp.
#
# Conventions come from llama.cpp, ``convert_hf_to_gguf.py`` (``TextModel.set_gguf_parameters``) and ``gguf-
# py/gguf/constants.py``.

_ARCHITECTURES: Mapping[str, str] = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma3_text": "gemma3",
}
"""Architectures of llama.cpp by the model types of transformers."""

_ROPE_TYPES: Mapping[str, tuple[str, ...]] = {
    "llama": ("default", "linear", "yarn", "llama3"),
    "qwen2": ("default", "linear", "yarn"),
    "qwen3": ("default", "linear", "yarn"),
    "gemma3": ("default", "linear"),
}

_UNREAD_YARN_KEYS = "attention_factor", "mscale", "mscale_all_dim", "truncate"
"""Settings of YaRN that llama.cpp does not read, or interprets differently."""

_YARN_SPEEDS = ("beta_fast", "beta_slow")


def architecture_of(config: PreTrainedConfig) -> str:
    """Return llama.cpp's name of the architecture that ``config`` describes."""
    kind = config.model_type
    if kind not in _ARCHITECTURES or not type(config).__module__.startswith("transformers."):
        raise unsupported(f"a base model of the kinds {', '.join(_ARCHITECTURES)}", repr(kind))
    architecture, facts = _ARCHITECTURES[kind], config.to_dict()
    if architecture == "gemma3":
        _check_gemma(config, facts)
    elif facts.get("hidden_act") != "silu":
        raise unsupported("hidden_act silu", repr(facts.get("hidden_act")))
    if architecture == "qwen3" and facts.get("attention_bias"):
        raise unsupported("a Qwen3 model without biases", "attention_bias")
    rope = _rope(config)
    name = rope.get("rope_type", "default")
    if name not in _ROPE_TYPES[architecture]:
        raise unsupported(f"rope_type {', '.join(_ROPE_TYPES[architecture])}", repr(name))
    strange = [key for key in _UNREAD_YARN_KEYS if rope.get(key) is not None]
    if strange or rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise unsupported(f"rope_type {name} with its usual factors", ", ".join(strange) or "partial_rotary_factor")
    return architecture


_GEMMA_PERIOD = 6
"""llama.cpp takes every sixth layer of a Gemma 3 as one that attends to the whole text."""

_GEMMA_27B_LAYERS = 62


def _check_gemma(config: Any, facts: Mapping[str, Any]) -> None:
    """Check that a Gemma 3 has the values that llama.cpp assumes, because a file has no key for them."""
    num_heads, num_layers = int(facts["num_attention_heads"]), int(facts["num_hidden_layers"])
    is_27b = num_layers == _GEMMA_27B_LAYERS
    sliding: Mapping[str, Any] = config.rope_parameters["sliding_attention"]
    assumed = {
        "hidden_activation": (facts["hidden_activation"], "gelu_pytorch_tanh"),
        "attention_bias": (bool(facts["attention_bias"]), False),
        "attn_logit_softcapping": (facts["attn_logit_softcapping"], None),
        "use_bidirectional_attention": (bool(facts["use_bidirectional_attention"]), False),
        "query_pre_attn_scalar": (
            facts["query_pre_attn_scalar"],
            facts["hidden_size"] // num_heads if is_27b else _head_dim(config),
        ),
        "layer_types": (
            [kind == "full_attention" for kind in facts["layer_types"]],
            [(layer + 1) % _GEMMA_PERIOD == 0 for layer in range(num_layers)],
        ),
        "rope_parameters of sliding layers": (
            (sliding["rope_theta"], sliding.get("rope_type", "default")),
            (10_000.0, "default"),
        ),
    }
    for key, (found, expected) in assumed.items():
        if found != expected:
            raise unsupported(f"a Gemma 3 with {key} {expected}", str(found))


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
    if architecture == "gemma3":
        writer.add_sliding_window(int(facts["sliding_window"]))
        if facts["final_logit_softcapping"]:
            writer.add_final_logit_softcapping(float(facts["final_logit_softcapping"]))
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
    """Return the rotary settings of layers that attend to the whole text."""
    found: Any = getattr(config, "rope_parameters", None) or {}
    return dict(found.get("full_attention", found))


def _head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _context_length(config: Any) -> tuple[int, tuple[str, ...]]:
    """Return the context length and a notice.

    Except for Gemma, the length is at most the model's sliding window, because llama.cpp has no window in the other
    architectures of this file.
    """
    length, window = int(config.max_position_embeddings), getattr(config, "sliding_window", None)
    if config.model_type == "gemma3_text":
        return length, ()
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"]
    if not window or window >= length or "sliding_attention" not in kinds:
        return length, ()
    return int(window), (
        f"The file's context length is {window} tokens, the base model's sliding window, because llama.cpp attends to "
        "the whole text.",
    )


# Writing of a model to one GGUF file for llama.cpp.
#
# Conventions come from llama.cpp, ``convert_hf_to_gguf.py`` (``ModelBase.prepare_tensors``, ``LlamaModel.permute``).

_FILE_TYPES: Mapping[GgufType, str] = {"f16": "MOSTLY_F16", "q8_0": "MOSTLY_Q8_0"}
_LARGEST_F16 = 65504.0
_BIASED: Mapping[str, tuple[str, ...]] = {
    "llama": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    "qwen2": ("q_proj", "k_proj", "v_proj"),
    "qwen3": (),
    "gemma3": (),
}
"""Layers whose biases llama.cpp reads, by architecture."""


def check_writable() -> None:
    """Check that GGUF files can be written here."""
    try:
        import gguf  # noqa: F401
    except ImportError:
        raise UnsupportedError(
            f"gguf: expected the package gguf, found that it is not installed; {install_command('gguf')}, or "
            f"{USE_CONVERTER}"
        ) from None


@dataclass(frozen=True, kw_only=True)
class GgufModel:
    """The contents of a GGUF file except its tensors.

    Attributes:
        type: Type of the matrices. Vectors are float32; matrices whose row length is not a multiple of 32 are float16.
        notes: Notices for the user, as sentences.
    """

    file_name: str
    type: GgufType
    notes: tuple[str, ...]
    _writer: Any
    _config: PreTrainedConfig
    _architecture: str

    @classmethod
    def of(cls, winner: Winner, type: GgufType) -> Self:
        """Return the description of the merged model of ``winner``; no weights are read."""
        import gguf

        if winner.adapter.has_head:
            raise UnsupportedError(
                "gguf: expected a causal language model, found a classification head; use --merged instead"
            )
        config = load_config(winner.base)
        architecture = architecture_of(config)
        writer = gguf.GGUFWriter(None, architecture)
        writer.add_type(gguf.GGUFType.MODEL)
        writer.add_name(winner.name)
        notes = add_parameters(writer, config, architecture)
        writer.add_file_type(gguf.LlamaFileType[_FILE_TYPES[type]])
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        add_vocabulary(writer, load_tokenizer(winner.base), int(config.vocab_size))
        return cls(
            file_name=f"{winner.name}-{type.upper()}.gguf",
            type=type,
            notes=notes,
            _writer=writer,
            _config=config,
            _architecture=architecture,
        )

    def tensors(self, model: PreTrainedModel) -> dict[str, Tensor]:
        """Return the tensors of ``model`` by their names in the file, float32; query and key rows are in llama.cpp's
        order.

        Raises:
            UnsupportedError: llama.cpp has no name for a tensor.
            ModelError: A number is not finite, or too large for float16.
        """
        names = _tensor_names(self._config, self._architecture)
        found: dict[str, Tensor] = {}
        for name, weight in model.state_dict().items():
            if name == "lm_head.weight" and model.config.tie_word_embeddings:
                continue
            module, _, leaf = name.rpartition(".")
            mapped = names.get_name(name, try_suffixes=(".weight", ".bias"))
            if mapped is None or (leaf == "bias" and module.rpartition(".")[2] not in _BIASED[self._architecture]):
                raise UnsupportedError(
                    f"gguf: expected tensors that llama.cpp knows for {self._architecture}, found {name}; "
                    f"{USE_CONVERTER}"
                )
            found[mapped] = _in_order(self._config, self._architecture, module, weight.detach().float())
            if self._architecture == "gemma3" and module.endswith("norm"):
                found[mapped] = found[mapped] + 1  # transformers adds it when it computes, llama.cpp does not
        rotary: Any = model.get_submodule("model.rotary_emb")
        factors = rope_factors(self._config, rotary.inv_freq) if self._architecture == "llama" else None
        if factors is not None:
            found = {"rope_freqs.weight": factors, **found}
        for name, weight in found.items():
            largest = weight.abs().max().item()
            if not largest <= _LARGEST_F16:
                raise ModelError(
                    f"gguf: expected finite weights of at most {_LARGEST_F16:g}, which float16 holds, found "
                    f"{largest:g} in {name}; use --merged instead"
                )
        return found

    def write(self, path: Path, tensors: Mapping[str, Tensor]) -> None:
        """Write the file; tensors are converted one at a time."""
        _write(self._writer, path, tensors, {name: self._kind(name, weight) for name, weight in tensors.items()})

    def _kind(self, name: str, weight: Tensor) -> Any:
        from gguf import GGMLQuantizationType as Kind

        if weight.ndim == 1 or name.endswith("_norm.weight"):
            return Kind.F32
        return Kind.Q8_0 if self.type == "q8_0" and weight.shape[-1] % 32 == 0 else Kind.F16


@dataclass(frozen=True, kw_only=True)
class GgufAdapter:
    """An adapter as a GGUF file, for ``llama-server --lora`` and Ollama's ``ADAPTER``.

    llama.cpp scales all modules by one ``alpha``, or not at all if it is 0. The file has 0, and each ``B`` is
    multiplied by its module's scale, so ``use_rslora`` and ``alpha_pattern`` have their effect.

    Source: llama.cpp, ``src/llama-adapter.cpp`` and ``convert_lora_to_gguf.py``.

    Attributes:
        tensors: ``A`` as ``[r, K]`` and ``B`` as ``[N, r]`` by their names in the file, float32. On the embeddings
            ``A`` is ``[V, r]``.
    """

    file_name: str
    tensors: Mapping[str, Tensor]
    _writer: Any

    @classmethod
    def of(cls, winner: Winner) -> Self:
        """Return the adapter of ``winner``.

        Raises:
            UnsupportedError: llama.cpp cannot apply it.
        """
        import gguf

        adapter, config = winner.adapter, load_config(winner.base)
        if adapter.weights.extras:
            raise _not_alone("low-rank matrices alone", adapter.extra_kinds)
        architecture = architecture_of(config)
        names = _tensor_names(config, architecture)
        tensors: dict[str, Tensor] = {}
        for module, (a_KR, b_RN) in adapter.weights.items():
            mapped = names.get_name(f"{module}.weight", try_suffixes=(".weight",))
            if mapped is None or a_KR.ndim != 2:
                raise _not_alone(f"modules that llama.cpp knows for {architecture}", module)
            if config.tie_word_embeddings and mapped in _TIED:
                raise _not_alone("unchanged embeddings where they are tied to the output head", module)
            a = a_KR if mapped == _EMBEDDINGS else a_KR.T
            tensors[f"{mapped}.lora_a"] = a.contiguous()
            b_NR = (b_RN * adapter.scales[module]).T.contiguous()
            tensors[f"{mapped}.lora_b"] = _in_order(config, architecture, module, b_NR)
        writer = gguf.GGUFWriter(None, architecture)
        writer.add_type(gguf.GGUFType.ADAPTER)
        writer.add_name(winner.name)
        writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
        writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, 0.0)
        writer.add_file_type(gguf.LlamaFileType.ALL_F32)
        return cls(file_name=f"{winner.name}-lora.gguf", tensors=tensors, _writer=writer)

    def write(self, path: Path) -> None:
        """Write the file."""
        from gguf import GGMLQuantizationType as Kind

        _write(self._writer, path, self.tensors, dict.fromkeys(self.tensors, Kind.F32))


_EMBEDDINGS = "token_embd.weight"
_TIED = (_EMBEDDINGS, "output.weight")


def _not_alone(expected: str, found: str) -> UnsupportedError:
    return UnsupportedError(
        f"gguf: expected an adapter with {expected}, found {found}; --gguf f16 writes the merged model"
    )


def _tensor_names(config: Any, architecture: str) -> Any:
    """Return gguf's map from transformers' names of tensors to those of llama.cpp."""
    import gguf

    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    return gguf.get_tensor_name_map(arch, int(config.num_hidden_layers))


def _in_order(config: Any, architecture: str, module: str, weight: Tensor) -> Tensor:
    """Return ``weight`` of a module with rows in llama.cpp's order.

    In llama.cpp, rows of a query or key head alternate between the two halves that are rotated together; in
    transformers, one half follows the other.
    """
    layer = module.rpartition(".")[2]
    if architecture != "llama" or layer not in ("q_proj", "k_proj"):
        return weight
    num_heads = config.num_attention_heads if layer == "q_proj" else config.num_key_value_heads
    halves = weight.unflatten(0, (num_heads, 2, -1))
    return halves.transpose(1, 2).flatten(0, 2).contiguous()


def _write(writer: Any, path: Path, tensors: Mapping[str, Tensor], kinds: Mapping[str, Any]) -> None:
    """Write the metadata of ``writer`` and ``tensors`` of these types to a file."""
    from gguf.quants import quantize

    for name, weight in tensors.items():
        shape, dtype = _layout(tuple(weight.shape), kinds[name])
        writer.add_tensor_info(name, shape, dtype, int(np.prod(shape)) * dtype.itemsize, raw_dtype=kinds[name])
    try:
        writer.write_header_to_file(path)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for name, weight in tensors.items():
            writer.write_tensor_data(quantize(weight.to(torch.float32).cpu().numpy(), kinds[name]))
        writer.flush()
    finally:
        writer.close()


def _layout(shape: tuple[int, ...], kind: Any) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Return the array shape and dtype of a tensor in a GGUF file."""
    from gguf import GGMLQuantizationType as Kind
    from gguf.quants import quant_shape_to_byte_shape

    if kind == Kind.Q8_0:
        return tuple(quant_shape_to_byte_shape(shape, kind)), np.dtype(np.uint8)
    return shape, np.dtype(np.float16 if kind == Kind.F16 else np.float32)
