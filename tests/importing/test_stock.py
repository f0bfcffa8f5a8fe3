"""Tasks made from the configurations in the documentation of each tool."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from foreign_configs import CONFIGS
from typer.testing import CliRunner, Result

import alto
from alto.cli import app
from alto.importing import NoteKind, import_file, imported_task
from alto.spec import Task

EXPECTED: dict[str, dict[str, Any]] = {
    path.name: yaml.safe_load(path.read_text(encoding="utf-8"))
    for path in (Path(__file__).parent / "expected").iterdir()
}
"""The keys of the task made from each configuration of the folder ``documented``."""


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_every_configuration_is_expected() -> None:
    assert EXPECTED.keys() == CONFIGS.keys()


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_a_configuration_becomes_the_expected_task(name: str, folder: Path) -> None:
    done = invoke("import", name, "--to", "task.yaml")
    assert done.exit_code == 0, done.output
    text = (folder / "task.yaml").read_text(encoding="utf-8")
    assert text.startswith(f"# Imported by alto from {name} (")
    assert yaml.safe_load(text) == EXPECTED[name]
    task, expected = alto.load_task("task.yaml"), Task(**EXPECTED[name])
    assert task.replace(dataset=expected.dataset, name=expected.name) == expected
    assert CONFIGS[name][0] in done.stderr


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_every_key_is_a_key_of_the_task_or_in_the_report(name: str, folder: Path) -> None:
    """Null keys, and values that ask for nothing, are exceptions."""
    imported = import_file(Path(name))
    assert imported.tool.title == CONFIGS[name][0]
    assert not [note for note in imported.notes if note.kind is NoteKind.UNKNOWN]
    assert all(note.text and "\n" not in str(note) for note in imported.notes)


def test_the_report_names_what_is_left_out(folder: Path) -> None:
    done = invoke("import", "axolotl-dpo.yml", "--to", "task.yaml")
    lines = [line.strip() for line in done.stderr.splitlines()]
    assert lines[0] == "axolotl-dpo.yml (Axolotl)"
    for start in (
        "chat_template: not supported: 'llama3' is one of Axolotl's own templates",
        "special_tokens.eos_token: not supported: the tokenizer is not changed",
        "gradient_accumulation_steps: used as per_device_train_batch_size: 8",
        "lora_dropout: used as 0.0",
        "sequence_len: used as max_length: 4096",
        "special_tokens.pad_token: not needed: rows are concatenated without padding",
        "model_type: not needed: ",
        "output_dir: not needed: ",
        "flash_attention: not needed: ",
    ):
        assert sum(line.startswith(start) for line in lines) == 1, (start, lines)
    kinds = [line.split(": ")[1].split(" as")[0] for line in lines[1:]]
    order = ["not supported", "used", "not needed"]
    assert sorted(kinds, key=order.index) == kinds, "the most important note is first"


@pytest.mark.parametrize("name", ["llamafactory-sft.yaml", "llamafactory-kto.yaml", "axolotl-lora.yml", "trl-sft.yaml"])
def test_rows_are_read_as_the_task_says(name: str, folder: Path) -> None:
    invoke("import", name, "--to", "task.yaml")
    done = invoke("preview", "task.yaml", "--rows", "1", "--plain")
    assert done.exit_code == 0, done.output
    assert "⟦" in done.stdout
    assert "0 truncated" in done.stdout


def test_without_a_file_the_task_is_printed(folder: Path) -> None:
    done = invoke("import", "axolotl-lora.yml", "--set", "lr=1e-3", "--set", "search_space.r=[8, 16]")
    assert done.exit_code == 0, done.output
    (folder / "printed.yaml").write_text(done.stdout, encoding="utf-8")
    task = alto.load_task("printed.yaml")
    assert [(job.config.learning_rate, job.config.r) for job in task.jobs] == [(1e-3, 8), (1e-3, 16)]
    assert task.dataset == str(folder / "data" / "alpaca.jsonl")


def test_files_that_are_elsewhere_keep_their_whole_path(folder: Path, tmp_path: Path) -> None:
    done = invoke("import", "axolotl-lora.yml", "--to", tmp_path / "tasks" / "task.yaml")
    assert done.exit_code == 0, done.output
    assert alto.load_task(tmp_path / "tasks" / "task.yaml").dataset == str(folder / "data" / "alpaca.jsonl")
    assert str(folder) in (tmp_path / "tasks" / "task.yaml").read_text(encoding="utf-8")


def test_a_path_in_an_override_is_relative_to_the_current_folder(folder: Path) -> None:
    (folder / "base").mkdir()
    paths = (
        "--set",
        "dataset=data/identity.json",
        "--set",
        "validation_dataset=data/alpaca.jsonl",
        "--set",
        "model=./base",
    )
    done = invoke("import", "axolotl-lora.yml", "--to", "tasks/task.yaml", *paths, "--set", "validation_split=null")
    assert done.exit_code == 0, done.output
    task = alto.load_task("tasks/task.yaml")
    assert (task.dataset, task.validation_dataset, task.model) == (
        str(folder / "data" / "identity.json"),
        str(folder / "data" / "alpaca.jsonl"),
        str(folder / "base"),
    )


def test_a_task_is_not_overwritten(folder: Path) -> None:
    (folder / "task.yaml").write_text("mine", encoding="utf-8")
    done = invoke("import", "axolotl-lora.yml", "--to", "task.yaml")
    assert "--to: expected a new file, found task.yaml" in str(done.exception)
    assert (folder / "task.yaml").read_text(encoding="utf-8") == "mine"


def test_nothing_is_written_where_the_task_is_refused(folder: Path) -> None:
    done = invoke("import", "axolotl-lora.yml", "--to", "task.yaml", "--set", "lr=-1")
    assert "learning_rate" in str(done.exception)
    assert not (folder / "task.yaml").exists()
    assert "sample_packing: used as" in done.stderr, "the report comes in any case"


def test_the_task_equals_the_checked_one(folder: Path) -> None:
    imported = imported_task([import_file(Path("axolotl-qlora.yml"))])
    (folder / "task.yaml").write_text(imported.to_yaml(folder), encoding="utf-8")
    assert alto.load_task("task.yaml") == imported.task
