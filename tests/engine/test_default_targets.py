"""Tasks that train the modules that PEFT chooses for the architecture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny import load_tokenizer, make_task, read_journal, save_model

import alto
from alto.engine.runner import portable
from alto.errors import TargetModuleError
from alto.spec import Task

Q_AND_V = ("q_proj", "v_proj")
NOTE = "target_modules: peft-default is q_proj, v_proj, PEFT's choice for models of the type llama."


def modules_of(task: Task) -> list[Any]:
    return [job.config.target_modules for job in task.jobs]


def test_a_run_trains_them_and_says_which_they_are(tmp_path: Path) -> None:
    task = make_task(tmp_path, target_modules="peft-default", max_steps=1, num_train_epochs=1, report_to="none")
    assert NOTE in alto.Engine(progress=False).preview(task).notes
    result = alto.Engine(output_dir=tmp_path / "runs", progress=False).tune(task)
    started = read_journal(result.run_dir)[0]
    assert NOTE in started["notes"]
    assert tuple(started["jobs"][0]["config"]["target_modules"]) == Q_AND_V
    saved = json.loads((Path(result.run_dir) / "best" / "adapter_config.json").read_text(encoding="utf-8"))
    assert sorted(saved["target_modules"]) == list(Q_AND_V)


@pytest.mark.parametrize(
    ("space", "expected"),
    [
        ({"target_modules": ["all-linear", "peft-default"]}, ["all-linear", Q_AND_V]),
        ({"target_modules": [["peft-default"], ["k_proj"]]}, [Q_AND_V, ("k_proj",)]),
        ({"paired": {"r": [2, 4], "target_modules": ["peft-default", "o_proj"]}}, [Q_AND_V, ("o_proj",)]),
    ],
)
def test_they_may_be_searched(tmp_path: Path, space: dict[str, Any], expected: list[Any]) -> None:
    found = portable(make_task(tmp_path, search_space=space))
    assert modules_of(found) == expected
    assert found.notes == (NOTE,)
    assert portable(found) == found, "a written task is resolved"


def test_they_keep_to_layers(tmp_path: Path) -> None:
    found = portable(make_task(tmp_path, target_modules=["peft-default"], layers_to_transform=[0]))
    assert modules_of(found) == [Q_AND_V]


def test_a_type_without_a_default_is_refused_before_training(tmp_path: Path, tiny_model: Any) -> None:
    tokenizer = load_tokenizer()
    tiny_model("phi3", vocab_size=len(tokenizer)).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    task = make_task(tmp_path, model=str(tmp_path / "base"), target_modules="peft-default")
    engine = alto.Engine(output_dir=tmp_path / "runs", progress=False)
    for use in (engine.tune, engine.preview):
        with pytest.raises(TargetModuleError, match="found 'phi3', for which it has none; name the modules"):
            use(task)
    assert not (tmp_path / "runs").exists()


def test_an_adapter_whose_description_names_no_modules_has_the_default_ones(tmp_path: Path) -> None:
    model = save_model(tmp_path / "base")
    keys: dict[str, Any] = {"model": str(model), "max_steps": 1, "num_train_epochs": 1, "report_to": "none"}
    engine = alto.Engine(output_dir=tmp_path / "runs", progress=False)
    first = engine.tune(make_task(tmp_path, target_modules=list(Q_AND_V), r=4, **keys))
    path = Path(first.run_dir) / "best" / "adapter_config.json"
    saved = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(saved | {"target_modules": None}), encoding="utf-8")
    task = make_task(tmp_path, init_adapter=str(path.parent), **keys)
    assert modules_of(portable(task)) == [Q_AND_V]
    engine.tune(task)
