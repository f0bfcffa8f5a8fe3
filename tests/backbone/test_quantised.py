"""Quantised base models: their size, their sources, and those that are refused by name."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from optional import needs_bitsandbytes
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, PreTrainedModel

from alto.backbone import load_backbone, load_network, quantised, resolve_model
from alto.backbone.quantised import QuantisedLinear
from alto.errors import ModelError, UnsupportedError
from alto.spec import BaseModelSpec, Quantisation
from alto.version import install_command

ASSET = resolve_model("alto-tiny")


def layers(network: PreTrainedModel) -> list[QuantisedLinear]:
    return [module for module in network.modules() if isinstance(module, QuantisedLinear)]


@needs_bitsandbytes
@pytest.mark.parametrize(("quantisation", "bytes_per_number"), [("4bit", 0.5), ("8bit", 1.0)])
def test_linear_layers_are_as_small_as_they_should_be(quantisation: Quantisation, bytes_per_number: float) -> None:
    backbone = load_backbone(BaseModelSpec(id="alto-tiny", quantisation=quantisation))
    found = layers(backbone.model)
    assert len(found) == 28
    numbers = sum(layer.in_features * layer.out_features for layer in found)
    assert sum(layer.packed.nbytes for layer in found) == bytes_per_number * numbers
    head = backbone.model.get_output_embeddings()
    assert type(head) is torch.nn.Linear
    assert head.weight.dtype == torch.float32
    plain = (p for p in backbone.model.parameters() if p.is_floating_point())
    assert sum(p.numel() for p in plain) + numbers == sum(
        p.numel() for p in load_network(BaseModelSpec(id="alto-tiny")).parameters()
    )


@needs_bitsandbytes
def test_a_layer_gives_the_product_with_its_weight_and_keeps_none() -> None:
    layer = layers(load_network(BaseModelSpec(id="alto-tiny", quantisation="4bit")))[0]
    x = torch.randn(3, layer.in_features, generator=torch.Generator().manual_seed(0)).requires_grad_()
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        y = layer(x)
    assert saved == []
    y.sum().backward()
    torch.testing.assert_close(y, x @ layer.weight.T)
    torch.testing.assert_close(x.grad, layer.weight.sum(0).expand_as(x))


@needs_bitsandbytes
@pytest.mark.parametrize("bits", [4, 8])
def test_a_checkpoint_that_is_quantised_on_disk_loads(bits: int, tmp_path: Path) -> None:
    settings = BitsAndBytesConfig(
        load_in_4bit=bits == 4, load_in_8bit=bits == 8, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
    )
    model = AutoModelForCausalLM.from_pretrained(
        ASSET, dtype=torch.float32, quantization_config=settings, device_map={"": "cpu"}
    )
    model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(ASSET).save_pretrained(tmp_path)
    wanted: Quantisation = "4bit" if bits == 4 else "8bit"
    other: Quantisation = "8bit" if bits == 4 else "4bit"
    expected = layers(load_network(BaseModelSpec(id="alto-tiny", quantisation=wanted)))
    for quantisation in ("none", wanted):
        found = layers(load_network(BaseModelSpec(id=str(tmp_path), quantisation=quantisation)))
        assert len(found) == len(expected)
        assert all(torch.equal(one.weight, two.weight) for one, two in zip(found, expected, strict=True))
    with pytest.raises(ModelError, match=rf"is stored on disk in {bits} bits; remove 'load_in_{other}'"):
        load_network(BaseModelSpec(id=str(tmp_path), quantisation=other))


@pytest.mark.parametrize("method", ["gptq", "awq", "fp8", "compressed-tensors"])
def test_other_quantisations_are_refused_by_name(
    method: str, tiny_model: Callable[..., PreTrainedModel], tmp_path: Path
) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method, "bits": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedError, match=f"is quantised by {method}; use the unquantised model"):
        load_network(BaseModelSpec(id=str(tmp_path)))


@pytest.mark.parametrize("missing", ["bitsandbytes", "accelerate"])
def test_a_missing_package_is_reported_before_weights_are_read(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(quantised, "find_spec", lambda name: None if name == missing else real(name))
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("weights were read"))
    with pytest.raises(
        UnsupportedError, match=rf"expected .* found no {missing}; .*{re.escape(install_command('bnb'))}"
    ):
        load_network(BaseModelSpec(id="alto-tiny", quantisation="4bit"))
