"""A finished adapter is loaded into PEFT and compared: differences are reported by name."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from architectures import build_tiny
from moe_models import build_mixture
from peft.tuners.lora import layer
from peft_adapters import edit_config, write_random
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from alto.backbone import Backbone
from alto.evaluation import PeftCheck
from alto.spec import JobConfig

MLP = "model.layers.0.mlp"
SHORT = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]


def make(model: PreTrainedModel, folder: Path) -> Backbone:
    """Wrap ``model``, and save an adapter for all of its linear modules in ``folder``."""
    write_random(model, folder, JobConfig(r=3, lora_alpha=12))
    return Backbone(model, None, "tiny")


@pytest.fixture
def dense(tmp_path: Path) -> Backbone:
    return make(build_tiny("llama"), tmp_path)


@pytest.fixture
def mixture(tmp_path: Path) -> Backbone:
    return make(build_mixture("qwen3-moe-dense"), tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["llama", "gemma3", "qwen3-moe-dense"])
def test_an_adapter_that_peft_loads_as_it_was_trained_is_equal(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = build_mixture(kind) if kind == "qwen3-moe-dense" else build_tiny(kind)
    found = PeftCheck(make(model.to(dtype), tmp_path))(tmp_path)
    assert (found.status, found.why) == ("equal", "")
    assert found.difference is not None
    assert found.difference < (1e-5 if dtype == torch.float32 else 3e-2)
    assert found.peft is not None


def test_dense_layers_that_peft_takes_for_experts_are_named(mixture: Backbone, tmp_path: Path) -> None:
    edit_config(tmp_path, target_modules=SHORT, target_parameters=None)
    found = PeftCheck(mixture)(tmp_path)
    assert found.status == "different"
    absent, others, logits = found.why.split("; ")
    assert absent == f"{MLP}.down_proj, {MLP}.gate_proj and 1 more without the adapter it was trained with"
    assert others.startswith(
        "model.layers.1.mlp.experts, model.layers.1.mlp.experts.base_layer with an adapter that was"
    )
    assert logits == f"logits differ by {found.difference:.1e} (relative)"
    assert found.difference is not None
    assert found.difference > 0.1


def test_a_scale_that_peft_does_not_share_is_different_however_small_the_adapter(
    dense: Backbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In 16 bits the logits would not show it; the scale does."""
    path = tmp_path / "adapter_model.safetensors"
    save_file({name: tensor * 1e-4 for name, tensor in load_file(path).items()}, path)
    assert PeftCheck(dense)(tmp_path).status == "equal"
    update = layer.Linear.update_layer

    def doubled(self: layer.Linear, adapter_name: str, *args: object, **kwargs: object) -> None:
        update(self, adapter_name, *args, **kwargs)
        self.scaling[adapter_name] *= 2

    monkeypatch.setattr(layer.Linear, "update_layer", doubled)
    found = PeftCheck(dense)(tmp_path)
    assert found.status == "different"
    assert "and 12 more with different numbers or a different scale" in found.why
    assert "logits" not in found.why


def test_what_peft_cannot_load_is_different(dense: Backbone, tmp_path: Path) -> None:
    edit_config(tmp_path, target_modules=["nothing"])
    found = PeftCheck(dense)(tmp_path)
    assert (found.status, found.difference) == ("different", None)
    assert found.why.startswith("loading the adapter fails with NoMatchingPeftModuleError: Target modules {'nothing'}")


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_config.json"])
def test_an_adapter_that_cannot_be_read_is_different(name: str, dense: Backbone, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"damaged")
    found = PeftCheck(dense)(tmp_path)
    assert found.status == "different"
    assert found.why.startswith("loading the adapter fails with ")


@pytest.mark.parametrize("target_modules", [SHORT, ["nothing"]])
def test_the_model_is_as_it_was_afterwards(mixture: Backbone, tmp_path: Path, target_modules: list[str]) -> None:
    before = dict(mixture.model.named_modules())
    edit_config(tmp_path, target_modules=target_modules)
    PeftCheck(mixture)(tmp_path)
    assert dict(mixture.model.named_modules()) == before
    assert not hasattr(mixture.model, "peft_config")


def test_without_peft_nothing_is_checked(dense: Backbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    found = PeftCheck(dense)(tmp_path)
    assert (found.status, found.why, found.peft) == ("unchecked", "peft is not installed", None)


def test_dense_layers_of_a_quantised_mixture_are_not_checked(mixture: Backbone, tmp_path: Path) -> None:
    """PEFT finds bitsandbytes' own layers there; ALTO has layers that unpack their weights on use."""
    for layer_name in ("gate_proj", "up_proj", "down_proj"):
        linear = mixture.model.get_submodule(f"{MLP}.{layer_name}")
        weight = linear.weight.data
        del linear.weight
        linear.weight = weight
    found = PeftCheck(mixture)(tmp_path)
    assert (found.status, found.difference) == ("unchecked", None)
    assert "quantised" in found.why


def test_a_base_on_several_gpus_is_not_checked(dense: Backbone, tmp_path: Path) -> None:
    found = PeftCheck(dense, num_ranks=2)(tmp_path)
    assert (found.status, found.why) == ("unchecked", "the base model is sharded over 2 GPUs")
