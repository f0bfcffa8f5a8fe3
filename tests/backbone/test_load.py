"""Loading a base model: the shipped one, a folder, and everything that is neither."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from architectures import ARCHITECTURES, SIZES
from safetensors.torch import load_file, save_file
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    CLIPVisionConfig,
    LlamaConfig,
    LlamaForSequenceClassification,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
    dynamic_module_utils,
)

from alto.backbone import build_skeleton, load_backbone, load_network, loading_class, resolve_model
from alto.backbone.load import SHIPPED_MODELS
from alto.errors import ModelError, ModelNotFoundError, UnsupportedError
from alto.spec import BaseModelSpec
from alto.spec.base_model import BaseObjects

ASSET = Path(resolve_model("alto-tiny"))
WEIGHTS = "model.safetensors"


@pytest.fixture
def folder(tiny_model: Callable[..., PreTrainedModel], tmp_path: Path) -> Path:
    """A small Llama with a tokenizer, as ``save_pretrained`` writes it."""
    return save(tiny_model("llama"), tmp_path / "base")


def save(model: PreTrainedModel, folder: Path, **settings: object) -> Path:
    model.save_pretrained(folder, **settings)
    AutoTokenizer.from_pretrained(ASSET).save_pretrained(folder)
    return folder


def assert_refused(folder: Path, *parts: str, kind: type[ModelError] = ModelError, **settings: bool) -> None:
    with pytest.raises(ModelError) as caught:
        load_backbone(BaseModelSpec(id=str(folder), **settings))
    assert type(caught.value) is kind
    message = str(caught.value)
    assert message.startswith("model: expected ")
    assert "\n" not in message
    for part in (repr(str(folder)), "; ", *parts):
        assert part in message


@pytest.mark.parametrize("name", SHIPPED_MODELS)
def test_a_shipped_model_loads_frozen_in_float32(name: str) -> None:
    backbone = load_backbone(BaseModelSpec(id=name))
    assert (backbone.path, backbone.dtype, backbone.device.type) == (str(ASSET), torch.float32, "cpu")
    assert not any(parameter.requires_grad for parameter in backbone.model.parameters())
    ids = torch.tensor(backbone.tokenizer("one and two is three")["input_ids"])
    assert 0 < len(ids) < 20
    with torch.no_grad():
        hidden = backbone.hidden_states(ids, torch.arange(len(ids)), [len(ids)])
    assert hidden.shape == (len(ids), backbone.model.config.hidden_size)


@pytest.mark.usefixtures("computes_in_half")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_dtype_is_what_was_asked_for(dtype: Any) -> None:
    assert load_backbone(BaseModelSpec(id="alto-tiny", dtype=dtype)).dtype == getattr(torch, dtype)


class TestHalfPrecisionOnACpu:
    """Half precision by CPU capability. The names of capabilities are those that torch reports."""

    @pytest.mark.parametrize("capability", ["avx512_bf16", "amx_bf16", "bf16", "sve_bf16"])
    def test_is_computed_where_there_are_instructions(self, capability: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {capability: True})
        assert load_backbone(BaseModelSpec(id="alto-tiny", dtype="bfloat16")).dtype == torch.bfloat16
        with pytest.raises(UnsupportedError, match="float16"):
            load_backbone(BaseModelSpec(id="alto-tiny", dtype="float16"))

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    def test_is_refused_without_instructions(self, dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        missing = {"avx512_bf16": False, "amx_bf16": False, "avx512_f": True, "f16c": True}
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: missing)
        text = rf"^dtype: expected a CPU with instructions for {dtype} \(A.*; set dtype: float32 \(auto .*use a GPU$"
        with pytest.raises(UnsupportedError, match=text):
            load_backbone(BaseModelSpec(id="alto-tiny", dtype=dtype))
        assert load_network(BaseModelSpec(id="alto-tiny", dtype=dtype)).dtype == getattr(torch, dtype)  # to merge
        assert load_backbone(BaseModelSpec(id="alto-tiny")).dtype == torch.float32

    def test_is_refused_of_an_object_too(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
        model = load_network(BaseModelSpec(id="alto-tiny", dtype="bfloat16"))
        objects = BaseObjects(model=model, tokenizer=AutoTokenizer.from_pretrained(ASSET), name="<Model object>")
        with pytest.raises(UnsupportedError, match=r"; give model\.float\(\), or use a GPU$"):
            load_backbone(BaseModelSpec(id="<Model object>", objects=objects))

    @pytest.mark.parametrize("device", ["cuda", "meta"])
    def test_is_not_looked_at_on_another_device(self, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: pytest.fail("a GPU has its own instructions"))
        monkeypatch.setattr("alto.backbone.load.load_network", Mock(side_effect=LookupError("loaded")))
        with pytest.raises(LookupError, match="loaded"):
            load_backbone(BaseModelSpec(id="alto-tiny", dtype="bfloat16"), device=device)

    def test_torch_names_the_instructions_of_this_cpu(self) -> None:
        found = torch.cpu.get_capabilities()
        x86 = {"avx512_bf16", "amx_bf16", "avx512_fp16", "amx_fp16"}
        assert (x86 if found["architecture"] == "x86_64" else {"bf16", "fp16_arith"}) <= set(found)


def test_a_folder_is_loaded_whatever_the_working_directory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    assert load_backbone(BaseModelSpec(id="base")).path == str(folder.resolve())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_comes_back_as_it_was_saved(
    tiny_model: Callable[..., PreTrainedModel], tmp_path: Path, architecture: str, tied: bool
) -> None:
    model = tiny_model(architecture, tie_word_embeddings=tied)
    backbone = load_backbone(BaseModelSpec(id=str(save(model, tmp_path))))
    assert type(backbone.model) is type(model)
    parameters = dict(model.named_parameters())
    assert dict(backbone.model.named_parameters()).keys() == parameters.keys()
    for name, parameter in parameters.items():
        assert torch.equal(parameter, backbone.model.get_parameter(name))


def test_shards_are_loaded(tiny_model: Callable[..., PreTrainedModel], tmp_path: Path) -> None:
    model = tiny_model("llama")
    save(model, tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    loaded = load_backbone(BaseModelSpec(id=str(tmp_path))).model
    assert all(torch.equal(parameter, loaded.get_parameter(name)) for name, parameter in model.named_parameters())


def test_a_hub_id_is_left_as_it_is() -> None:
    assert resolve_model("meta-llama/Llama-3.2-1B") == "meta-llama/Llama-3.2-1B"


@pytest.mark.parametrize("name", ["alto-tyni", "no-such-organisation/no-such-model", "no/such/folder"])
def test_an_unknown_name_says_what_would_do(name: str) -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        load_backbone(BaseModelSpec(id=name))
    message = str(caught.value)
    assert message.startswith("model: expected one of alto-tiny, a local folder or a hub id")
    assert repr(name) in message
    assert "check the spelling, or download it first" in message
    assert "\n" not in message
    assert isinstance(caught.value, FileNotFoundError)


class TestConfig:
    def test_a_folder_without_one(self, tmp_path: Path) -> None:
        assert_refused(tmp_path, "config.json", "no such file", kind=ModelNotFoundError)

    @pytest.mark.parametrize("named", ["", "best"], ids=["adapter", "run"])
    def test_a_config_of_an_adapter(self, tmp_path: Path, named: str) -> None:
        (tmp_path / "best").mkdir()
        config = {"base_model_name_or_path": "some/base"}
        (tmp_path / named / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
        where = "the run '" if named else "'"
        expected = rf"model: expected a base model, found an adapter in {where}.*; set model: some/base, and, to .*"
        with pytest.raises(ModelError, match=rf"{expected} init_adapter: {tmp_path / named}$"):
            load_backbone(BaseModelSpec(id=str(tmp_path)))
        (tmp_path / named / "adapter_config.json").write_text("{", encoding="utf-8")
        with pytest.raises(ModelError, match="set model: the base model that it was trained on"):
            load_backbone(BaseModelSpec(id=str(tmp_path)))

    @pytest.mark.parametrize(
        ("config", "text"),
        [
            ("{}", "model_type"),
            ('{"hidden_size": 8}', "model_type"),
            ('{"model_type": "no-such-architecture"}', "no-such-architecture"),
            ("[1]", "model_type"),
            ("", "JSON"),
            ("not json", "JSON"),
            ('{"model_type": "llama", "hidden_size": "large"}', "expected int, got str"),
            ('{"model_type": "llama", "hidden_size": 32, "num_attention_heads": 5}', "not a multiple"),
        ],
    )
    def test_that_is_none(self, folder: Path, config: str, text: str) -> None:
        (folder / "config.json").write_text(config, encoding="utf-8")
        kind = ModelNotFoundError if text == "JSON" else ModelError  # transformers chooses between the two
        assert_refused(folder, "config.json", text, kind=kind)

    @pytest.mark.parametrize(
        "model",
        [
            lambda: LlamaForSequenceClassification(LlamaConfig(**SIZES)),
            lambda: BertForMaskedLM(BertConfig(**SIZES)),
            lambda: T5ForConditionalGeneration(T5Config(vocab_size=97, d_model=8, d_kv=4, d_ff=8, num_layers=1)),
        ],
        ids=["classifier", "encoder", "encoder-decoder"],
    )
    def test_a_config_of_another_kind_of_model(self, tmp_path: Path, model: Callable[[], PreTrainedModel]) -> None:
        built = model()
        assert_refused(save(built, tmp_path), "config.json", type(built).__name__, "generates text")


class TestTokenizer:
    @pytest.mark.parametrize("content", [None, "{", '{"version": "1.0"}'], ids=["missing", "torn", "empty"])
    def test_that_is_none(self, folder: Path, content: str | None) -> None:
        (folder / "tokenizer.json").unlink()
        if content is not None:
            (folder / "tokenizer.json").write_text(content, encoding="utf-8")
        assert_refused(folder, "tokenizer.json", "tokenizer.save_pretrained")

    def test_no_file_of_one(self, folder: Path) -> None:
        for path in (*folder.glob("tokenizer*"), *folder.glob("*.jinja")):
            path.unlink()
        assert_refused(folder, "tokenizer.json", "found no such file; save the tokenizer")


class TestWeights:
    def test_missing(self, folder: Path) -> None:
        (folder / WEIGHTS).unlink()
        assert_refused(folder, WEIGHTS, "copy or download", kind=ModelNotFoundError)

    @pytest.mark.parametrize("torn", [lambda b: b"", lambda b: b[:100], lambda b: b[: len(b) // 2], lambda b: b[:-1]])
    def test_torn(self, folder: Path, torn: Callable[[bytes], bytes]) -> None:
        (folder / WEIGHTS).write_bytes(torn((folder / WEIGHTS).read_bytes()))
        assert_refused(folder, WEIGHTS, "copy or download the model again")

    @pytest.mark.parametrize("lost", ["a shard", "the index"])
    def test_shards_missing(self, tiny_model: Callable[..., PreTrainedModel], tmp_path: Path, lost: str) -> None:
        save(tiny_model("llama"), tmp_path, max_shard_size="10KB")
        path = sorted(tmp_path.glob("model-*.safetensors"))[1]
        path = path if lost == "a shard" else tmp_path / "model.safetensors.index.json"
        path.unlink()
        text = path.name if lost == "a shard" else WEIGHTS
        assert_refused(tmp_path, text, "copy or download", kind=ModelNotFoundError)

    def test_a_matrix_missing(self, folder: Path) -> None:
        """transformers would initialise it at random and go on."""
        names = [f"model.layers.{layer}.mlp.{leaf}_proj.weight" for layer in (0, 1) for leaf in ("up", "down")]
        tensors = load_file(folder / WEIGHTS)
        for name in names:
            del tensors[name]
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
        assert_refused(folder, f"no {min(names)}", "and 1 more", "copy or download the model again")

    def test_an_untied_head_missing(self, tiny_model: Callable[..., PreTrainedModel], tmp_path: Path) -> None:
        save(tiny_model("smollm"), tmp_path)
        config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
        (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}), encoding="utf-8")
        assert_refused(tmp_path, "no lm_head.weight", "config.json")

    def test_a_matrix_of_another_shape(self, folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        tensors["model.norm.weight"] = torch.ones(7)
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
        assert_refused(folder, "model.norm.weight as (7,) instead of (32,)")


class Touches:
    """An object that creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch '{self._path}'",)


