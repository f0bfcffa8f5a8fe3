"""A configuration with any value in any place becomes a task, or a readable error."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from foreign_configs import CONFIGS, DATASET_INFO

from alto.errors import AltoError
from alto.importing.draft import Draft
from alto.importing.imported import TOOLS
from alto.importing.llamafactory import read_llamafactory
from alto.importing.llamafactory_data import _source
from alto.spec import Task
from alto.spec.method import find_method
from alto.spec.strict_yaml import read_yaml

JUNK: tuple[Any, ...] = (
    *(None, True, False, 0, 3, -1.5, 10**30, float("inf"), "", "x", "\0", "{", "a,b", "~nobody/x"),
    *(
        [],
        [1],
        ["x"],
        [[]],
        [{}],
        [None],
        {},
        {"a": 1},
        {1: 2},
        {"path": 3},
        [{"path": "a/b"}],
        [{"path": "a/b", "type": 3}],
    ),
)
OTHER_KEYS: dict[str, tuple[str, ...]] = {
    "LLaMA-Factory": (
        *("eval_dataset", "interleave_probs", "mix_strategy", "dataset_dir", "quantization_bit", "packing"),
        *("pref_loss", "pref_ftx", "simpo_gamma", "dpo_label_smoothing", "train_on_prompt", "lr_scheduler_kwargs"),
        *("warmup_steps", "optim", "dtype", "max_steps", "report_to"),
    ),
    "Axolotl": (
        *("test_datasets", "special_tokens", "batch_size", "chat_template", "chat_template_jinja", "wandb_project"),
        *("pretraining_dataset", "rl", "rl_beta", "orpo_alpha", "lora_target_modules", "torch_compile", "use_wandb"),
        *("excess_length_strategy", "cosine_min_lr_ratio", "lr_scheduler_kwargs", "optim_args", "train_on_inputs"),
    ),
    "TRL": (
        *("datasets", "test_split_size", "dataset_text_field", "completion_only_loss", "loss_type", "beta"),
        *("chat_template_path", "disable_dropout", "lr_scheduler_kwargs", "no_remove_unused_columns", "report_to"),
    ),
}
"""Further keys that importers read themselves."""


def with_junk(value: Any) -> Iterator[Any]:
    yield from JUNK
    if isinstance(value, dict):
        for key, inner in value.items():
            for junk in with_junk(inner):
                yield {**value, key: junk}
    if isinstance(value, list):
        for index, inner in enumerate(value):
            for junk in with_junk(inner):
                yield [*value[:index], junk, *value[index + 1 :]]


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_a_wrong_value_is_an_error_in_words(name: str, folder: Path) -> None:
    title, text = CONFIGS[name]
    given = read_yaml(text)
    tool = next(tool for tool in TOOLS.values() if tool.title == title)
    outcomes = {"task": 0, "error": 0}
    for key in (*given, *OTHER_KEYS[title]):
        for junk in with_junk(given.get(key)):
            draft = Draft(given={**given, key: junk}, folders=(folder,))
            try:
                tool.read(draft, None)
                Task(**draft.values)
                outcomes["task"] += 1
            except AltoError:
                outcomes["error"] += 1
            except Exception as error:
                raise AssertionError(f"{name}: {key} = {junk!r}") from error
    assert min(outcomes.values()) > 50, outcomes


@pytest.mark.parametrize("name", sorted(DATASET_INFO))
def test_a_wrong_dataset_info_is_an_error_in_words(name: str, folder: Path) -> None:
    for method in ("sft", "dpo", "kto"):
        for entry in with_junk(DATASET_INFO[name]):
            draft = Draft(given={}, folders=(folder,))
            try:
                _source(draft, {"mine": entry}, folder, "mine", find_method(method))
            except AltoError:
                continue
            except Exception as error:
                raise AssertionError(f"{name}: {entry!r}") from error


def test_the_reader_of_llamafactory_needs_no_dataset(folder: Path) -> None:
    draft = Draft(given={"stage": "sft"}, folders=(folder,))
    read_llamafactory(draft, None)
    assert "dataset" not in draft.values
