"""Datasets and keys of Axolotl."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from alto.errors import AltoError, SpecError, UnsupportedError
from alto.importing import ImportedFile, import_file, imported_task

BASE: dict[str, Any] = {
    "base_model": "alto-tiny",
    "adapter": "lora",
    "lora_r": 8,
    "lora_alpha": 16,
    "lora_target_linear": True,
    "learning_rate": 1e-4,
    "datasets": [{"path": "data/alpaca.jsonl", "type": "alpaca"}],
    "val_set_size": 0.1,
    "warmup_steps": 5,
}


def imported(folder: Path, **keys: Any) -> ImportedFile:
    (folder / "config.json").write_text(json.dumps(BASE | keys), encoding="utf-8")
    return import_file(folder / "config.json", "axolotl")


def notes(found: ImportedFile) -> list[str]:
    return [str(note) for note in found.notes]


def line(found: ImportedFile, key: str) -> str:
    (text,) = [str(note) for note in found.notes if note.key == key]
    return text


def test_what_the_file_leaves_out_is_axolotls_default(folder: Path) -> None:
    found = imported(folder, warmup_steps=None)
    expected = {"max_length": 512, "per_device_train_batch_size": 1, "num_train_epochs": 1}
    expected |= {"lr_scheduler_type": "cosine", "warmup_ratio": 0.03}
    assert expected.items() <= found.values.items()
    assert "Axolotl's default warmup" in line(found, "warmup_steps")


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"warmup_steps": 0}, {}),
        ({"warmup_steps": None, "warmup_ratio": 0.0}, {}),
        ({"warmup_steps": None, "warmup_ratio": 0.2}, {"warmup_ratio": 0.2}),
        ({"warmup_steps": None, "lr_scheduler": "constant"}, {}),
    ],
)
def test_a_warmup_of_zero_is_one(folder: Path, keys: dict[str, Any], expected: dict[str, Any]) -> None:
    """Axolotl has its own default only if neither key is given."""
    found = imported(folder, **keys)
    assert {key: value for key, value in found.values.items() if key.startswith("warmup")} == expected
    assert not any(note.key.startswith("warmup") for note in found.notes)


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ({"path": "a/b", "type": "alpaca"}, {"dataset": "a/b", "dataset_format": "alpaca"}),
        ({"path": "a/b", "type": "alpaca:phi", "split": "train"}, {"dataset": "a/b", "dataset_format": "alpaca"}),
        (
            {"path": "a/b", "name": "main", "split": "sft", "type": "alpaca_chat.load_qa"},
            {
                "dataset_config": "main",
                "dataset_train_split": "sft",
                "dataset_format": "prompt_completion",
                "columns": {"prompt": "question", "completion": "answer"},
            },
        ),
        ({"path": "a/b", "type": "chat_template"}, {"dataset_format": "messages", "columns": {"messages": "messages"}}),
        (
            {
                "path": "a/b",
                "type": "chat_template",
                "field_messages": "talk",
                "field_tools": "tools",
                "message_field_role": "from",
                "message_field_content": "value",
                "roles": {"user": ["human"], "assistant": ["gpt", "model"]},
            },
            {"dataset_format": "sharegpt", "columns": {"messages": "talk", "tools": "tools"}},
        ),
        ({"path": "a/b", "type": "sharegpt"}, {"dataset_format": "sharegpt", "columns": {"messages": "conversations"}}),
        ({"path": "a/b", "type": "completion"}, {"dataset_format": "text"}),
        ({"path": "a/b", "type": "completion", "field": "body"}, {"columns": {"text": "body"}}),
        (
            {"path": "a/b", "type": {"field_instruction": "q", "field_output": "a", "field_system": "s"}},
            {"dataset_format": "prompt_completion", "columns": {"system": "s", "prompt": "q", "completion": "a"}},
        ),
        (
            {"path": "a/b", "type": {"field_instruction": "q", "field_input": "i", "field_output": "a"}},
            {"dataset_format": "alpaca", "columns": {"instruction": "q", "input": "i", "output": "a"}},
        ),
    ],
)
def test_types_of_rows(folder: Path, entry: dict[str, Any], expected: dict[str, Any]) -> None:
    found = imported(folder, datasets=[entry])
    assert expected.items() <= found.values.items()
    imported_task([found])


@pytest.mark.parametrize(
    ("kind", "columns"),
    [
        ("chatml.intel", {"prompt": "question"}),
        ("llama3.icr", {"prompt": "input"}),
        ("llama3.ultra", {"prompt": "prompt"}),
        ("chatml.argilla", None),
        ("chat_template.argilla_chat", None),
        (
            {"field_prompt": "q", "field_chosen": "good", "field_rejected": "bad"},
            {"prompt": "q", "chosen": "good", "rejected": "bad"},
        ),
    ],
)
@pytest.mark.parametrize("rl", ["dpo", "ipo", "orpo", "simpo"])
def test_types_of_pairs(folder: Path, rl: str, kind: object, columns: dict[str, str] | None) -> None:
    found = imported(folder, rl=rl, datasets=[{"path": "a/b", "type": kind}])
    assert found.values["dataset_format"] == "preference"
    assert found.values.get("columns") == columns
    method = {"ipo": "dpo", "simpo": "cpo"}.get(rl, rl)
    assert imported_task([found]).task.method == method


@pytest.mark.parametrize("rl", ["simpo", "ipo"])
def test_forms_of_losses(folder: Path, rl: str) -> None:
    pairs = [{"path": "a/b", "type": "chatml.intel"}]
    found = imported(folder, rl=rl, rl_beta=0.3, datasets=pairs, **({"simpo_gamma": 0.7} if rl == "simpo" else {}))
    settings = imported_task([found]).task.jobs[0].config.objective.to_dict()
    assert (settings["loss_type"], settings["beta"]) == (rl, 0.3)
    assert settings.get("simpo_gamma") == (0.7 if rl == "simpo" else None)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"rl": "dpo", "trl": {"beta": 0.4}, "rl_beta": 0.2}, {"method": "dpo", "beta": 0.4}),
        (
            {"rl": "dpo", "dpo_loss_type": ["sigmoid", "sft"], "dpo_loss_weights": [1.0, 0.2]},
            {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.2]},
        ),
        ({"rl": "dpo", "dpo_label_smoothing": 0.1}, {"label_smoothing": 0.1}),
        ({"rl": "ipo", "dpo_label_smoothing": 0.1}, {"loss_type": "ipo"}),
        ({"rl": "simpo", "simpo_gamma": 0.7, "cpo_alpha": 0.2}, {"loss_type": "simpo", "cpo_alpha": 0.2}),
    ],
)
def test_settings_of_preferences(folder: Path, keys: dict[str, Any], expected: dict[str, Any]) -> None:
    found = imported(folder, datasets=[{"path": "a/b", "type": "chatml.intel"}], **keys)
    assert expected.items() <= found.values.items()
    config = imported_task([found]).task.jobs[0].config
    assert config.lora_alpha == 16
    assert "label_smoothing" not in found.values or keys["rl"] == "dpo"


def test_other_settings_of_trl_are_reported(folder: Path) -> None:
    pairs = [{"path": "a/b", "type": "chatml.intel"}]
    found = imported(folder, rl="dpo", datasets=pairs, trl={"beta": 0.4, "sync_ref_model": True})
    assert line(found, "trl").startswith("trl: not supported")
    assert not any(note.key == "trl" for note in imported(folder, rl="dpo", datasets=pairs, trl={"beta": 0.4}).notes)


def test_orpo_has_alpha_for_beta(folder: Path) -> None:
    found = imported(folder, rl="orpo", orpo_alpha=0.4, datasets=[{"path": "a/b", "type": "chat_template.argilla"}])
    assert found.values["beta"] == 0.4


@pytest.mark.parametrize(("kind", "prompt"), [("llama3.argilla", "instruction"), ("chatml.intel", "question")])
def test_types_of_labelled_replies(folder: Path, kind: str, prompt: str) -> None:
    found = imported(folder, rl="kto", micro_batch_size=2, datasets=[{"path": "a/b", "type": kind}])
    assert found.values["columns"] == {"prompt": prompt, "completion": "completion", "label": "label"}
    imported_task([found])


def test_a_labelled_conversation(folder: Path) -> None:
    found = imported(folder, rl="kto", micro_batch_size=2, datasets=[{"path": "a/b", "type": "llama3.argilla_chat"}])
    assert found.values["columns"] == {"messages": "completion", "label": "label"}
    imported_task([found])


@pytest.mark.parametrize(
    ("entry", "keys", "reason"),
    [
        ({"type": "reflection"}, {}, "datasets[0].type: expected one of alpaca, "),
        ({"type": "input_output"}, {}, "which ALTO cannot read. Convert the rows into messages"),
        ({"type": None}, {}, "found None"),
        ({"type": "chatml.nectar"}, {"rl": "dpo"}, "found 'chatml.nectar', which ALTO cannot read"),
        ({"type": "chatml.other"}, {"rl": "kto"}, "with the columns prompt, completion and label"),
        ({"type": "alpaca", "split": "train+test"}, {}, "expected the name of a split, found 'train+test'"),
        ({"type": "alpaca", "data_files": ["a.json", "b.json"]}, {}, "data_files: expected one file"),
        ({"type": "alpaca", "data_files": "a.json"}, {}, "expected a local file, found 'a.json' of 'a/b'"),
        ({"type": "alpaca", "path": "s3://bucket/x"}, {}, "found the address 's3://bucket/x'"),
        ({"type": "alpaca", "path": "data"}, {}, "found the folder"),
        (
            {"type": "chat_template", "message_property_mappings": {"role": "who", "content": "says"}},
            {},
            "found 'who' and 'says'. Rename them in the rows",
        ),
        (
            {"type": "chat_template", "roles": {"user": ["client"]}},
            {},
            "a known name of the speaker user (user), found 'client'",
        ),
        ({"type": "chat_template", "roles": {"narrator": ["narrator"]}}, {}, "a known name of the speaker narrator"),
    ],
)
def test_datasets_that_cannot_be_read(folder: Path, entry: dict[str, Any], keys: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        imported(folder, datasets=[{"path": "a/b", **entry}], **keys)
    assert reason in str(caught.value)


def test_files_by_a_builder_and_in_a_folder(folder: Path) -> None:
    path = str(folder / "data" / "alpaca.jsonl")
    for entry in (
        {"path": "json", "data_files": "data/alpaca.jsonl"},
        {"path": "data", "data_files": ["alpaca.jsonl"]},
    ):
        assert imported(folder, datasets=[{"type": "alpaca", "split": "train", **entry}]).values["dataset"] == path


def test_test_datasets_are_validation_rows(folder: Path) -> None:
    rows = {"path": "data/identity.json", "type": "alpaca"}
    found = imported(folder, test_datasets=[rows], val_set_size=0)
    assert found.values["validation_dataset"] == str(folder / "data" / "identity.json")
    assert "validation_split" not in found.values
    assert not any(text.startswith("val_set_size") for text in notes(found))
    imported_task([found])
    apart = imported(folder, test_datasets=[{"path": "a/b", "type": "alpaca", "split": "test"}])
    assert "test_datasets: not supported" in line(apart, "test_datasets")
    assert "validation_dataset" not in apart.values


@pytest.mark.parametrize(
    ("entry", "key"),
    [
        ({"train_on_eos": "all"}, "datasets[0].train_on_eos"),
        ({"roles_to_train": ["user", "assistant"]}, "datasets[0].roles_to_train"),
        ({"chat_template": "chatml"}, "datasets[0].chat_template"),
        ({"revision": "abc"}, "datasets[0].revision"),
        ({"split": "train[:10%]"}, "datasets[0].split"),
        ({"message_field_training": "train"}, "datasets[0].message_field_training"),
        ({"drop_system_message": True}, "datasets[0].drop_system_message"),
    ],
)
def test_keys_of_a_dataset_that_are_left_out_are_reported(folder: Path, entry: dict[str, Any], key: str) -> None:
    found = imported(folder, datasets=[{"path": "a/b", "type": "chat_template", **entry}])
    assert line(found, key).startswith(f"{key}: not supported: ")
    assert "dataset_train_split" not in found.values


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"lora_target_linear": None, "lora_target_modules": ["q_proj"]}, {"target_modules": ["q_proj"]}),
        ({"lora_target_modules": ["q_proj"]}, {"target_modules": "all-linear"}),
        ({"adapter": "qlora"}, {"load_in_4bit": True}),
        ({"bf16": True}, {"dtype": "bfloat16"}),
        ({"fp16": True}, {"dtype": "float16"}),
        ({"float32": True}, {"dtype": "float32"}),
        (
            {"batch_size": 32, "micro_batch_size": 4},
            {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 8},
        ),
        (
            {"batch_size": 32, "gradient_accumulation_steps": 2},
            {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 2},
        ),
        ({"train_on_inputs": True}, {"train_on": "all"}),
        ({"wandb_project": "mine"}, {"report_to": ["wandb"]}),
        ({"use_tensorboard": True}, {"report_to": ["tensorboard"]}),
        ({"optimizer": "adamw_bnb_8bit"}, {"optim": "adamw_bnb_8bit"}),
        ({"peft_layers_to_transform": [0]}, {"layers_to_transform": [0]}),
        ({"peft_use_dora": True}, {"use_dora": True}),
        ({"lora_modules_to_save": ["embed_tokens"]}, {"modules_to_save": ["embed_tokens"]}),
        ({"lora_rank_pattern": {"q_proj": 4}}, {"rank_pattern": {"q_proj": 4}}),
        ({"lora_alpha_pattern": {"q_proj": 4}}, {"alpha_pattern": {"q_proj": 4}}),
        ({"bf16": "full"}, {"dtype": "bfloat16"}),
        ({"chat_template_jinja": "{{ messages }}", "chat_template": "jinja"}, {"chat_template": "{{ messages }}"}),
        ({"gradient_checkpointing": "offload"}, {"gradient_checkpointing": True}),
        ({"lr_scheduler": "constant", "warmup_steps": 5}, {"lr_scheduler_type": "constant"}),
        ({"noisy_embedding_alpha": 5}, {"neftune_noise_alpha": 5}),
        ({"load_in_8bit": True}, {"load_in_8bit": True}),
    ],
)
def test_keys_that_become_another_one(folder: Path, keys: dict[str, Any], expected: dict[str, Any]) -> None:
    found = imported(folder, **keys)
    assert expected.items() <= found.values.items()
    imported_task([found])


@pytest.mark.parametrize(
    ("key", "value", "kind"),
    [
        ("lora_model_dir", "./old", "not supported"),
        ("relora", True, "not supported"),
        ("tokens", ["<x>"], "not supported"),
        ("chat_template", "chatml", "not supported"),
        ("default_system_message", "Be kind.", "not supported"),
        ("optimizer", "paged_adamw_32bit", "used as"),
        ("plugins", ["axolotl.integrations.liger.LigerPlugin"], "not needed"),
        ("deepspeed", "zero3.json", "not needed"),
        ("shuffle_merged_datasets", False, "not needed"),
        ("early_stopping_patience", 3, "not needed"),
        ("tf32", True, "not supported"),
        ("bogus", 1, "unknown"),
    ],
)
def test_keys_that_are_left_out_are_reported(folder: Path, key: str, value: object, kind: str) -> None:
    assert line(imported(folder, **{key: value}), key).startswith(f"{key}: {kind}")


@pytest.mark.parametrize(
    "keys",
    [
        {"flash_attention": False},
        {"deepspeed": None},
        {"strict": False},
        {"wandb_project": ""},
        {"tokens": []},
        {"chat_template": "tokenizer_default"},
        {"shuffle_merged_datasets": True},
        {"tf32": False},
        {"group_by_length": False},
    ],
)
def test_keys_that_ask_for_nothing_are_not_reported(folder: Path, keys: dict[str, Any]) -> None:
    assert notes(imported(folder, **keys)) == notes(imported(folder))


@pytest.mark.parametrize(
    ("keys", "error", "reason"),
    [
        ({"adapter": None}, UnsupportedError, "adapter: expected lora or qlora, found none"),
        ({"adapter": "llama-adapter"}, UnsupportedError, "found 'llama-adapter'"),
        (
            {"rl": "grpo"},
            UnsupportedError,
            "rl: ALTO does not support 'grpo'; supported values: dpo, ipo, orpo, kto, simpo",
        ),
        ({"reward_model": True}, UnsupportedError, "reward_model: expected false"),
        ({"pretraining_dataset": [{"path": "x"}]}, UnsupportedError, "pretraining_dataset: expected datasets"),
        ({"datasets": "a/b"}, SpecError, "datasets: expected a list of mappings"),
        ({"special_tokens": ["<x>"]}, SpecError, "special_tokens: expected a mapping"),
        ({"optimizer": "muon"}, SpecError, "optim "),
        ({"num_epochs": -1.5}, SpecError, "num_train_epochs .* found -1.5"),
        ({"datasets": None}, SpecError, "expected a dataset, found none. Give it with --set dataset=NAME"),
    ],
)
def test_other_training_is_refused(folder: Path, keys: dict[str, Any], error: type[AltoError], reason: str) -> None:
    with pytest.raises(error, match=reason):
        imported_task([imported(folder, **keys)])
