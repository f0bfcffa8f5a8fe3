"""Finding and loading a base model: the shipped one, a folder, and everything that is neither."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedModel

from alto.backbone import load_backbone, resolve_model
from alto.backbone.load import SHIPPED_MODELS
from alto.errors import AltoError, ModelError, ModelNotFoundError

ASSET = Path(resolve_model("alto-tiny"))


@pytest.mark.parametrize("name", SHIPPED_MODELS)
def test_a_shipped_model_loads_frozen_in_float32(name: str) -> None:
    backbone = load_backbone(name)
    assert (backbone.path, backbone.dtype, backbone.device.type) == (str(ASSET), torch.float32, "cpu")
    assert not any(parameter.requires_grad for parameter in backbone.model.parameters())
    ids = torch.tensor(backbone.tokenizer("one and two is three")["input_ids"])
    assert 0 < len(ids) < 20
    with torch.no_grad():
        hidden = backbone.hidden_states(ids, torch.arange(len(ids)), [len(ids)])
    assert hidden.shape == (len(ids), backbone.model.config.hidden_size)


def test_the_dtype_is_what_was_asked_for() -> None:
    assert load_backbone("alto-tiny", dtype="bfloat16").dtype == torch.bfloat16


def test_a_folder_is_loaded_whatever_the_working_directory(
    tiny_model: Callable[..., PreTrainedModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "base"
    model = tiny_model("llama")
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(ASSET).save_pretrained(folder)
    monkeypatch.chdir(tmp_path)
    backbone = load_backbone("base")
    assert backbone.path == str(folder.resolve())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, backbone.model.get_parameter(name))


def test_a_hub_id_is_left_as_it_is() -> None:
    assert resolve_model("meta-llama/Llama-3.2-1B") == "meta-llama/Llama-3.2-1B"


@pytest.mark.parametrize("name", ["alto-tyni", "no-such-organisation/no-such-model", "./no/such/folder"])
def test_an_unknown_name_says_what_would_do(name: str) -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        load_backbone(name)
    message = str(caught.value)
    assert "alto-tiny, a local folder or a hub id" in message
    assert repr(name) in message
    assert "check the spelling, or download it first" in message
    assert "\n" not in message
    assert isinstance(caught.value, FileNotFoundError)


def test_an_empty_folder_is_not_a_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="empty") as caught:
        load_backbone(str(tmp_path / "empty") if (tmp_path / "empty").mkdir() is None else "")
    assert isinstance(caught.value, AltoError)


@pytest.mark.parametrize(
    "config",
    ["{}", '{"model_type": "no-such-architecture"}', '{"model_type": "clip"}', "not json"],
    ids=["no type", "unknown type", "not a language model", "not json"],
)
def test_a_folder_with_another_config_is_not_a_model(tmp_path: Path, config: str) -> None:
    if (ASSET / "tokenizer.json").is_file():
        AutoTokenizer.from_pretrained(ASSET).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(config, encoding="utf-8")
    with pytest.raises(ModelError, match="model: expected"):
        load_backbone(str(tmp_path))


@pytest.mark.parametrize("content", [b"", b"\x10\x00\x00\x00\x00\x00\x00\x00broken"], ids=["empty", "garbage"])
def test_broken_weights_are_a_named_error(tmp_path: Path, content: bytes) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((ASSET / name).read_bytes())
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match="model: expected"):
        load_backbone(str(tmp_path))


def test_a_model_without_weights_is_a_named_error(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((ASSET / name).read_bytes())
    with pytest.raises(ModelNotFoundError, match=r"no file named model\.safetensors"):
        load_backbone(str(tmp_path))
