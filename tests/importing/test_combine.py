"""Several configurations become one task: differing settings are paired, and those that must not differ are named."""

from __future__ import annotations

from pathlib import Path

import pytest
from foreign_configs import CONFIGS

from alto.errors import SpecError
from alto.importing import ImportedTask, import_file, imported_task
from alto.spec import load_task


def together(folder: Path, *changes: dict[str, str], overrides: tuple[str, ...] = ()) -> ImportedTask:
    """Return the task of Axolotl's configuration with each of ``changes`` of its lines."""
    files = []
    for number, changed in enumerate(changes):
        text = CONFIGS["axolotl-lora.yml"][1]
        for old, new in changed.items():
            assert old in text
            text = text.replace(old, new)
        path = folder / f"config-{number}.yml"
        path.write_text(text, encoding="utf-8")
        files.append(import_file(path, overrides=overrides))
    return imported_task(files, overrides)


def test_what_differs_is_paired_and_the_rest_is_fixed(folder: Path) -> None:
    imported = together(
        folder,
        {},
        {"lora_r: 32": "lora_r: 8", "learning_rate: 2e-4": "learning_rate: 1e-3"},
        {"lora_dropout: 0.05": "lora_dropout: 0.1"},
    )
    assert imported.values["search_space"] == {
        "paired": {"r": [32, 8, 32], "lora_dropout": [0.05, 0.05, 0.1], "learning_rate": [2e-4, 1e-3, 2e-4]}
    }
    jobs = [(job.config.r, job.config.learning_rate, job.config.lora_dropout) for job in imported.task.jobs]
    assert jobs == [(32, 2e-4, 0.05), (8, 1e-3, 0.05), (32, 2e-4, 0.1)]
    assert {job.config.lora_alpha for job in imported.task.jobs} == {16}
    (folder / "task.yaml").write_text(imported.to_yaml(folder), encoding="utf-8")
    assert load_task("task.yaml") == imported.task


def test_one_field_is_a_grid(folder: Path) -> None:
    imported = together(folder, {}, {"lora_r: 32": "lora_r: 8"})
    assert imported.values["search_space"] == {"r": [32, 8]}


def test_lists_stay_values(folder: Path) -> None:
    imported = together(
        folder, {}, {"lora_target_linear: true": "lora_target_modules: [q_proj, v_proj]", "lora_r: 32": "lora_r: 8"}
    )
    assert imported.values["search_space"] == {
        "paired": {"r": [32, 8], "target_modules": ["all-linear", ["q_proj", "v_proj"]]}
    }
    assert [job.config.target_modules for job in imported.task.jobs] == ["all-linear", ("q_proj", "v_proj")]


def test_what_one_leaves_out_has_its_default(folder: Path) -> None:
    imported = together(folder, {}, {"lora_alpha: 16": "", "lora_dropout: 0.05": ""})
    assert imported.values["search_space"]["paired"] == {"lora_alpha": [16, "2*r"], "lora_dropout": [0.05, 0.0]}
    assert [job.config.lora_alpha for job in imported.task.jobs] == [16, 64]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"base_model: alto-tiny": "base_model: other"}, "found model 'alto-tiny', 'other'"),
        ({"data/alpaca.jsonl": "data/labelled.jsonl"}, "found dataset '.*alpaca.jsonl', '.*labelled.jsonl'"),
        ({"sequence_len: 4096": "sequence_len: 512"}, "found max_length 4096, 512"),
        ({"val_set_size: 0.05": "val_set_size: 0.1"}, "found validation_split 0.05, 0.1"),
        ({}, "expected different configurations, found equal ones"),
    ],
)
def test_configurations_of_different_tasks_are_refused(folder: Path, change: dict[str, str], reason: str) -> None:
    with pytest.raises(SpecError, match=f"config-0.yml, .*config-1.yml: .*{reason}"):
        together(folder, {}, change)


def test_all_that_differs_is_named_at_once(folder: Path) -> None:
    with pytest.raises(SpecError, match=r"found .*model .*; max_length"):
        together(folder, {}, {"base_model: alto-tiny": "base_model: other", "sequence_len: 4096": "sequence_len: 512"})


def test_two_equal_ones_of_three_are_refused(folder: Path) -> None:
    with pytest.raises(SpecError, match=r"found that job-000 and job-002 are equal|different values"):
        together(folder, {}, {"lora_r: 32": "lora_r: 8", "learning_rate: 2e-4": "learning_rate: 1e-3"}, {})


def test_overrides_hold_for_every_configuration(folder: Path) -> None:
    changed = {"lora_r: 32": "lora_r: 8", "sequence_len: 4096": "sequence_len: 512"}
    imported = together(folder, {}, changed, overrides=("max_length=64", "search_space.seed=[1, 2]"))
    assert imported.task.max_length == 64
    assert [(job.config.r, job.config.seed) for job in imported.task.jobs] == [(32, 1), (32, 2), (8, 1), (8, 2)]


def test_tools_may_differ(folder: Path) -> None:
    """They must agree on everything that a task fixes."""
    (folder / "more.yml").write_text(
        CONFIGS["axolotl-dpo.yml"][1].replace("rl_beta: 0.2", "rl_beta: 0.5"), encoding="utf-8"
    )
    imported = imported_task([import_file(folder / "axolotl-dpo.yml"), import_file(folder / "more.yml")])
    assert imported.values["search_space"] == {"beta": [0.2, 0.5]}
    assert imported.to_yaml(folder).startswith(
        "# Imported by alto from axolotl-dpo.yml (Axolotl), more.yml (Axolotl)\n"
    )


def test_one_file_twice_is_refused(folder: Path) -> None:
    found = import_file(folder / "axolotl-dpo.yml")
    with pytest.raises(SpecError, match=r"axolotl-dpo\.yml: expected each configuration once, found it twice"):
        imported_task([found, import_file(Path("axolotl-dpo.yml"))])
