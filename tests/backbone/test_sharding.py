"""A base model sharded over ranks equals the whole model in weights, losses and gradients, and needs less memory."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sharded_checks as checks  # imports the benchmarks' counter
import torch
from architectures import build_tiny
from ranks import failures_on_ranks
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, PreTrainedModel

from alto.backbone import resolve_model
from alto.errors import ModelError, UnsupportedError

NUM_RANKS = 3
WEIGHTS = "model.safetensors"
BITS = ("4bit", "8bit")
Case = tuple[Callable[..., None], tuple[Any, ...]]
HAS_BITSANDBYTES = importlib.util.find_spec("bitsandbytes") is not None

LARGER = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 5}


def cases(base: Path) -> dict[str, Case]:
    """Return the checks by name; ``base`` is the folder of the models."""

    def folder(name: str) -> str:
        return str(base / name)

    found: dict[str, Case] = {}
    weights = checks.weights_equal_those_of_the_whole_model
    for name in ("llama", "llama-bias", "qwen3", "gemma-tied", "gemma3", "mistral", "phi"):
        for dtype in ("float32", "bfloat16") if name in ("llama", "gemma-tied", "gemma3", "phi") else ("float32",):
            found[f"weights of {name} in {dtype}"] = weights, (folder(name), NUM_RANKS, {"dtype": dtype})
    for name in ("llama", "gemma-tied"):
        found[f"weights of {name} on two ranks"] = weights, (folder(name), 2, {})
    for name in ("in several files", "bare body", "tied by the head's name"):
        found[f"weights {name}"] = weights, (folder(name), NUM_RANKS, {})
    found["weights of own code"] = weights, (folder("own code"), NUM_RANKS, {"trust_remote_code": True})
    for key in BITS * HAS_BITSANDBYTES:
        for dtype in ("float32", "bfloat16"):
            settings = {"quantisation": key, "dtype": dtype}
            packed = checks.packed_weights_equal_those_of_the_whole_model
            found[f"weights by {key} in {dtype}"] = packed, (folder("llama-bias"), NUM_RANKS, settings)
    refusals: dict[str, tuple[str, dict[str, bool], type[Exception], str]] = {
        "a weight missing": ("missing", {}, ModelError, r"no model\.layers\.1\.mlp\.up_proj\.weight; copy or download"),
        "a weight of another shape": (
            "mismatched",
            {},
            ModelError,
            r"model\.norm\.weight as \(7,\) instead of \(32,\)",
        ),
        "weights of other names": (
            "renamed",
            {},
            ModelError,
            r"and 18 more.*loads with 'num_gpus: 1'.*save_pretrained",
        ),
        "a pickle": ("pickled", {}, ModelError, r"found only pytorch_model\.bin.*; convert it to safetensors$"),
        "pickles asked for": ("llama", {"use_safetensors": False}, UnsupportedError, "'use_safetensors: false'; conv"),
        "no weights": ("empty", {}, ModelError, r"model\.safetensors"),
        "quantised on disk": ("quantised", {}, UnsupportedError, "already quantized on disk cannot be sharded"),
        "own code": ("own code", {}, ModelError, "with all your rights"),
        "torch_compile": ("llama", {"torch_compile": True}, UnsupportedError, "torch_compile: .* remove the key"),
    }
    for name, (model, settings, kind, message) in refusals.items():
        found[f"refused: {name}"] = checks.refused, (folder(model), settings, kind, message)
    equal = checks.losses_and_gradients_equal_those_of_the_whole_model
    for name in ("llama", "gemma-tied", "gemma2", "phi"):
        for is_on in (False, True):
            settings = {"gradient_checkpointing": is_on}
            found[f"training {name}, checkpointing {is_on}"] = equal, (folder(name), settings)
    for key in BITS * HAS_BITSANDBYTES:
        found[f"training by {key}"] = equal, (folder("llama-bias"), {"quantisation": key})
    found["evaluations leave nothing behind"] = checks.evaluations_leave_nothing_behind, (folder("larger"),)
    bytes_of_step = checks.a_step_gathers_the_base_and_nothing_else
    for name in ("llama", "gemma-tied"):
        for is_on in (False, True):
            found[f"bytes of a step of {name}, checkpointing {is_on}"] = bytes_of_step, (folder(name), is_on)
    found["memory of a step"] = checks.no_more_than_two_layers_lie_there_whole, (folder("larger"),)
    loading = checks.loading_holds_a_share_and_a_weight
    found["memory of loading"] = loading, (folder("larger"), {})
    for key in BITS * HAS_BITSANDBYTES:
        found[f"memory of loading by {key}"] = loading, (folder("larger"), {"quantisation": key})
    return found


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The failures of any rank, by the name of the case."""
    base = tmp_path_factory.mktemp("models")
    write_models(base)
    named = [(name, check, args) for name, (check, args) in cases(base).items()]
    return failures_on_ranks(NUM_RANKS, named, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", cases(Path()))
def test_on_three_ranks(name: str, failures: dict[str, str]) -> None:
    assert name not in failures, failures[name]


def write_models(base: Path) -> None:
    for name in ("llama", "llama-bias", "qwen3", "gemma2", "gemma3", "mistral", "phi"):
        save(build_tiny(name), base / name)
    save(build_tiny("gemma", tie_word_embeddings=True), base / "gemma-tied")
    save(build_tiny("llama", **LARGER), base / "larger")
    save(build_tiny("llama"), base / "in several files", max_shard_size="10KB")
    (save(build_tiny("llama"), base / "empty") / WEIGHTS).unlink()

    bare = save(build_tiny("gemma", tie_word_embeddings=True), base / "bare body")
    edit_weights(bare, lambda name, value: {name.removeprefix("model."): value})
    by_head = save(build_tiny("gemma", tie_word_embeddings=True), base / "tied by the head's name")
    edit_weights(by_head, lambda name, value: {"lm_head.weight" if "embed_tokens" in name else name: value})
    missing = save(build_tiny("llama"), base / "missing")
    edit_weights(missing, lambda name, value: {} if name.endswith("1.mlp.up_proj.weight") else {name: value})
    other = save(build_tiny("llama"), base / "mismatched")
    edit_weights(other, lambda name, value: {name: torch.ones(7) if name == "model.norm.weight" else value})
    edit_weights(save(build_tiny("llama"), base / "renamed"), lambda name, value: {f"other.{name}": value})

    pickled = save(build_tiny("llama"), base / "pickled")
    torch.save(load_file(pickled / WEIGHTS), pickled / "pytorch_model.bin")
    (pickled / WEIGHTS).unlink()
    edit_config(
        save(build_tiny("llama"), base / "quantised"),
        quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True},
    )
    own = save(build_tiny("llama"), base / "own code")
    (own / "own_code.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n\n\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own'\n\n\n"
        "class OwnForCausalLM(LlamaForCausalLM):\n    config_class = OwnConfig\n",
        encoding="utf-8",
    )
    auto = {"AutoConfig": "own_code.OwnConfig", "AutoModelForCausalLM": "own_code.OwnForCausalLM"}
    edit_config(own, model_type="own", architectures=["OwnForCausalLM"], auto_map=auto)


def save(model: PreTrainedModel, folder: Path, **settings: Any) -> Path:
    model.save_pretrained(folder, **settings)
    AutoTokenizer.from_pretrained(resolve_model("alto-tiny")).save_pretrained(folder)
    return folder


def edit_weights(folder: Path, edit: Callable[[str, torch.Tensor], dict[str, torch.Tensor]]) -> None:
    tensors: dict[str, torch.Tensor] = {}
    for name, value in load_file(folder / WEIGHTS).items():
        tensors |= edit(name, value)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | changes), encoding="utf-8")
