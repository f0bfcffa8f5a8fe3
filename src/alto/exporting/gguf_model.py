"""Writing of a model to one GGUF file for llama.cpp.

Conventions are those of llama.cpp, ``convert_hf_to_gguf.py`` (``ModelBase.prepare_tensors``, ``LlamaModel.permute``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from alto.backbone import load_config, load_tokenizer
from alto.errors import ModelError, UnsupportedError
from alto.exporting.gguf_parameters import USE_CONVERTER, add_parameters, architecture_of, rope_factors
from alto.exporting.gguf_vocabulary import add_vocabulary
from alto.exporting.winner import Winner
from alto.records import GgufType

__all__ = ["GgufModel", "check_writable"]

_FILE_TYPES: Mapping[GgufType, str] = {"f16": "MOSTLY_F16", "q8_0": "MOSTLY_Q8_0"}
_LARGEST_F16 = 65504.0
_BIASED: Mapping[str, tuple[str, ...]] = {
    "llama": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    "qwen2": ("q_proj", "k_proj", "v_proj"),
    "qwen3": (),
}
"""Layers whose biases llama.cpp reads, by architecture."""


def check_writable() -> None:
    """Check that GGUF files can be written here.

    Raises:
        UnsupportedError: The package gguf is not installed.
    """
    try:
        import gguf  # noqa: F401
    except ImportError:
        raise UnsupportedError(
            "gguf: expected the package gguf, found that it is not installed; pip install 'alto-lora[gguf]', or "
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
        """Return the description of the merged model of ``winner``; no weights are read.

        Raises:
            UnsupportedError: The base model, its tokenizer or the adapter has a feature that ALTO cannot write.
        """
        import gguf

        if winner.adapter.has_head:
            raise UnsupportedError(
                "gguf: expected a causal language model, found a classification head; write the model with --merged"
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
        import gguf

        arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == self._architecture)
        names = gguf.get_tensor_name_map(arch, int(self._config.num_hidden_layers))
        found: dict[str, Tensor] = {}
        for name, weight in model.state_dict().items():
            if name == "lm_head.weight" and model.config.tie_word_embeddings:
                continue
            module, _, leaf = name.rpartition(".")
            mapped = names.get_name(name, try_suffixes=(".weight", ".bias"))
            if mapped is None or (leaf == "bias" and module.rpartition(".")[2] not in _BIASED[self._architecture]):
                raise UnsupportedError(
                    f"gguf: expected tensors that llama.cpp reads in {self._architecture}, found {name}; "
                    f"{USE_CONVERTER}"
                )
            found[mapped] = self._in_order(module.rpartition(".")[2], weight.detach().float())
        rotary: Any = model.get_submodule("model.rotary_emb")
        factors = rope_factors(self._config, rotary.inv_freq)
        if factors is not None:
            found = {"rope_freqs.weight": factors, **found}
        for name, weight in found.items():
            largest = weight.abs().max().item()
            if not largest <= _LARGEST_F16:
                raise ModelError(
                    f"gguf: expected finite weights of at most {_LARGEST_F16:g}, which float16 holds, found "
                    f"{largest:g} in {name}; write the model with --merged"
                )
        return found

    def write(self, path: Path, tensors: Mapping[str, Tensor]) -> None:
        """Write the file; tensors are converted one at a time.

        Args:
            tensors: See :meth:`tensors`.

        Raises:
            OSError: The disk is full or cannot be written.
        """
        from gguf.quants import quantize

        writer = self._writer
        kinds = {name: self._kind(name, weight) for name, weight in tensors.items()}
        for name, weight in tensors.items():
            shape, dtype = _layout(tuple(weight.shape), kinds[name])
            writer.add_tensor_info(name, shape, dtype, int(np.prod(shape)) * dtype.itemsize, raw_dtype=kinds[name])
        try:
            writer.write_header_to_file(path)
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for name, data in _arrays(tensors):
                writer.write_tensor_data(quantize(data, kinds[name]))
            writer.flush()
        finally:
            writer.close()

    def _in_order(self, layer: str, weight: Tensor) -> Tensor:
        """Return ``weight`` with rows in llama.cpp's order.

        In llama.cpp, rows of a query or key head alternate between the two halves that are rotated together; in
        transformers, one half follows the other.
        """
        if self._architecture != "llama" or layer not in ("q_proj", "k_proj"):
            return weight
        config: Any = self._config
        num_heads = config.num_attention_heads if layer == "q_proj" else config.num_key_value_heads
        halves = weight.unflatten(0, (num_heads, 2, -1))
        return halves.transpose(1, 2).flatten(0, 2).contiguous()

    def _kind(self, name: str, weight: Tensor) -> Any:
        from gguf import GGMLQuantizationType as Kind

        if weight.ndim == 1 or name.endswith("_norm.weight"):
            return Kind.F32
        return Kind.Q8_0 if self.type == "q8_0" and weight.shape[-1] % 32 == 0 else Kind.F16


def _arrays(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Any]]:
    for name, weight in tensors.items():
        yield name, weight.to(torch.float32).cpu().numpy()


def _layout(shape: tuple[int, ...], kind: Any) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Return the array shape and dtype of a tensor in a GGUF file."""
    from gguf import GGMLQuantizationType as Kind
    from gguf.quants import quant_shape_to_byte_shape

    if kind == Kind.Q8_0:
        return tuple(quant_shape_to_byte_shape(shape, kind)), np.dtype(np.uint8)
    return shape, np.dtype(np.float16 if kind == Kind.F16 else np.float32)
