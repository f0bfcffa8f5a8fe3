"""Finds tensors of an adapter that PEFT would look for under other names than the names under which they were trained.

PEFT applies transformers' renamings of old checkpoints to the names in an adapter. If a renaming also matches a current
name, the module gets no adapter.
"""

from __future__ import annotations

import torch
from peft import LoraConfig
from peft.utils.transformers_weight_conversion import convert_peft_adapter_state_dict_for_transformers
from transformers import PreTrainedModel

from alto.lora import AdapterWeights, adaptable, as_in_peft

__all__ = ["renamed_by_peft"]

_RANK = 2


def renamed_by_peft(model: PreTrainedModel) -> list[str]:
    """Return PEFT's names of the modules and parameters of ``model`` that may have adapters and would lose them."""
    weights = {}
    for target in adaptable(model):
        experts = (target.num_experts,) if target.num_experts else ()
        a = torch.zeros(*experts, target.in_features, _RANK)
        weights[target.name] = a, torch.zeros(*experts, _RANK, target.out_features)
    tensors = {
        f"base_model.model.{name}.lora_{half}.weight": matrix
        for name, pair in as_in_peft(AdapterWeights(weights)).items()
        for half, matrix in zip("AB", pair, strict=True)
    }
    config = LoraConfig(r=_RANK, target_modules=list(weights))
    found = convert_peft_adapter_state_dict_for_transformers(model, config, dict(tensors))
    return sorted({name.rpartition(".lora_")[0].removeprefix("base_model.model.") for name in tensors.keys() - found})
