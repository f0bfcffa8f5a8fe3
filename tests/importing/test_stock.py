"""Configurations as the documentation of each tool shows them: what task they become."""

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
    "llamafactory-sft.yaml": {
        "model": "alto-tiny",
        "dataset": [
            {"path": "data/identity.json", "name": "identity", "dataset_format": "alpaca"},
            {"path": "data/alpaca.jsonl", "name": "alpaca", "dataset_format": "alpaca"},
        ],
        "validation_split": 0.1,
        "max_samples": 1000,
        "max_length": 2048,
        "method": "sft",
        "dtype": "bfloat16",
        "trust_remote_code": True,
        "report_to": "none",
        "target_modules": "all-linear",
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 8,
        "learning_rate": 1e-4,
        "num_train_epochs": 3,
        "lr_scheduler_type": "cosine",
        "warmup_ratio": 0.1,
        "r": 8,
    },
    "llamafactory-dpo.yaml": {
        "model": "alto-tiny",
        "dataset": "data/sharegpt_pairs.json",
        "dataset_format": "preference",
        "columns": {"prompt": "conversations", "chosen": "chosen", "rejected": "rejected"},
        "max_length": 1024,
        "method": "dpo",
        "dtype": "bfloat16",
        "loss_type": "sigmoid",
        "beta": 0.2,
        "target_modules": ["q_proj", "v_proj"],
        "per_device_train_batch_size": 8,
        "learning_rate": 5e-6,
        "num_train_epochs": 3,
        "lr_scheduler_type": "cosine",
        "warmup_ratio": 0.1,
        "r": 8,
        "lora_dropout": 0.0,
    },
    "llamafactory-kto.yaml": {
        "model": "alto-tiny",
        "dataset": "data/kto_en_demo.json",
        "dataset_format": "unpaired_preference",
        "columns": {"messages": "messages", "label": "label"},
        "validation_split": 0.1,
        "max_length": 2048,
        "method": "kto",
        "dtype": "bfloat16",
        "beta": 0.1,
        "target_modules": "all-linear",
        "per_device_train_batch_size": 8,
        "learning_rate": 5e-6,
        "num_train_epochs": 3,
        "lr_scheduler_type": "cosine",
        "warmup_ratio": 0.1,
        "r": 8,
    },
    "axolotl-lora.yml": {
        "model": "alto-tiny",
        "dataset": "data/alpaca.jsonl",
        "dataset_format": "alpaca",
        "validation_split": 0.05,
        "max_length": 4096,
        "method": "sft",
        "gradient_checkpointing": True,
        "r": 32,
        "lora_alpha": 16,
        "lora_dropout": 0.05,
        "target_modules": "all-linear",
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "num_train_epochs": 4,
        "optim": "adamw_torch_fused",
        "lr_scheduler_type": "cosine",
        "learning_rate": 2e-4,
        "warmup_ratio": 0.1,
        "weight_decay": 0.0,
    },
    "axolotl-instruct.yml": {
        "model": "alto-tiny",
        "dataset": "data/chat_messages.jsonl",
        "dataset_format": "messages",
        "columns": {"messages": "messages"},
        "validation_split": 0.1,
        "max_length": 4096,
        "method": "sft",
        "gradient_checkpointing": True,
        "load_in_8bit": True,
        "r": 16,
        "lora_alpha": 32,
        "lora_dropout": 0.05,
        "target_modules": "all-linear",
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "num_train_epochs": 3,
        "optim": "adamw_bnb_8bit",
        "lr_scheduler_type": "cosine",
        "learning_rate": 2e-4,
        "warmup_ratio": 0.1,
        "weight_decay": 0.0,
    },
    "axolotl-qlora.yml": {
        "model": "alto-tiny",
        "dataset": [
            {
                "path": "data/chat.jsonl",
                "name": "chat",
                "dataset_format": "sharegpt",
                "columns": {"messages": "conversations"},
            },
            {"path": "data/texts.jsonl", "name": "texts", "dataset_format": "text", "columns": {"text": "body"}},
        ],
        "max_length": 4096,
        "method": "sft",
        "gradient_checkpointing": True,
        "load_in_4bit": True,
        "r": 32,
        "lora_alpha": 16,
        "lora_dropout": 0.05,
        "target_modules": ["q_proj", "v_proj"],
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "num_train_epochs": 4,
        "optim": "adamw_torch",
        "lr_scheduler_type": "cosine_with_min_lr",
        "lr_scheduler_kwargs": {"min_lr_rate": 0.1},
        "learning_rate": 2e-4,
        "warmup_steps": 10,
        "weight_decay": 0.0,
    },
    "axolotl-dpo.yml": {
        "model": "alto-tiny",
        "dataset": "data/chat_pairs.jsonl",
        "dataset_format": "preference",
        "columns": {"prompt": "conversation", "chosen": "chosen", "rejected": "rejected"},
        "validation_split": 0.05,
        "max_length": 4096,
        "method": "dpo",
        "gradient_checkpointing": True,
        "load_in_8bit": True,
        "beta": 0.2,
        "r": 32,
        "lora_alpha": 16,
        "lora_dropout": 0.0,
        "target_modules": "all-linear",
        "per_device_train_batch_size": 8,
        "num_train_epochs": 4,
        "optim": "adamw_bnb_8bit",
        "lr_scheduler_type": "cosine",
        "learning_rate": 2e-4,
        "warmup_steps": 10,
        "weight_decay": 0.0,
    },
    "axolotl-kto.yml": {
        "model": "alto-tiny",
        "dataset": "data/labelled.jsonl",
        "dataset_format": "unpaired_preference",
        "columns": {"prompt": "prompt", "completion": "completion", "label": "label"},
        "validation_split": 0.1,
        "max_length": 2048,
        "method": "kto",
        "beta": 0.5,
        "desirable_weight": 0.2,
        "r": 32,
        "lora_alpha": 64,
        "lora_dropout": 0.0,
        "target_modules": "all-linear",
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 1,
        "num_train_epochs": 1,
        "optim": "adamw_torch",
        "lr_scheduler_type": "cosine",
        "learning_rate": 2e-4,
        "warmup_steps": 20,
        "weight_decay": 0.0,
    },
    "trl-sft.yaml": {
        "model": "alto-tiny",
        "dataset": "data/chat_messages.jsonl",
        "max_length": 512,
        "method": "sft",
        "gradient_checkpointing": True,
        "dtype": "bfloat16",
        "learning_rate": 2e-4,
        "num_train_epochs": 1,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 8,
        "r": 32,
        "lora_alpha": 16,
        "lora_dropout": 0.05,
        "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
    },
    "trl-dpo.yaml": {
        "model": "alto-tiny",
        "dataset": "trl-lib/ultrafeedback_binarized",
        "dataset_test_split": "holdout",
        "max_length": 1024,
        "method": "dpo",
        "loss_type": ["sigmoid"],
        "beta": 0.3,
        "learning_rate": 5e-6,
        "num_train_epochs": 1,
        "per_device_train_batch_size": 16,
        "r": 32,
        "lora_alpha": 16,
        "lora_dropout": 0.0,
        "target_modules": "all-linear",
    },
    "trl-kto.yaml": {
        "model": "alto-tiny",
        "dataset": "trl-lib/kto-mix-14k",
        "max_length": 1024,
        "method": "kto",
        "load_in_4bit": True,
        "loss_type": "kto",
        "beta": 0.2,
        "undesirable_weight": 1.33,
        "learning_rate": 5e-7,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 0.1,
        "num_train_epochs": 2,
        "per_device_train_batch_size": 16,
        "r": 16,
        "lora_alpha": 16,
        "lora_dropout": 0.0,
        "target_modules": "all-linear",
    },
}
"""The keys of the task that each configuration becomes."""


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
    """But those that are null, or at a value that asks for nothing."""
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
    assert sorted(kinds, key=order.index) == kinds, "what matters most is first"


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
