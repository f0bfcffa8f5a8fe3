"""PEFT puts an adapter on exactly the modules it was trained on, on mixtures of experts too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from moe_models import MIXTURES, build_mixture
from peft import PeftModel
from peft.utils import transformers_weight_conversion as conversion
from peft_adapters import write_random
from transformers import CONFIG_MAPPING

from alto.lora import ModuleNames, adapter_scale
from alto.lora.peft_targets import PeftTargets, expert_names, peft_targets
from alto.spec import JobConfig

# PEFT asks transformers for a property under its old name.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

IDS = torch.tensor([[3, 5, 8, 13, 21, 34, 55, 2], [1, 1, 2, 3, 5, 8, 13, 21]])
MLP = ["q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TARGETS = {
    "mixtral": "all-linear",
    "qwen2-moe-shared": MLP,  # its shared expert's gate has one output: too few for rank 3
    "qwen3-moe-dense": "all-linear",
    "deepseek-v3": "all-linear",
}


@torch.no_grad()
@pytest.mark.parametrize("use_rslora", [False, True])
@pytest.mark.parametrize("name", MIXTURES)
def test_peft_reads_back_what_was_trained_on_a_mixture_of_experts(name: str, use_rslora: bool, tmp_path: Path) -> None:
    config = JobConfig(r=3, lora_alpha=12, lora_dropout=0.1, use_rslora=use_rslora, target_modules=TARGETS[name])
    weights = write_random(build_mixture(name), tmp_path, config)
    expected = build_mixture(name)
    before = expected(input_ids=IDS).logits
    for module, (a_KR, b_RN) in weights.items():
        expected.get_submodule(module).weight += adapter_scale(config) * (a_KR @ b_RN).T
    after = expected(input_ids=IDS).logits
    assert (after - before).norm() / before.norm() > 0.1

    peft = PeftModel.from_pretrained(build_mixture(name), tmp_path)
    wrapped = {
        module.removeprefix("base_model.model.") for module, found in peft.named_modules() if hasattr(found, "lora_A")
    }
    assert wrapped == set(weights)
    assert (peft(input_ids=IDS).logits - after).norm() / after.norm() < 1e-5
    merged = peft.merge_and_unload()
    assert (merged(input_ids=IDS).logits - after).norm() / after.norm() < 1e-5


def test_a_dense_layer_beside_experts_is_named_by_its_weight(tmp_path: Path) -> None:
    config = JobConfig(r=3, lora_dropout=0.1, target_modules=MLP)
    write_random(build_mixture("qwen3-moe-dense"), tmp_path, config)
    described = json.loads((tmp_path / "adapter_config.json").read_text())
    assert described["target_modules"] == ["o_proj", "q_proj"]
    mlp = "model.layers.0.mlp"
    assert described["target_parameters"] == [f"{mlp}.{leaf}.weight" for leaf in ("down_proj", "gate_proj", "up_proj")]
    assert described["lora_dropout"] == 0.0  # PEFT refuses any beside target_parameters
    config = config.replace(target_modules=["q_proj"])
    write_random(build_mixture("qwen3-moe-dense"), tmp_path, config)
    described = json.loads((tmp_path / "adapter_config.json").read_text())
    assert "target_parameters" not in described
    assert described["lora_dropout"] == 0.1


def test_a_short_name_is_used_only_where_no_other_module_has_it() -> None:
    """A router that is no linear layer may end in the same name as a linear one elsewhere."""
    model = ModuleNames(modules=frozenset({"layers.0.gate", "layers.1.gate", "layers.1.up"}), model_type="other")
    assert peft_targets({"layers.0.gate"}, model) == PeftTargets(modules=["layers.0.gate"], parameters=[])
    assert peft_targets({"layers.1.up"}, model) == PeftTargets(modules=["up"], parameters=[])


def test_the_names_that_peft_takes_for_experts_are_known_of_every_model_type() -> None:
    kinds = conversion._MODEL_TO_CONVERSION_PATTERN
    theirs = {name: conversion._MOE_TARGET_MODULE_MAPPING.get(kinds.get(name, ""), {}) for name in CONFIG_MAPPING}
    assert {name: dict(expert_names(name)) for name in theirs} == theirs
    assert sum(map(bool, theirs.values())) > 10
