"""The modules of an adapter, with their ranks and scales, as PEFT chooses them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import peft_settings
from peft import LoraConfig, PeftModel, get_peft_model
from peft_adapters import write_random
from transformers import PreTrainedModel

from alto.errors import SpecError, TargetModuleError
from alto.lora import (
    adapter_scale,
    adapter_shape,
    find_shared_inputs,
    rank_notes,
    read_saved_adapter,
    serving,
)
from alto.spec import JobConfig

# PEFT reads a transformers property by its deprecated name.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

ModelFactory = Callable[..., PreTrainedModel]
PREFIX = "base_model.model."

SHAPES: list[dict[str, Any]] = [
    {"exclude_modules": ["q_proj"]},
    {"exclude_modules": ["1.mlp.up_proj", "model.layers.0.self_attn.v_proj", "lm_head"]},
    {"exclude_modules": r".*\.0\..*"},
    {"target_modules": r".*_proj", "exclude_modules": "down_proj"},
    {"target_modules": ["q_proj", "down_proj"], "layers_to_transform": 1},
    {"target_modules": ["q_proj", "down_proj"], "layers_to_transform": [0], "layers_pattern": "layers"},
    {"target_modules": ["q_proj", "model.layers.0.mlp.up_proj"], "layers_to_transform": [1]},
    {"target_modules": ["q_proj", "v_proj"], "layers_to_transform": [1], "exclude_modules": ["v_proj"]},
    {"rank_pattern": {"q_proj": 2, "mlp.down_proj": 8}},
    {"rank_pattern": {r"layers\.1\..*": 6, "k_proj": 3}, "use_rslora": True},
    {"rank_pattern": {"k_proj": 3, r"layers\.1\..*": 6}},
    {"alpha_pattern": {"v_proj": 3.0, r".*\.0\.mlp\.up_proj": 40}},
    {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"q_proj": 5.0, "o_proj": 1.5}, "use_rslora": True},
    {"r": 200, "rank_pattern": {"down_proj": 300}},
]


def of_peft(model: PreTrainedModel, config: JobConfig) -> dict[str, tuple[int, float]]:
    peft = get_peft_model(model, LoraConfig(**peft_settings(config)))
    return {
        name.removeprefix(PREFIX): (layer.r["default"], layer.scaling["default"])
        for name, layer in peft.named_modules()
        if hasattr(layer, "lora_A")
    }


def ours(model: PreTrainedModel, config: JobConfig) -> dict[str, tuple[int, float]]:
    shape, scale = adapter_shape(model, config), adapter_scale(config)
    return {
        module.name: (rank, pytest.approx(ratio * scale, rel=1e-12))
        for module, rank, ratio in zip(shape.targets, shape.ranks, shape.ratios, strict=True)
    }


@pytest.mark.parametrize("settings", SHAPES, ids=str)
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_modules_ranks_and_scales_are_pefts(
    tiny_model: ModelFactory, architecture: str, settings: dict[str, Any]
) -> None:
    config = JobConfig(**({"r": 4, "lora_alpha": 12} | settings))
    found = ours(tiny_model(architecture), config)
    expected = of_peft(tiny_model(architecture), config)
    assert found == expected
    assert list(found) == list(expected)


def test_layers_of_all_linear_are_all_modules_in_them(tiny_model: ModelFactory) -> None:
    """PEFT refuses this, because it takes all-linear for a pattern; here it is taken literally."""
    shape = adapter_shape(tiny_model("llama"), JobConfig(layers_to_transform=1))
    assert {module.name.split(".")[2] for module in shape.targets} == {"1"}
    assert len(shape.targets) == 7


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"exclude_modules": ["q_prj"]}, "exclude_modules: .*none under 'q_prj'; the model has down_proj"),
        ({"exclude_modules": r".*_proj"}, "leave none"),
        ({"layers_to_transform": [0, 2]}, r"layers_to_transform: .*\(0 to 1\), found 2"),
        ({"layers_to_transform": 0, "layers_pattern": "blocks"}, "under blocks .none., found 0"),
        ({"rank_pattern": {"query": 4}}, "rank_pattern: .*none under 'query'"),
        ({"alpha_pattern": {"norm": 4.0}}, "alpha_pattern: .*none under 'norm'"),
    ],
)
def test_what_means_no_module_is_refused(tiny_model: ModelFactory, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(TargetModuleError, match=message):
        adapter_shape(tiny_model("llama"), JobConfig(**settings))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"layers_pattern": "layers"}, "layers_pattern should come with layers_to_transform"),
        ({"target_modules": r".*_proj", "layers_to_transform": 0}, "should come with names in target_modules"),
        ({"layers_to_transform": [-1]}, "^layers_to_transform should be the index of a layer"),
        ({"layers_to_transform": [1, 1]}, "^layers_to_transform should name each layer once"),
        ({"layers_to_transform": True}, "^layers_to_transform should be the index of a layer"),
        (
            {"rank_pattern": {"q_proj": 0}},
            "^rank_pattern should give 'q_proj' a whole number >= 1 and <= 1024, found 0",
        ),
        ({"rank_pattern": {"q_proj": 2.0}}, "^rank_pattern should give 'q_proj' a whole number"),
        ({"rank_pattern": ["q_proj"]}, "^rank_pattern should map names of modules to numbers"),
        ({"rank_pattern": {"(q_proj": 2}}, "^rank_pattern should be a name, a list of names or a regular expression"),
        ({"alpha_pattern": {"q_proj": -1}}, "^alpha_pattern should give 'q_proj' a finite number > 0, found -1"),
        ({"exclude_modules": ["all-linear ()"]}, "^exclude_modules should name modules"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        JobConfig(**settings)


def test_a_rank_above_the_smaller_side_is_trained_and_noted(tiny_model: ModelFactory) -> None:
    model = tiny_model("llama")
    assert rank_notes(model, [JobConfig(r=16), JobConfig(r=32, target_modules=["q_proj"])]) == ()
    (note,) = rank_notes(model, [JobConfig(r=17), JobConfig(r=64, target_modules="k_proj"), JobConfig(r=4)])
    assert "Rank 64 is larger than the smaller side of model.layers.0.self_attn.k_proj (32 × 16)" in note
    assert "and of 3 other modules" in note
    (note,) = rank_notes(model, [JobConfig(r=4, rank_pattern={r"1\.mlp\.up_proj": 40})])
    assert "Rank 40 is larger than the smaller side of model.layers.1.mlp.up_proj (32 × 48). It" in note


@pytest.mark.parametrize("settings", SHAPES[8:], ids=str)
def test_an_export_loads_in_peft_and_here_with_the_same_logits(
    tiny_model: ModelFactory, settings: dict[str, Any], tmp_path: Path
) -> None:
    model, config = tiny_model("llama"), JobConfig(**({"r": 4, "lora_alpha": 12} | settings))
    write_random(model, tmp_path, config, divisor=8)
    saved = read_saved_adapter(tmp_path)
    ids = torch.arange(12)[None]
    assert find_shared_inputs(model, lambda: model(input_ids=ids))
    with torch.no_grad():
        adapters = [(saved.weights, saved.scales)]
        with serving(model, adapters, lambda: model(input_ids=ids)) as served, served.use(served.schedule([12])):
            found = model(input_ids=ids).logits
        expected = PeftModel.from_pretrained(tiny_model("llama"), str(tmp_path))(input_ids=ids).logits
        plain = tiny_model("llama")(input_ids=ids).logits
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-5)
    assert (found - plain).norm() > 0.01 * plain.norm()
    assert saved.has_patterns == ("rank_pattern" in settings or "alpha_pattern" in settings)