class TestPickles:
    @pytest.fixture
    def pickled(self, folder: Path) -> Path:
        torch.save(load_file(folder / WEIGHTS), folder / "pytorch_model.bin")
        (folder / WEIGHTS).unlink()
        return folder

    def test_are_refused_with_the_risk_and_the_key(self, pickled: Path) -> None:
        assert_refused(pickled, "pytorch_model.bin", "may run code", "'use_safetensors: false'")

    def test_are_read_when_asked_for(self, pickled: Path) -> None:
        model = load_backbone(BaseModelSpec(id=str(pickled), use_safetensors=False)).model
        tensors = torch.load(pickled / "pytorch_model.bin")
        assert all(torch.equal(parameter, tensors[name]) for name, parameter in model.named_parameters())

    def test_are_not_opened_beside_safetensors(self, folder: Path) -> None:
        (folder / "pytorch_model.bin").write_bytes(b"never read")
        load_backbone(BaseModelSpec(id=str(folder)))

    @pytest.mark.parametrize("content", [b"", b"no pickle", b"PK\x03\x04torn"])
    def test_torn(self, pickled: Path, content: bytes) -> None:
        (pickled / "pytorch_model.bin").write_bytes(content)
        assert_refused(pickled, "pytorch_model.bin", "copy or download", use_safetensors=False)

    def test_do_not_run_code_even_when_asked_for(self, pickled: Path) -> None:
        """transformers reads only tensors from pickled files."""
        marker = pickled / "executed"
        torch.save({"model.norm.weight": Touches(marker)}, pickled / "pytorch_model.bin")
        assert_refused(pickled, "pytorch_model.bin", use_safetensors=False)
        assert not marker.exists()
        torch.load(pickled / "pytorch_model.bin", weights_only=False)
        assert marker.exists(), "the pickle runs its code where that is allowed"

    def test_missing(self, folder: Path) -> None:
        assert_refused(folder, "pytorch_model.bin", kind=ModelNotFoundError, use_safetensors=False)


