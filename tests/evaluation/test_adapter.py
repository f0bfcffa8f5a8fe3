"""Adapters in folders: they act as in PEFT, and anything beyond plain LoRA is refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from moe_models import build_mixture
from peft import PeftModel
from peft_adapters import edit_config, save_with_peft
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from alto.backbone import Backbone
from alto.errors import RunError, RunNotFoundError, TargetModuleError, UnsupportedError
from alto.evaluation.target import loaded_adapters
from alto.lora import AdapterWeights, ModuleNames, linear_modules, read_saved_adapter, write_adapter
from alto.spec import JobConfig

# PEFT reads a transformers property by its deprecated name.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

ModelFactory = Callable[..., PreTrainedModel]
IDS = torch.tensor([[3, 5, 8, 13, 21], [34, 55, 89, 1, 2]])


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model(input_ids=IDS, use_cache=False).logits


@torch.no_grad()
def logits_on(backbone: Backbone, *folders: Path | None) -> Tensor:
    """Return a row of ``IDS`` for each of ``folders`` with its adapter; both rows for a single folder."""
    adapters = [None if folder is None else read_saved_adapter(folder) for folder in folders]
    num_tokens = [IDS.numel() // len(folders)] * len(folders)
    with (
        loaded_adapters(backbone, adapters, "tiny") as served,
        backbone.own_attention(),
        served.use(served.schedule(num_tokens)),
    ):
        return logits(backbone.model)


def logits_with(model: PreTrainedModel, *folders: Path | None) -> Tensor:
    return logits_on(Backbone(model, None, "tiny"), *folders)


def assert_near(found: Tensor, expected: Tensor) -> None:
    assert (found - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.parametrize("architecture", ["llama", "llama-bias", "phi3"])
@pytest.mark.parametrize(
    "changes", [{}, {"use_rslora": True}, {"target_modules": ["o_proj"]}], ids=["plain", "rslora", "one"]
)
def test_it_acts_as_peft_lets_it_act(
    tiny_model: ModelFactory, tmp_path: Path, architecture: str, changes: dict[str, Any]
) -> None:
    folder = save_with_peft(tiny_model(architecture), tmp_path, **changes)
    expected = logits(PeftModel.from_pretrained(tiny_model(architecture), folder).eval())
    model = tiny_model(architecture)
    plain = logits(model)
    assert (expected - plain).norm() / plain.norm() > 0.05  # the adapter changes the logits
    backbone = Backbone(model, None, "tiny")
    assert_near(logits_on(backbone, folder), expected)
    with backbone.own_attention():
        assert torch.equal(logits(model), plain)  # the adapter is gone afterwards


def test_it_acts_as_peft_lets_it_act_on_a_16_bit_base(tiny_model: ModelFactory, tmp_path: Path) -> None:
    """Both round in a different order; neither is further from float64 on the same weights than the other."""
    folder = save_with_peft(tiny_model("llama"), tmp_path)
    exact = logits(PeftModel.from_pretrained(tiny_model("llama").bfloat16().double(), folder).eval().double())
    of_peft = logits(PeftModel.from_pretrained(tiny_model("llama").bfloat16(), folder).eval())
    found = logits_with(tiny_model("llama").bfloat16(), folder)
    assert found.dtype == torch.bfloat16
    errors = [float((tensor.double() - exact).norm() / exact.norm()) for tensor in (found, of_peft)]
    assert errors[0] < 1.2 * errors[1] < 0.02, errors


def test_what_alto_writes_is_read(tiny_model: ModelFactory, tmp_path: Path) -> None:
    model = tiny_model("llama")
    modules = linear_modules(model)
    torch.manual_seed(2)
    weights = {
        target.name: (torch.randn(target.in_features, 3), torch.randn(3, target.out_features))
        for target in modules
        if target.name.endswith(("q_proj", "down_proj"))
    }
    write_adapter(tmp_path, AdapterWeights(weights), JobConfig(r=3, lora_alpha=6), "some/base", ModuleNames.of(model))
    adapter = read_saved_adapter(tmp_path)
    assert (adapter.base_model, set(adapter.scales.values())) == ("some/base", {2.0})
    assert adapter.weights.keys() == weights.keys()
    assert all(torch.equal(adapter.weights[name][half], weights[name][half]) for name in weights for half in (0, 1))


def test_adapters_of_several_ranks_on_several_modules_act_side_by_side(
    tiny_model: ModelFactory, tmp_path: Path
) -> None:
    one = save_with_peft(tiny_model("llama"), tmp_path / "one", seed=2, r=8, target_modules=["q_proj", "up_proj"])
    other = save_with_peft(tiny_model("llama"), tmp_path / "other", seed=3, r=2, use_rslora=True)
    expected = [
        logits(PeftModel.from_pretrained(tiny_model("llama"), one).eval())[0],
        logits(PeftModel.from_pretrained(tiny_model("llama"), other).eval())[1],
    ]
    found = logits_with(tiny_model("llama"), one, other)
    assert_near(found, torch.stack(expected))
    base = logits_with(tiny_model("llama"), None, other)
    assert_near(base[0], logits(tiny_model("llama"))[0])
    assert_near(base[1], expected[1])


def test_adapters_are_gone_after_an_error(tiny_model: ModelFactory, tmp_path: Path) -> None:
    folder = save_with_peft(tiny_model("llama"), tmp_path)
    backbone = Backbone(tiny_model("llama"), None, "tiny")
    modules = dict(backbone.model.named_modules())
    with pytest.raises(KeyboardInterrupt), loaded_adapters(backbone, [read_saved_adapter(folder)], "tiny"):
        raise KeyboardInterrupt
    assert dict(backbone.model.named_modules()) == modules


# -- refused ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tiny_model: ModelFactory, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_with_peft(tiny_model("llama"), tmp_path_factory.mktemp("saved"))


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "adapter"))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("peft_type", "LOHA"),
        ("modules_to_save", ["lm_head"]),
        ("lora_bias", True),
        ("init_lora_weights", "pissa_niter_4"),
        ("trainable_token_indices", [3]),
        ("an_option_of_the_future", True),
    ],
)
def test_more_than_plain_lora_is_refused_by_name(folder: Path, key: str, value: Any) -> None:
    edit_config(folder, **{key: value})
    with pytest.raises(UnsupportedError, match=key):
        read_saved_adapter(folder)


def test_what_the_settings_hide_is_not_taken_for_plain_lora(tiny_model: ModelFactory, tmp_path: Path) -> None:
    folder = save_with_peft(tiny_model("llama-bias"), tmp_path, modules_to_save=["embed_tokens"])
    edit_config(folder, modules_to_save=None)
    with pytest.raises(UnsupportedError, match=r"found base_model\.model"):
        read_saved_adapter(folder)


@pytest.mark.parametrize("use_rslora", [False, True])
def test_ranks_and_scales_of_single_modules_are_read_as_peft_writes_them(
    tiny_model: ModelFactory, tmp_path: Path, use_rslora: bool
) -> None:
    patterns = {"rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\..*": 3}, "alpha_pattern": {"0.self_attn.v_proj": 24}}
    folder = save_with_peft(tiny_model("llama-bias"), tmp_path, use_rslora=use_rslora, **patterns)
    saved, model = read_saved_adapter(folder), PeftModel.from_pretrained(tiny_model("llama-bias"), folder)
    layers = {
        name.removeprefix("base_model.model."): layer
        for name, layer in model.named_modules()
        if hasattr(layer, "lora_A")
    }
    assert saved.has_patterns
    assert saved.scales == pytest.approx({name: layer.scaling["default"] for name, layer in layers.items()})
    assert len(set(saved.scales.values())) > 2
    assert saved.rank == max(layer.r["default"] for layer in layers.values())
    edit_config(folder, rank_pattern={"q_proj": 4})
    with pytest.raises(RunError, match=r"expected matrices of rank .* found rank"):
        read_saved_adapter(folder)
    edit_config(folder, rank_pattern={"q_proj": "4"})
    with pytest.raises(RunError, match=r"adapter_config\.json: rank_pattern should give 'q_proj'"):
        read_saved_adapter(folder)


def test_what_alto_writes_on_a_mixture_of_experts_is_read(tmp_path: Path) -> None:
    model = build_mixture("qwen3-moe-dense")
    weights = {
        target.name: (torch.randn(target.in_features, 3), torch.randn(3, target.out_features))
        for target in linear_modules(model)
    }
    write_adapter(tmp_path, AdapterWeights(weights), JobConfig(r=3), "some/base", ModuleNames.of(model))
    assert json.loads((tmp_path / "adapter_config.json").read_text())["target_parameters"]
    assert read_saved_adapter(tmp_path).weights.keys() == weights.keys()


@pytest.mark.parametrize("parameter", ["gate.weight", "gate_up_proj", "model.layers.0.mlp.experts.down_proj"])
def test_an_adapter_on_experts_or_routers_is_refused(folder: Path, parameter: str) -> None:
    edit_config(folder, target_parameters=[parameter])
    with pytest.raises(UnsupportedError, match=f"found target_parameters: '{parameter}'"):
        read_saved_adapter(folder)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_folder_without_an_adapter_is_a_named_error(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(RunNotFoundError, match=f"found no {name}"):
        read_saved_adapter(folder)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("adapter_config.json", "{", "expected a JSON object"),
        ("adapter_config.json", "[]", "found list"),
        ("adapter_config.json", '{"peft_type": "LORA", "r": 0, "lora_alpha": 1}', "expected r to be"),
        ("adapter_config.json", '{"peft_type": "LORA", "r": 4}', "expected lora_alpha to be .* found None"),
        ("adapter_config.json", '{"peft_type": "LORA", "r": 5, "lora_alpha": 1}', "rank 5, .* found rank 4"),
        ("adapter_model.safetensors", "torn", "expected a safetensors file"),
    ],
)
def test_a_broken_file_is_named(folder: Path, name: str, content: str, message: str) -> None:
    (folder / name).write_text(content)
    with pytest.raises(RunError, match=f"{name}.*{message}|{message}"):
        read_saved_adapter(folder)


def test_half_a_pair_is_refused(folder: Path) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    del tensors["base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"]
    save_file(tensors, folder / "adapter_model.safetensors")
    with pytest.raises(RunError, match=r"expected base_model.*layers.1.mlp.up_proj.lora_B.weight beside"):
        read_saved_adapter(folder)


def test_another_base_model_is_refused(tiny_model: ModelFactory, saved: Path, tmp_path: Path) -> None:
    adapter = read_saved_adapter(saved)
    with (
        pytest.raises(TargetModuleError, match=r"layers\.1\.mlp.down_proj and 6 more is not; .* --base"),
        loaded_adapters(Backbone(tiny_model("llama", num_hidden_layers=1), None, "other"), [adapter], "other"),
    ):
        pass
    with (
        pytest.raises(
            TargetModuleError, match=r"base model other, 64 × 32, found matrices of shapes \(48, 4\) and \(4, 32\)"
        ),
        loaded_adapters(Backbone(tiny_model("llama", intermediate_size=64), None, "other"), [adapter], "other"),
    ):
        pass
