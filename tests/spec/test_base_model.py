"""The base model of a task by name or as an object; two models are never confused."""

from __future__ import annotations

import json
import os
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from alto.errors import SpecError, UnsupportedError
from alto.spec import BaseModelSpec, Task, load_task
from alto.spec.base_model import BaseObjects, is_object_name

PLAIN = BaseModelSpec(id="alto-tiny")
CHANGES: dict[str, Any] = {
    "id": "another",
    "dtype": "bfloat16",
    "quantisation": "8bit",
    "torch_compile": True,
    "use_safetensors": False,
    "trust_remote_code": True,
    "chat_template": "{{ messages[0].content }}",
}


def test_every_field_has_a_change_here() -> None:
    assert CHANGES.keys() | {"objects"} == {field.name for field in fields(BaseModelSpec)}


@pytest.mark.parametrize("field", CHANGES)
def test_another_base_has_another_key(field: str) -> None:
    other = replace(PLAIN, **{field: CHANGES[field]})
    assert other != PLAIN
    assert json.dumps(other.key()) != json.dumps(PLAIN.key())
    assert json.dumps(other.key()) == json.dumps(replace(other).key())


@pytest.mark.parametrize("field", [None, *CHANGES])
def test_a_task_with_its_keys_names_it(field: str | None) -> None:
    base = PLAIN if field is None else replace(PLAIN, **{field: CHANGES[field]})
    assert Task(dataset="rows.jsonl", **base.task_keys()).base_model == base


@pytest.mark.parametrize(
    ("keys", "quantisation"), [({}, "none"), ({"load_in_4bit": True}, "4bit"), ({"load_in_8bit": True}, "8bit")]
)
def test_the_keys_of_a_task_say_how_it_is_quantised(keys: dict[str, bool], quantisation: str) -> None:
    base = Task(model="alto-tiny", dataset="rows.jsonl", **keys).base_model
    assert base.quantisation == quantisation
    given = {key: value for key, value in base.task_keys().items() if key.startswith("load_in_")}
    assert given == {"load_in_4bit": False, "load_in_8bit": False} | keys


class Network:
    """A model with all attributes that a specification reads."""

    config = SimpleNamespace()
    dtype = "torch.float32"

    def __init__(self, name_or_path: str = "") -> None:
        self.name_or_path = name_or_path

    def state_dict(self) -> dict[str, Any]:
        return {}


TOKENIZER = SimpleNamespace()


def make_task(**keys: Any) -> Task:
    return Task(**{"model": Network(), "tokenizer": TOKENIZER, "dataset": "rows.jsonl"} | keys)


@pytest.mark.parametrize("key", ["model", "base_model", "model_name_or_path"])
def test_the_objects_are_beside_the_keys(key: str) -> None:
    network = Network("someone/model")
    task = Task(**{key: network, "tokenizer": TOKENIZER, "dataset": "rows.jsonl"})
    assert task.model == "<Network object named 'someone/model'>"
    assert is_object_name(task.model)
    assert task.objects is not None
    assert (task.objects.model, task.objects.tokenizer) == (network, TOKENIZER)
    assert task.base_model.objects == task.objects
    assert not task.base_model.is_loadable
    assert not {"tokenizer", "objects"} & task.to_dict().keys()
    assert "object at 0x" not in task.to_yaml()


@pytest.mark.parametrize("name", ["", "it's", "two\nlines", "x" * 300, 3])
def test_a_name_that_cannot_be_shown_is_left_out(name: Any) -> None:
    assert make_task(model=Network(name)).model == "<Network object>"


@pytest.mark.parametrize("name", ["alto-tiny", "owner/name", "/a/folder", "<x>", "object", os.curdir])
def test_names_of_models_are_no_names_of_objects(name: str) -> None:
    assert not is_object_name(name)


def test_a_changed_task_has_the_same_objects_unless_another_model_is_named() -> None:
    task = make_task()
    changed = task.replace(seed=3, lr=1e-3)
    assert changed.objects is task.objects
    assert (changed.model, changed.jobs[0].config.seed) == (task.model, 3)
    assert task.replace() == task
    named = task.replace(model="alto-tiny")
    assert (named.model, named.objects) == ("alto-tiny", None)
    other = task.replace(model=Network("other"), tokenizer=TOKENIZER)
    assert other.model == "<Network object named 'other'>"
    assert other != task


def test_the_name_may_be_one_that_loads_the_same() -> None:
    """The engine finds this name."""
    task = make_task()
    assert task.objects is not None
    objects = BaseObjects(model=task.objects.model, tokenizer=TOKENIZER, name="alto-tiny")
    named = task.replace(model=objects, dtype="float32")
    assert (named.model, named.objects) == ("alto-tiny", task.objects)
    assert named.base_model.is_loadable
    assert named.base_model.key() == Task(model="alto-tiny", dataset="r", dtype="float32").base_model.key()


def test_the_key_of_an_object_has_its_fingerprint() -> None:
    prints = [{"weights": digest, "config": "c", "files": {}} for digest in ("a", "b")]
    keys = []
    for fingerprint in prints:
        objects = BaseObjects(model=Network(), tokenizer=TOKENIZER, name="<Network object>", fingerprint=fingerprint)
        keys.append(make_task().replace(model=objects).base_model.key())
    assert keys[0]["object"] == {"weights": "a", "config": "c"}
    assert keys[0] != keys[1]


def test_a_written_task_says_that_there_was_an_object(tmp_path: Path) -> None:
    path = tmp_path / "task.yaml"
    path.write_text(make_task(model=Network("a/b")).to_yaml(), encoding="utf-8")
    read = load_task(path)
    assert read.model == "<Network object named 'a/b'>"
    assert read.objects is None
    assert not read.base_model.is_loadable


@pytest.mark.parametrize("tokenizer", [None, "alto-tiny"])
def test_a_model_comes_with_its_tokenizer(tokenizer: object) -> None:
    with pytest.raises(SpecError, match=r"tokenizer should be the loaded tokenizer of the model, found"):
        make_task(tokenizer=tokenizer)


def test_a_tokenizer_comes_with_its_model() -> None:
    with pytest.raises(SpecError, match=r"should come with a model that is an object, found SimpleNamespace"):
        make_task(model="alto-tiny")


def test_what_is_no_model_is_refused_as_before() -> None:
    with pytest.raises(SpecError, match=r"model .* should be non-empty text, found 3"):
        Task(model=3, dataset="rows.jsonl")


@pytest.mark.parametrize(
    "keys",
    [
        {"dtype": "bfloat16"},
        {"load_in_4bit": True},
        {"load_in_8bit": True},
        {"torch_compile": True},
        {"trust_remote_code": True},
        {"use_safetensors": False},
    ],
    ids=lambda keys: next(iter(keys)),
)
def test_keys_that_say_how_a_model_is_loaded_are_refused(keys: dict[str, object]) -> None:
    with pytest.raises(UnsupportedError, match=next(iter(keys))):
        make_task(**keys)


def test_the_precision_of_the_object_may_be_named() -> None:
    assert make_task(dtype="float32").dtype == "float32"
