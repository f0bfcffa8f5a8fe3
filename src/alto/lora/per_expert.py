"""Adapters of stacked experts, written as one pair of matrices per projection of each expert, under the names that the
projections have in the base model's checkpoint.

vLLM expects this form for models that it does not declare as ``is_3d_moe_weight`` (Mixtral, Qwen2- and Qwen3-MoE,
OLMoE, DeepSeek-V3 and others). For the other models (gpt-oss, Qwen3.5-MoE, Qwen3-VL-MoE) it reads PEFT's own files,
where gate and up are one matrix, as in the checkpoint. Source: reading, not running, vLLM's
``vllm/lora/model_manager.py`` and ``PackedLoRALayerWeights.pack_moe``.

Shapes: ``E`` experts, ``K`` in-features, ``N`` out-features, ``R`` rank.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from alto.base import read_json
from alto.errors import UnsupportedError
from alto.lora.peft_format import CONFIG_FILE, ENDINGS, PREFIX, WEIGHTS_FILE
from alto.lora.peft_targets import expert_kind
from alto.lora.saved import SavedAdapter

_GATE_UP, _DOWN = "gate_up_proj", "down_proj"


@dataclass(frozen=True, slots=True)
class _Names:
    """The names of an expert's projections in a checkpoint.

    Attributes:
        block: Name of the block in the model, and its name in the checkpoint.
    """

    gate: str
    up: str
    down: str
    block: tuple[str, str] = (".mlp.", ".mlp.")


_KINDS: Mapping[str, _Names] = {
    "mixtral": _Names("w1", "w3", "w2", (".mlp.", ".block_sparse_moe.")),
    "qwen2_moe": _Names("gate_proj", "up_proj", "down_proj"),
}
"""By kind of mixture, as named in transformers' ``conversion_mapping``."""


def is_read_per_expert(adapter: SavedAdapter, model_type: str) -> bool:
    """Return whether, as far as is known, vLLM can read ``adapter`` only in the form that :func:`write_per_expert`
    writes."""
    return adapter.has_experts and _kind(model_type) is not None


def write_per_expert(adapter: SavedAdapter, model_type: str, folder: Path) -> None:
    """Write ``adapter`` with separate matrices for every expert. PEFT cannot load this form.

    Gate and up have the same ``A``. If only one of an expert's parameters is adapted, the matrices of the other are
    zero, because vLLM expects all three projections.

    Args:
        folder: Created if absent.

    Raises:
        UnsupportedError: The adapter has no experts, more than one rank or scale, or tensors other than low-rank
            matrices; or the base model's checkpoint stores its experts stacked.
    """
    names = _kind(model_type)
    experts = {name: adapter.weights[name] for name in adapter.weights.experts}
    if not experts:
        raise UnsupportedError(
            f"{adapter.folder}: expected an adapter on stacked experts (target_parameters), found none; serve "
            "the folder as it is"
        )
    if names is None:
        raise UnsupportedError(
            f"{adapter.folder}: expected a base model whose checkpoint stores every expert separately, found model "
            f"type {model_type!r}; serve the folder as it is"
        )
    if adapter.has_patterns or adapter.weights.extras:
        raise UnsupportedError(
            f"{adapter.folder}: expected low-rank matrices of one rank and one scale, found rank_pattern, "
            "alpha_pattern, bias or use_dora; merge it into its base model with PEFT"
        )
    owners = {name.rpartition(".")[0] for name in experts}
    pairs = {name: (a_KR.T, b_RN.T) for name, (a_KR, b_RN) in adapter.weights.items() if name not in experts}
    for owner in owners:
        pairs |= _of_experts(owner, experts, adapter.rank, names)
    blocks = {owner.rpartition(".")[0] + "." for owner in owners}
    tensors = {}
    for name, pair in pairs.items():
        block = next((block for block in blocks if name.startswith(block)), "")
        place = block.replace(*names.block) + name.removeprefix(block)
        for ending, matrix in zip(ENDINGS, pair, strict=True):
            tensors[f"{PREFIX}{place}{ending}"] = matrix.contiguous()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    config = _config(read_json(adapter.config_file), tensors)
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _kind(model_type: str) -> _Names | None:
    return _KINDS.get(expert_kind(model_type) or model_type)


def _of_experts(
    owner: str, experts: Mapping[str, tuple[Tensor, Tensor]], rank: int, names: _Names
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return ``A`` ``[R, K]`` and ``B`` ``[N, R]`` of every projection of the experts of ``owner``, by name."""
    gate_up, down = experts.get(f"{owner}.{_GATE_UP}"), experts.get(f"{owner}.{_DOWN}")
    if gate_up is None:
        assert down is not None
        (num_experts, inner, _), hidden = down[0].shape, down[1].shape[2]
        gate_up = _zeros(num_experts, hidden, rank, 2 * inner)
    if down is None:
        num_experts, hidden, inner = gate_up[0].shape[0], gate_up[0].shape[1], gate_up[1].shape[2] // 2
        down = _zeros(num_experts, inner, rank, hidden)
    a_EKR, (b_gate_ERN, b_up_ERN) = gate_up[0], gate_up[1].chunk(2, dim=2)
    found = {}
    for name, a, b in ((names.gate, a_EKR, b_gate_ERN), (names.up, a_EKR, b_up_ERN), (names.down, *down)):
        for expert, (a_KR, b_RN) in enumerate(zip(a, b, strict=True)):
            found[f"{owner}.{expert}.{name}"] = (a_KR.T, b_RN.T)
    return found


def _zeros(num_experts: int, num_in: int, rank: int, num_out: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(num_experts, num_in, rank), torch.zeros(num_experts, rank, num_out)


def _config(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the adapter's configuration, with the modules that its tensors name as ``target_modules``."""
    modules = sorted({key.removesuffix(ENDINGS[0]).rpartition(".")[2] for key in tensors if key.endswith(ENDINGS[0])})
    return {key: value for key, value in config.items() if key != "target_parameters"} | {"target_modules": modules}
