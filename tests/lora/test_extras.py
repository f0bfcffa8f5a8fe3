"""Trained biases and magnitudes: their names, and their files in PEFT and here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import build_tiny
from peft import LoraConfig, PeftModel, get_peft_model
from peft_adapters import logits_of, write_random
from transformers import PreTrainedModel

from alto.backbone import Backbone
from alto.errors import RunError, SpecError, TargetModuleError, UnsupportedError
from alto.evaluation.peft_check import PeftCheck
from alto.lora import AdapterWeights, ModuleNames, adapter_shape, bias_notes, read_saved_adapter, write_adapter
from alto.records import LabelSet
from alto.spec import JobConfig

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

IDS = torch.arange(2, 14)[None]
ModelFactory = Callable[..., PreTrainedModel]
SETTINGS: dict[str, dict[str, Any]] = {
    "all": {"bias": "all", "target_modules": ["q_proj", "down_proj"]},
    "lora_only": {"bias": "lora_only", "target_modules": ["q_proj", "down_proj"]},
    "dora": {"use_dora": True, "use_rslora": True, "target_modules": ["q_proj", "down_proj"]},
    "dora-and-all": {"use_dora": True, "bias": "all", "target_modules": ["q_proj"]},
}


LABELS = LabelSet(problem_type="single_label_classification", names=("a", "b", "c"))


@torch.no_grad()
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_an_export_is_the_same_in_peft_here_and_merged(settings: dict[str, Any], tmp_path: Path) -> None:
    model = build_tiny("llama-bias")
    plain = model(input_ids=IDS).logits
    weights = write_random(model, tmp_path, JobConfig(r=4, lora_alpha=8, **settings), divisor=3)
    of_dora = {"use_dora": False} if settings.get("use_dora") else {}
    assert len(weights.extras) == {"all": 14, "lora_only": 4}.get(settings.get("bias"), 0) + (
        len(weights) if of_dora else 0
    )
    peft = PeftModel.from_pretrained(build_tiny("llama-bias"), tmp_path).eval()
    expected = peft(input_ids=IDS).logits
    without, config = AdapterWeights(weights.matrices), JobConfig(r=4, lora_alpha=8, **(settings | of_dora))
    write_adapter(tmp_path / "without", without, config, "b", ModuleNames.of(model))
    assert (expected - plain).norm() > 0.05 * plain.norm()
    backbone = Backbone(model, None, "tiny")
    torch.testing.assert_close(logits_of(backbone, IDS, tmp_path), expected, rtol=1e-4, atol=1e-4)
    assert (logits_of(backbone, IDS, tmp_path / "without") - expected).norm() > 0.01 * plain.norm(), (
        "they change the logits"
    )
    merged = peft.merge_and_unload()
    torch.testing.assert_close(merged(input_ids=IDS).logits, expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("settings", [{"bias": "all"}, {"bias": "lora_only"}, {"use_dora": True}], ids=str)
def test_what_peft_itself_writes_is_read(settings: dict[str, Any], tmp_path: Path) -> None:
    torch.manual_seed(1)
    config = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM", **settings)
    peft = get_peft_model(build_tiny("llama-bias"), config).eval()
    for parameter in peft.parameters():
        if parameter.requires_grad and parameter.ndim == 1:
            parameter.normal_()
    peft.save_pretrained(tmp_path)
    found = logits_of(Backbone(build_tiny("llama-bias"), None, "tiny"), IDS, tmp_path)
    torch.testing.assert_close(found, peft(input_ids=IDS).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("labels", [None, LABELS], ids=["alone", "with-a-head"])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_the_check_with_peft_sees_them_and_leaves_the_base_as_it_was(
    settings: dict[str, Any], labels: LabelSet | None, tmp_path: Path
) -> None:
    backbone = Backbone(build_tiny("llama-bias"), None, "tiny")
    before = {name: parameter.clone() for name, parameter in backbone.model.named_parameters()}
    weights = write_random(backbone.model, tmp_path, JobConfig(r=4, lora_alpha=8, **settings), labels, divisor=3)
    found = PeftCheck(backbone)(tmp_path)
    assert (found.status, found.why) == ("equal", "")
    after = dict(backbone.model.named_parameters())
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert not any(parameter.requires_grad for parameter in after.values())
    assert len(weights.extras) > (labels is not None)


def test_a_bias_that_is_no_layers_last_sum_is_refused_by_name() -> None:
    model = build_tiny("phi")
    with pytest.raises(UnsupportedError, match=r"^bias: expected .* found lm_head\.bias of its output head; set bias"):
        adapter_shape(model, JobConfig(bias="all", target_modules=["q_proj"]))
    found = adapter_shape(model, JobConfig(bias="lora_only", target_modules=["q_proj"])).extras
    assert [extra.name for extra in found] == [f"model.layers.{index}.self_attn.q_proj.bias" for index in range(2)]
    with pytest.raises(SpecError, match="bias should be 'none' with target_parameters, found 'all'"):
        JobConfig(bias="all", target_modules=[], target_parameters=["experts.down_proj"])


def test_a_saved_bias_that_the_base_does_not_have_is_refused_by_name(tmp_path: Path) -> None:
    write_random(build_tiny("llama-bias"), tmp_path, JobConfig(r=4, **SETTINGS["all"]), divisor=3)
    with pytest.raises(TargetModuleError, match=r"expected magnitudes .* found model\.layers\.0\.mlp"):
        logits_of(Backbone(build_tiny("llama"), None, "tiny"), IDS, tmp_path)


def test_a_note_says_where_there_are_none() -> None:
    configs = [JobConfig(bias=bias) for bias in ("none", "all")]
    (note,) = bias_notes(build_tiny("llama"), configs)
    assert note == "No module of the base model has a bias: bias: all trains the same as bias: none."
    assert bias_notes(build_tiny("llama-bias"), configs) == ()


def test_magnitudes_that_do_not_fit_the_settings_of_a_file_are_refused(tmp_path: Path) -> None:
    write_random(build_tiny("llama"), tmp_path, JobConfig(r=4, use_dora=True, target_modules=["q_proj"]), divisor=3)
    file = tmp_path / "adapter_config.json"
    file.write_text(file.read_text().replace('"use_dora": true', '"use_dora": false'))
    with pytest.raises(RunError, match=r"found use_dora false and one for model\.layers\.0\.self_attn\.q_proj"):
        read_saved_adapter(tmp_path)
    with pytest.raises(SpecError, match="use_dora should be false with target_parameters, found true"):
        JobConfig(use_dora=True, target_modules=[], target_parameters=["experts.down_proj"])
