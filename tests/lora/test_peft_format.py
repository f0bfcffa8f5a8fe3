"""Adapters on disk: PEFT reads ours, applies an adapter to the modules it was trained on, and we read PEFT's."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from moe_models import MIXTURES, build_mixture
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils import transformers_weight_conversion as conversion
from peft_adapters import write_random
from transformers import CONFIG_MAPPING, PreTrainedModel

from alto.lora import (
    AdapterWeights,
    ModuleNames,
    TargetModule,
    adapter_scale,
    find_targets,
    read_adapter,
    write_adapter,
)
from alto.lora.peft_targets import PeftTargets, expert_names, peft_targets
from alto.spec import JobConfig

# PEFT reads a transformers property by its deprecated name.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

IDS = torch.tensor([[3, 5, 8, 13, 21]])
CONFIG = JobConfig(r=3, lora_alpha=12, lora_dropout=0.1)
ModelFactory = Callable[..., PreTrainedModel]


def random_weights(targets: tuple[TargetModule, ...], rank: int = 3) -> AdapterWeights:
    generator = torch.Generator().manual_seed(0)
    return AdapterWeights(
        {
            module.name: (
                torch.randn(module.in_features, rank, generator=generator) / 6,
                torch.randn(rank, module.out_features, generator=generator) / 6,
            )
            for module in targets
        }
    )


def written(model: PreTrainedModel, folder: Path, names: str | list[str]) -> AdapterWeights:
    weights = random_weights(find_targets(model, names))
    write_adapter(folder, weights, CONFIG, "some/base", ModuleNames.of(model))
    return weights


@torch.no_grad()
@pytest.mark.parametrize(
    "names", ["all-linear", ["q_proj", "v_proj"], ["model.layers.1.mlp.up_proj", "0.self_attn.k_proj"]]
)
def test_peft_loads_it_and_computes_the_same(tiny_model: ModelFactory, tmp_path: Path, names: str | list[str]) -> None:
    model = tiny_model("llama")
    weights = written(model, tmp_path, names)
    expected = tiny_model("llama")
    for name, (a, b) in weights.items():
        expected.get_submodule(name).weight += adapter_scale(CONFIG) * (a @ b).T
    before = model(input_ids=IDS).logits
    peft = PeftModel.from_pretrained(model, tmp_path)
    found = peft(input_ids=IDS).logits
    torch.testing.assert_close(found, expected(input_ids=IDS).logits, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(found, before, rtol=1e-2, atol=1e-2)
    wrapped = {
        name.removeprefix("base_model.model.") for name, module in peft.named_modules() if hasattr(module, "lora_A")
    }
    assert wrapped == set(weights)
    settings = peft.peft_config["default"]
    assert (settings.r, settings.lora_alpha, settings.lora_dropout, settings.bias) == (3, 12, 0.1, "none")
    assert settings.base_model_name_or_path == "some/base"
    assert settings.task_type == "CAUSAL_LM"
    assert settings.inference_mode


@pytest.mark.parametrize(
    ("names", "targets"),
    [
        ("all-linear", ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]),
        (["v_proj", "q_proj"], ["q_proj", "v_proj"]),
        (["model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj"], ["up_proj"]),
        (["model.layers.1.mlp.up_proj"], ["model.layers.1.mlp.up_proj"]),
        (
            ["0.self_attn.q_proj", "0.mlp.up_proj"],
            ["model.layers.0.mlp.up_proj", "model.layers.0.self_attn.q_proj"],
        ),
    ],
)
def test_targets_are_named_as_briefly_as_is_unambiguous(
    tiny_model: ModelFactory, tmp_path: Path, names: str | list[str], targets: list[str]
) -> None:
    written(tiny_model("llama"), tmp_path, names)
    assert json.loads((tmp_path / "adapter_config.json").read_text(encoding="utf-8"))["target_modules"] == targets


@torch.no_grad()
@pytest.mark.parametrize(
    "config",
    [
        JobConfig(r=3, lora_alpha=12, use_rslora=True),
        JobConfig(r=3, lora_alpha=12, init_lora_weights="gaussian"),
        JobConfig(r=3, lora_alpha=12, target_modules=r".*\.1\..*(k_proj|up_proj|fc1)", loraplus_lr_ratio=4.0),
    ],
    ids=["rslora", "gaussian", "pattern"],
)
@pytest.mark.parametrize("architecture", ["llama", "phi", "gemma3"])
def test_options_go_through_peft(
    tiny_model: ModelFactory, tmp_path: Path, architecture: str, config: JobConfig
) -> None:
    model = tiny_model(architecture)
    weights = random_weights(find_targets(model, config.target_modules))
    write_adapter(tmp_path, weights, config, "some/base", ModuleNames.of(model))
    expected = tiny_model(architecture)
    for name, (a, b) in weights.items():
        expected.get_submodule(name).weight += adapter_scale(config) * (a @ b).T
    peft = PeftModel.from_pretrained(model, tmp_path)
    wrapped = [name.removeprefix("base_model.model.") for name, m in peft.named_modules() if hasattr(m, "lora_A")]
    assert wrapped == list(weights)
    torch.testing.assert_close(peft(input_ids=IDS).logits, expected(input_ids=IDS).logits, rtol=1e-4, atol=1e-4)
    settings = peft.peft_config["default"]
    assert settings.use_rslora == config.use_rslora
    assert settings.init_lora_weights == ("gaussian" if config.init_lora_weights == "gaussian" else True)


def test_read_is_the_inverse_of_write_and_later_files_replace_earlier(tiny_model: ModelFactory, tmp_path: Path) -> None:
    model = tiny_model("llama")
    written(model, tmp_path / "new" / "folder", "all-linear")
    weights = written(model, tmp_path / "new" / "folder", ["q_proj"])
    found = read_adapter(tmp_path / "new" / "folder")
    assert found.keys() == weights.keys()
    for name, pair in weights.items():
        assert all(torch.equal(left, right) for left, right in zip(found[name], pair, strict=True))
        assert all(matrix.is_contiguous() for matrix in found[name])


def test_what_peft_writes_is_read(tiny_model: ModelFactory, tmp_path: Path) -> None:
    peft = get_peft_model(tiny_model("llama"), LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    peft.save_pretrained(tmp_path)
    found = read_adapter(tmp_path)
    assert len(found) == 4
    for name, (a, b) in found.items():
        wrapped = peft.get_submodule(f"base_model.model.{name}")
        assert torch.equal(a, wrapped.lora_A["default"].weight.T)
        assert torch.equal(b, wrapped.lora_B["default"].weight.T)


def test_the_scale_is_pefts() -> None:
    assert adapter_scale(JobConfig(r=8, lora_alpha=12)) == 1.5
    assert adapter_scale(JobConfig(r=8, lora_alpha=12, use_rslora=True)) == pytest.approx(12 / 8**0.5, rel=1e-15)


TWO_ROWS = torch.tensor([[3, 5, 8, 13, 21, 34, 55, 2], [1, 1, 2, 3, 5, 8, 13, 21]])
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
    before = expected(input_ids=TWO_ROWS).logits
    for module, (a_KR, b_RN) in weights.items():
        expected.get_submodule(module).weight += adapter_scale(config) * (a_KR @ b_RN).T
    after = expected(input_ids=TWO_ROWS).logits
    assert (after - before).norm() / before.norm() > 0.1

    peft = PeftModel.from_pretrained(build_mixture(name), tmp_path)
    wrapped = {
        module.removeprefix("base_model.model.") for module, found in peft.named_modules() if hasattr(found, "lora_A")
    }
    assert wrapped == set(weights)
    assert (peft(input_ids=TWO_ROWS).logits - after).norm() / after.norm() < 1e-5
    merged = peft.merge_and_unload()
    assert (merged(input_ids=TWO_ROWS).logits - after).norm() / after.norm() < 1e-5


def test_a_dense_layer_beside_experts_is_named_by_its_weight(tmp_path: Path) -> None:
    config = JobConfig(r=3, lora_dropout=0.1, target_modules=MLP)
    write_random(build_mixture("qwen3-moe-dense"), tmp_path, config)
    described = json.loads((tmp_path / "adapter_config.json").read_text())
    assert described["target_modules"] == ["o_proj", "q_proj"]
    mlp = "model.layers.0.mlp"
    assert described["target_parameters"] == [f"{mlp}.{leaf}.weight" for leaf in ("down_proj", "gate_proj", "up_proj")]
    assert described["lora_dropout"] == 0.0  # PEFT refuses dropout with target_parameters
    config = config.replace(target_modules=["q_proj"])
    write_random(build_mixture("qwen3-moe-dense"), tmp_path, config)
    described = json.loads((tmp_path / "adapter_config.json").read_text())
    assert "target_parameters" not in described
    assert described["lora_dropout"] == 0.1


def test_a_short_name_is_used_only_where_no_other_module_has_it() -> None:
    """A router that is not a linear layer may end in the same name as a linear layer elsewhere."""
    model = ModuleNames(modules=frozenset({"layers.0.gate", "layers.1.gate", "layers.1.up"}), model_type="other")
    assert peft_targets({"layers.0.gate"}, model) == PeftTargets(modules=["layers.0.gate"], parameters=[])
    assert peft_targets({"layers.1.up"}, model) == PeftTargets(modules=["up"], parameters=[])


def test_the_names_that_peft_takes_for_experts_are_known_of_every_model_type() -> None:
    kinds = conversion._MODEL_TO_CONVERSION_PATTERN
    theirs = {name: conversion._MOE_TARGET_MODULE_MAPPING.get(kinds.get(name, ""), {}) for name in CONFIG_MAPPING}
    assert {name: dict(expert_names(name)) for name in theirs} == theirs
    assert sum(map(bool, theirs.values())) > 10
