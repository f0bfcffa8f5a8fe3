"""TRL's behaviour where a configuration is silent, or says no: precision, validation rows, order of rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl", reason="needs the peers: pip install -r benchmarks/peers.txt")

import pandas as pd
import peft
import transformers
import trl
from datasets import Dataset, DatasetDict

from alto.importing import ImportedFile, import_file
from alto.spec import Task

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

MESSAGES = [
    {"prompt": [{"role": "user", "content": f"{n}?"}], "completion": [{"role": "assistant", "content": f"{n}."}]}
    for n in range(4)
]
TEXTS = [{"prompt": f"{n}?", "completion": f"{n}."} for n in range(4)]


def imported(folder: Path, *overrides: str, **keys: Any) -> ImportedFile:
    file = folder / "task.yaml"
    file.write_text(json.dumps({"model_name_or_path": "m", "dataset_name": "a/b", "use_peft": True, **keys}))
    return import_file(file, "trl", overrides)


def task(config: Any, dataset: Any = "rows.jsonl", **keys: Any) -> Task:
    lora = peft.LoraConfig(r=4, target_modules=["q_proj"], base_model_name_or_path="used/before")
    return Task(**{"model": "alto-tiny", "dataset": dataset, "config": [lora, config], **keys})


def noted(made: Task, key: str) -> list[str]:
    return [note for note in made.notes if note.startswith(f"{key}:")]


@pytest.mark.parametrize(
    ("keys", "dtype"),
    [
        ({"bf16": False}, "float32"),
        ({"bf16": False, "fp16": False}, "float32"),
        ({"bf16": False, "fp16": True}, "float16"),
        ({"bf16": False, "dtype": "bfloat16"}, "bfloat16"),
        ({"fp16": False}, None),
        ({}, None),
    ],
)
def test_no_16_bits_are_float32(keys: dict[str, Any], dtype: str | None, tmp_path: Path) -> None:
    found = imported(tmp_path, **keys)
    assert found.values.get("dtype") == dtype
    assert any(note.key == "bf16" for note in found.notes) == (dtype == "float32")


def test_no_16_bits_as_objects(tmp_path: Path) -> None:
    """TRL's classes compute in bfloat16 by default, transformers' own in the precision of the model."""
    without = trl.SFTConfig(use_cpu=True, bf16=False)
    assert (task(without).dtype, len(noted(task(without), "bf16"))) == ("float32", 1)
    assert task(trl.SFTConfig(use_cpu=True)).dtype == "bfloat16"
    named = task(without, dtype="float16")
    assert (named.dtype, noted(named, "bf16")) == ("float16", [])
    plain = transformers.TrainingArguments(use_cpu=True)
    assert (task(plain).dtype, noted(task(plain), "bf16")) == ("auto", [])
    for arguments, dtype in ((without, "float32"), (plain, None)):
        (tmp_path / "args.json").write_text(arguments.to_json_string(), encoding="utf-8")
        assert import_file(tmp_path / "args.json").values.get("dtype") == dtype


def test_rows_that_are_held_out_are_reported(tmp_path: Path) -> None:
    """TRL trains all rows of its training split, whether it evaluates others or not."""
    for strategy in ({}, {"eval_strategy": "no"}, {"eval_strategy": "steps"}):
        (found,) = [str(note) for note in imported(tmp_path, **strategy).notes if note.key == "eval_strategy"]
        assert "or a tenth of its rows; validation_split and validation_dataset choose others" in found
    named = imported(tmp_path, "validation_dataset=a/c")
    assert not [note for note in named.notes if note.key == "eval_strategy"]
    config = trl.SFTConfig(use_cpu=True)
    rows = Dataset.from_list(MESSAGES)
    assert noted(task(config, rows), "eval_strategy")
    assert not noted(task(config, DatasetDict(train=rows, validation=rows)), "eval_strategy")
    assert not noted(task(config, rows, validation_split=0.5), "eval_strategy")


def test_the_order_of_kto_is_reported(tmp_path: Path) -> None:
    config = trl.KTOConfig(use_cpu=True)
    (found,) = noted(task(config), "train_sampling_strategy")
    assert found.startswith("train_sampling_strategy: used as random: every job shuffles its rows")
    (of_file,) = [note for note in imported(tmp_path, "method=kto").notes if note.key == "train_sampling_strategy"]
    assert str(of_file) == found
    assert not [note for note in imported(tmp_path).notes if note.key == "train_sampling_strategy"]
    assert not noted(task(trl.KTOConfig(use_cpu=True, train_sampling_strategy="random")), "train_sampling_strategy")


def test_a_configuration_that_peft_has_used_is_as_before() -> None:
    assert not noted(task(trl.SFTConfig(use_cpu=True)), "base_model_name_or_path")


@pytest.mark.parametrize(
    ("rows", "is_noted"),
    [
        (MESSAGES, False),
        (Dataset.from_list(MESSAGES), False),
        (DatasetDict(train=Dataset.from_list(MESSAGES)), False),
        (pd.DataFrame(MESSAGES), False),
        ([{**row, "tools": [{"name": "add"}]} for row in TEXTS], True),
        (pd.DataFrame(TEXTS), True),
        ("rows.jsonl", True),
        (lambda: iter(MESSAGES), True),
    ],
)
def test_texts_are_noted_unless_rows_in_hand_are_messages(rows: Any, is_noted: bool) -> None:
    assert bool(noted(task(trl.SFTConfig(use_cpu=True), rows), "dataset_format")) == is_noted


def test_first_rows_are_not_used_up() -> None:
    rows = iter(MESSAGES)
    with open(task(trl.SFTConfig(use_cpu=True), rows).dataset_name, encoding="utf-8") as file:
        assert len(file.readlines()) == len(MESSAGES)
