"""Merged models: loaded by transformers alone, they have the logits of the adapter on its base."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from exported import adapter_logits, apart, base_logits, logits_of, save_adapter, save_base
from optional import needs_bitsandbytes
from transformers import AutoModelForCausalLM, AutoTokenizer

import alto
from alto.artifacts import merge
from alto.backbone import dequantised, load_network
from alto.errors import DiskFullError, ModelError, RunExistsError, SpecError, UnsupportedError
from alto.spec import BaseModelSpec

# PEFT reads a transformers property by its deprecated name, and warns about tied weights.
pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning"), pytest.mark.filterwarnings("ignore::UserWarning")]

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "linear": ("llama", {"target_modules": "all-linear"}),
    "rslora": ("llama", {"use_rslora": True}),
    "dora": ("llama", {"target_modules": ["q_proj", "down_proj"], "use_dora": True}),
    "conv1d": ("gpt2", {"target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True}),
    "conv1d biases": ("gpt2", {"target_modules": ["c_attn"], "fan_in_fan_out": True, "bias": "all"}),
    "conv1d dora": ("gpt2", {"target_modules": ["c_attn"], "fan_in_fan_out": True, "use_dora": True}),
    "biases": ("qwen2", {"bias": "lora_only"}),
    "patterns": ("qwen2", {"target_modules": ["q_proj", "k_proj"], "rank_pattern": {"k_proj": 2}}),
    "experts": ("mixtral", {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}),
    "head, tied": ("llama", {"target_modules": ["lm_head", "q_proj"]}),
    "embeddings, tied": ("llama", {"target_modules": ["embed_tokens", "q_proj"]}),
    "both, tied": ("llama", {"target_modules": ["embed_tokens", "lm_head"]}),
    "head": ("qwen2", {"target_modules": ["lm_head", "q_proj"]}),
    "embeddings": ("qwen2", {"target_modules": ["embed_tokens", "q_proj"]}),
    "whole head, tied": ("llama", {"modules_to_save": ["lm_head"]}),
    "whole embeddings, tied": ("llama", {"modules_to_save": ["embed_tokens"]}),
    "whole head": ("qwen2", {"modules_to_save": ["lm_head"]}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_merged_model_has_the_logits_of_the_adapter(case: str, tmp_path: Path) -> None:
    name, settings = CASES[case]
    base = save_base(tmp_path / "base", name)
    adapter = save_adapter(base, tmp_path / "adapter", **settings)
    expected = adapter_logits(base, adapter)
    assert apart(expected, base_logits(base)) > 1e-2  # the adapter changes the logits
    result = alto.Engine().export(adapter, tmp_path / "merged", merged=True)
    found = logits_of(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"))
    assert apart(found, expected) < 1e-5
    assert result.form == "merged"
    assert result.difference is not None
    assert result.difference < 1e-5
    assert result.command == f"vllm serve {tmp_path / 'merged'}"
    assert not (tmp_path / "merged" / "adapter_config.json").exists()
    assert f"{result.difference:.1e}" in (tmp_path / "merged" / "README.md").read_text(encoding="utf-8")


def test_a_merged_model_has_the_precision_tokenizer_and_generation_config_of_its_base(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", dtype=torch.bfloat16)
    (base / "generation_config.json").write_text(json.dumps({"eos_token_id": 1, "max_length": 77}), encoding="utf-8")
    adapter = save_adapter(base, tmp_path / "adapter")
    (adapter / "chat_template.jinja").write_text("{{ messages[0]['content'] }}!", encoding="utf-8")
    result = alto.Engine().export(adapter, tmp_path / "merged", merged=True)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert model.dtype == torch.bfloat16
    assert model.generation_config.max_length == 77
    assert apart(logits_of(model.float()), adapter_logits(base, adapter)) < 1e-2
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "merged")
    assert tokenizer.chat_template == "{{ messages[0]['content'] }}!"
    names = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "README.md"}
    assert names <= {*result.files}


def test_a_merge_that_changes_the_logits_is_an_error_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = save_base(tmp_path / "base")
    adapter = save_adapter(base, tmp_path / "adapter")
    monkeypatch.setattr("peft.PeftModel.merge_and_unload", lambda model: model.unload(), raising=False)
    with pytest.raises(ModelError, match=r"logits of the adapter, found that they differ by .*nothing was written"):
        alto.Engine().export(adapter, tmp_path / "merged", merged=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base"]


def test_an_adapter_of_another_base_is_named(tmp_path: Path) -> None:
    adapter = save_adapter(save_base(tmp_path / "base"), tmp_path / "adapter")
    other = save_base(tmp_path / "other", "gpt2")
    with pytest.raises(ModelError, match=r"expected an adapter that PEFT merges into .*other, found \w+: "):
        alto.Engine().export(adapter, tmp_path / "merged", merged=True, base=str(other))
    assert not (tmp_path / "merged").exists()


def test_errors_are_raised_before_the_base_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = save_base(tmp_path / "base")
    adapter = save_adapter(base, tmp_path / "adapter")

    def never(*_: object, **__: object) -> None:
        raise AssertionError("the base was loaded")

    monkeypatch.setattr(merge, "load_network", never)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(RunExistsError, match="or an empty one, found a folder with 1 file; name"):
        alto.Engine().export(adapter, tmp_path / "full", merged=True)
    with pytest.raises(SpecError, match="found merged and gguf"):
        alto.Engine().export(adapter, tmp_path / "new", merged=True, gguf="f16")
    with pytest.raises(SpecError, match="gguf: expected one of f16, q8_0, adapter, found 'q4'"):
        alto.Engine().export(adapter, tmp_path / "new", gguf="q4")  # type: ignore[arg-type]
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    with pytest.raises(UnsupportedError, match="expected peft, which merges the adapter"):
        alto.Engine().export(adapter, tmp_path / "new", merged=True)


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = save_base(tmp_path / "base")
    adapter = save_adapter(base, tmp_path / "adapter")

    def full(model: object, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("transformers.PreTrainedModel.save_pretrained", full)
    with pytest.raises(DiskFullError, match="No space left on device; free disk space, or name another folder"):
        alto.Engine().export(adapter, tmp_path / "merged", merged=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base"]


@needs_bitsandbytes
@pytest.mark.parametrize("quantisation", ["4bit", "8bit"])
def test_a_quantised_base_is_merged_with_the_weights_that_it_computes_with(quantisation: Any, tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", "qwen2")
    spec = BaseModelSpec(id=str(base), quantisation=quantisation, dtype="float32")
    network = load_network(spec)
    plain = dequantised(network)
    assert apart(logits_of(plain), logits_of(network)) < 1e-5
    assert apart(logits_of(plain), base_logits(base)) > 1e-4  # the base was quantised
    plain.save_pretrained(tmp_path / "plain")
    assert "quantization_config" not in json.loads((tmp_path / "plain" / "config.json").read_text())
    assert apart(base_logits(tmp_path / "plain"), logits_of(network)) < 1e-5
