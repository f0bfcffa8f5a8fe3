"""Comparison of a model in memory with the model that its name loads, and its fingerprint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import save_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from alto.backbone import base_differences, base_fingerprint, borrowed, find_named_base, object_fingerprint
from alto.spec import BaseModelSpec
from alto.spec.base_model import BaseObjects


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("named") / "tiny")


def load(folder: Path, **settings: Any) -> BaseObjects:
    model = AutoModelForCausalLM.from_pretrained(folder, **settings)
    return BaseObjects(model=model, tokenizer=AutoTokenizer.from_pretrained(folder), name="<LlamaForCausalLM object>")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_loaded_model_is_the_one_of_its_name(folder: Path, dtype: str) -> None:
    named = find_named_base(load(folder, dtype=getattr(torch, dtype)))
    assert named is not None
    assert (named.model, named.dtype, named.chat_template) == (str(folder), dtype, None)


def use(objects: BaseObjects) -> None:
    """Use the model in ways that change nothing that training depends on."""
    model, tokenizer = objects.model, objects.tokenizer
    model.train()
    model.config.use_cache = False
    model.activation_checkpointing_enable()
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = "left"
    tokenizer(["a", "b b"], padding=True, truncation=True, max_length=4)


def test_usual_preparations_leave_it_the_same(folder: Path) -> None:
    objects = load(folder)
    use(objects)
    with borrowed(objects, torch.device("cpu")):
        assert find_named_base(objects) is not None


def test_a_chat_template_of_the_users_is_kept_by_itself(folder: Path) -> None:
    objects = load(folder)
    objects.tokenizer.chat_template = "{{ messages }}"
    named = find_named_base(objects)
    assert named is not None
    assert named.chat_template == "{{ messages }}"


def one_number(objects: BaseObjects) -> None:
    with torch.no_grad():
        objects.model.model.layers[1].mlp.down_proj.weight[7, 11] += 1e-3


def one_setting(objects: BaseObjects) -> None:
    objects.model.config.rms_norm_eps = 1e-3


def one_attribute(objects: BaseObjects) -> None:
    objects.model.model.layers[0].input_layernorm.variance_epsilon = 1e-3


def one_module(objects: BaseObjects) -> None:
    objects.model.model.layers[0].mlp.act_fn = torch.nn.ReLU()


def one_hook(objects: BaseObjects) -> None:
    objects.model.model.layers[0].mlp.register_forward_hook(lambda *_: None)


def another_forward(objects: BaseObjects) -> None:
    objects.model.model.norm.forward = lambda hidden: hidden


def one_token(objects: BaseObjects) -> None:
    objects.tokenizer.add_tokens(["<new>"])


def another_end(objects: BaseObjects) -> None:
    objects.tokenizer.eos_token = objects.tokenizer.convert_ids_to_tokens(5)


def no_name(objects: BaseObjects) -> None:
    objects.model.name_or_path = ""


def an_unknown_name(objects: BaseObjects) -> None:
    objects.model.name_or_path = "nobody/has-downloaded-this"


CHANGES = [
    *(one_number, one_setting, one_attribute, one_module, one_hook, another_forward),
    *(one_token, another_end, no_name, an_unknown_name),
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_changed_one_is_an_object_of_its_own(folder: Path, change: Callable[[BaseObjects], None]) -> None:
    objects = load(folder)
    change(objects)
    assert find_named_base(objects) is None


def test_mixed_precision_has_no_name(folder: Path) -> None:
    objects = load(folder)
    objects.model.model.layers[0].to(torch.bfloat16)
    assert find_named_base(objects) is None


def test_the_fingerprint_is_that_of_the_files_it_is_saved_to(folder: Path, tmp_path: Path) -> None:
    objects = load(folder)
    found = object_fingerprint(objects.model)
    objects.model.save_pretrained(tmp_path / "saved")
    saved = base_fingerprint(BaseModelSpec(id=str(tmp_path / "saved")))
    assert (found["weights"], found["config"]) == (saved["weights"], saved["config"])
    assert base_differences(saved, found) == []


def test_the_fingerprint_tells_other_weights_and_configurations(folder: Path) -> None:
    before = object_fingerprint(load(folder).model)
    for change, what in ((one_number, "other weights"), (one_setting, "a different config.json")):
        objects = load(folder)
        change(objects)
        assert base_differences(before, object_fingerprint(objects.model)) == [what]
    half = object_fingerprint(load(folder, dtype=torch.bfloat16).model)
    assert "other weights" in base_differences(before, half)