CODE = """
from transformers import LlamaConfig, LlamaForCausalLM


class OwnConfig(LlamaConfig):
    model_type = "own"


class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


class TestRemoteCode:
    @pytest.fixture
    def with_code(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """The Llama as a model that only its own ``own_code.py`` defines."""
        monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(folder.parent / "modules"))
        (folder / "own_code.py").write_text(CODE, encoding="utf-8")
        self.edit_config(
            folder,
            model_type="own",
            architectures=["OwnForCausalLM"],
            auto_map={"AutoConfig": "own_code.OwnConfig", "AutoModelForCausalLM": "own_code.OwnForCausalLM"},
        )
        return folder

    def edit_config(self, folder: Path, **changes: object) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | changes), encoding="utf-8")

    def test_is_refused_with_the_risk_and_the_key(self, with_code: Path) -> None:
        (with_code / "own_code.py").write_text("raise SystemExit('it ran')", encoding="utf-8")
        assert_refused(with_code, "config.json", "with all your rights", "'trust_remote_code: true'")

    def test_runs_when_asked_for(self, with_code: Path) -> None:
        backbone = load_backbone(BaseModelSpec(id=str(with_code), trust_remote_code=True))
        assert type(backbone.model).__name__ == "OwnForCausalLM"
        tensors = load_file(with_code / WEIGHTS)
        assert all(torch.equal(parameter, tensors[name]) for name, parameter in backbone.model.named_parameters())

    def test_broken_code_is_a_named_error(self, with_code: Path) -> None:
        (with_code / "own_code.py").write_text("import no_such_package_at_all", encoding="utf-8")
        assert_refused(with_code, "no_such_package_at_all", trust_remote_code=True)

    def test_is_left_alone_where_transformers_knows_the_architecture(self, folder: Path) -> None:
        """Phi-3's repository has both: its own code is ignored, and transformers' class is used."""
        self.edit_config(folder, auto_map={"AutoModelForCausalLM": "own_code.OwnForCausalLM"})
        (folder / "own_code.py").write_text("raise SystemExit('it ran')", encoding="utf-8")
        assert type(load_backbone(BaseModelSpec(id=str(folder))).model).__module__.startswith("transformers.")

    def test_code_of_a_tokenizer_is_refused_too(self, folder: Path) -> None:
        path = folder / "tokenizer_config.json"
        config = json.loads(path.read_text(encoding="utf-8"))
        config |= {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": [None, "own_code.OwnTokenizer"]}}
        path.write_text(json.dumps(config), encoding="utf-8")
        (folder / "own_code.py").write_text("raise SystemExit('it ran')", encoding="utf-8")
        assert_refused(folder, "tokenizer", "'trust_remote_code: true'")


class TestSlowTokenizers:
    """Tokenizers in Python do not report where in a text their tokens begin."""

    @pytest.fixture
    def with_slow(self, folder: Path) -> Path:
        for path in (*folder.glob("tokenizer*"), *folder.glob("special_tokens*"), *folder.glob("*.jinja")):
            path.unlink()
        (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b"]) + "\n")
        config = {"tokenizer_class": "BertJapaneseTokenizer", "word_tokenizer_type": "basic"}
        config |= {"subword_tokenizer_type": "wordpiece", "chat_template": "{{ messages[0]['content'] }}"}
        (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
        return folder

    def test_with_a_template_are_refused(self, with_slow: Path) -> None:
        assert_refused(with_slow, "tokenizer.json", "found BertJapaneseTokenizer", "remove the chat template")

    def test_without_one_are_loaded(self, with_slow: Path) -> None:
        path = with_slow / "tokenizer_config.json"
        config = json.loads(path.read_text(encoding="utf-8"))
        del config["chat_template"]
        path.write_text(json.dumps(config), encoding="utf-8")
        assert not load_backbone(BaseModelSpec(id=str(with_slow))).tokenizer.is_fast


def test_a_vision_language_model_is_loaded_for_rows_of_text(tmp_path: Path) -> None:
    """It runs its own forward pass on text, and adapters are on its language model only."""
    from alto.lora import linear_modules

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    vision, text = CLIPVisionConfig(**sizes, image_size=8, patch_size=4), LlamaConfig(**sizes, vocab_size=2048)
    torch.manual_seed(0)
    own = LlavaForConditionalGeneration(LlavaConfig(vision_config=vision, text_config=text, image_token_id=7))
    own.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(resolve_model("alto-tiny")).save_pretrained(tmp_path)
    backbone = load_backbone(BaseModelSpec(id=str(tmp_path)))
    ids = torch.arange(20, 40)
    with torch.no_grad():
        expected = own.eval()(input_ids=ids[None]).logits[0]
        found = backbone.logits(backbone.hidden_states(ids, torch.arange(20), [20]))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    names = [module.name for module in linear_modules(backbone.model)]
    assert len(names) == 2 * 7
    assert all(".language_model." in name for name in names)
    assert loading_class(BaseModelSpec(id=str(tmp_path))) == "AutoModelForImageTextToText"
    assert loading_class(BaseModelSpec(id="alto-tiny")) == "AutoModelForCausalLM"
    assert [module.name for module in linear_modules(build_skeleton(BaseModelSpec(id=str(tmp_path))))] == names


@pytest.mark.parametrize("name", ["./nowhere", "../nowhere", "/nowhere/at/all", "~/nowhere"])
def test_a_missing_path_is_reported_as_a_path(name: str) -> None:
    with pytest.raises(ModelNotFoundError, match=r"found no such folder; check the path$"):
        load_backbone(BaseModelSpec(id=name))
