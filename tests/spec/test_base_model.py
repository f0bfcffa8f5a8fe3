"""Which base model a task names, and that two of them are never taken for one."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import Any

import pytest

from alto.spec import BaseModelSpec, Task

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
