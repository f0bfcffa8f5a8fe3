"""Adapters on disk in PEFT's format (``adapter_config.json``, ``adapter_model.safetensors``), without needing PEFT.

Format: https://huggingface.co/docs/peft/developer_guides/checkpoint
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from alto.lora.bank import AdapterWeights
from alto.lora.layout import TargetModule
from alto.spec import JobConfig

__all__ = ["read_adapter", "write_adapter"]

WEIGHTS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"
_PREFIX = "base_model.model."


def write_adapter(
    folder: Path, weights: AdapterWeights, config: JobConfig, base_model: str, model_modules: Iterable[TargetModule]
) -> None:
    """Write one adapter; ``peft.PeftModel.from_pretrained(base, folder)`` loads it.

    Args:
        folder: Made if absent; files of an earlier adapter are replaced.
        base_model: What ``from_pretrained`` takes for the base model.
        model_modules: All linear modules of the base, so that the targets can be named as briefly as is unambiguous.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, (a_KR, b_RN) in weights.items():
        tensors[f"{_PREFIX}{name}.lora_A.weight"] = a_KR.T.contiguous()
        tensors[f"{_PREFIX}{name}.lora_B.weight"] = b_RN.T.contiguous()
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    description = _adapter_config(config, base_model, _target_names(weights, model_modules))
    (folder / CONFIG_FILE).write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")


def read_adapter(folder: Path) -> AdapterWeights:
    """The weights that :func:`write_adapter` (or PEFT) wrote into ``folder``."""
    tensors = load_file(folder / WEIGHTS_FILE)
    weights = {}
    for key in sorted(tensors):
        if key.endswith(".lora_A.weight"):
            name = key.removeprefix(_PREFIX).removesuffix(".lora_A.weight")
            b_key = f"{_PREFIX}{name}.lora_B.weight"
            weights[name] = (tensors[key].T.contiguous(), tensors[b_key].T.contiguous())
    return weights


def _adapter_config(config: JobConfig, base_model: str, target_modules: list[str]) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": config.r,
        "lora_alpha": config.lora_alpha,
        "lora_dropout": config.lora_dropout,
        "use_rslora": config.use_rslora,
        "target_modules": target_modules,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True if config.init_lora_weights == "default" else config.init_lora_weights,
        "inference_mode": True,
    }


def _target_names(weights: AdapterWeights, model_modules: Iterable[TargetModule]) -> list[str]:
    """Leaf names where they mean exactly the adapter's modules, full names otherwise."""
    leaves = {name.rsplit(".", 1)[-1] for name in weights}
    meant = {module.name for module in model_modules if module.name.rsplit(".", 1)[-1] in leaves}
    return sorted(leaves) if meant == set(weights) else sorted(weights)
