"""Datasets and keys of LLaMA-Factory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from foreign_configs import DATASET_INFO

from alto.errors import AltoError, SpecError, UnsupportedError
from alto.importing import ImportedFile, import_file, imported_task

BASE: dict[str, Any] = {"model_name_or_path": "alto-tiny", "stage": "sft", "dataset": "identity", "val_size": 0.1}


def imported(folder: Path, **keys: Any) -> ImportedFile:
    (folder / "config.json").write_text(json.dumps(BASE | keys), encoding="utf-8")
    return import_file(folder / "config.json", "llamafactory")


def note(found: ImportedFile, key: str) -> str:
    (line,) = [str(note) for note in found.notes if note.key == key]
    return line


def describe(folder: Path, entry: dict[str, Any]) -> None:
    (folder / "data" / "dataset_info.json").write_text(json.dumps({"mine": entry}), encoding="utf-8")


def test_what_the_file_leaves_out_is_llamafactorys_default(folder: Path) -> None:
    values = imported(folder).values
    expected = {"max_length": 2048, "learning_rate": 5e-5, "per_device_train_batch_size": 8, "r": 8}
    expected |= {"num_train_epochs": 3, "target_modules": "all-linear"}
    assert expected.items() <= values.items()
    assert imported_task([imported(folder)]).task.jobs[0].config.lora_alpha == 16


def test_all_tokens_and_the_last_reply_alone_are_refused_as_there(folder: Path) -> None:
    with pytest.raises(SpecError, match=r"mask_history: expected one of train_on_prompt .* found both"):
        imported(folder, train_on_prompt=True, mask_history=True)


@pytest.mark.parametrize(
    ("entry", "method", "expected"),
    [
        ({"file_name": "identity.json"}, "sft", {"dataset_format": "alpaca"}),
        (
            {
                "hf_hub_url": "a/b",
                "subset": "en",
                "split": "full",
                "columns": {"prompt": "question", "response": "answer"},
            },
            "sft",
            {
                "dataset": "a/b",
                "dataset_config": "en",
                "dataset_train_split": "full",
                "dataset_format": "prompt_completion",
                "columns": {"prompt": "question", "completion": "answer"},
            },
        ),
        (
            {
                "hf_hub_url": "a/b",
                "columns": {"prompt": "i", "query": "q", "response": "o", "history": "h", "system": "s"},
            },
            "sft",
            {
                "dataset_format": "alpaca",
                "columns": {"instruction": "i", "input": "q", "output": "o", "history": "h", "system": "s"},
            },
        ),
        (
            {"hf_hub_url": "a/b", "formatting": "sharegpt", "columns": {"messages": "talk", "tools": "tools"}},
            "sft",
            {"dataset_format": "sharegpt", "columns": {"messages": "talk", "tools": "tools"}},
        ),
        (
            {
                "hf_hub_url": "a/b",
                "formatting": "sharegpt",
                "columns": {"messages": "messages"},
                "tags": {
                    "role_tag": "role",
                    "content_tag": "content",
                    "user_tag": "user",
                    "assistant_tag": "assistant",
                },
            },
            "sft",
            {"dataset_format": "messages", "columns": {"messages": "messages"}},
        ),
        (
            {"hf_hub_url": "a/b", "ranking": True, "columns": {"prompt": "q", "chosen": "c", "rejected": "r"}},
            "dpo",
            {"dataset_format": "preference", "columns": {"prompt": "q", "chosen": "c", "rejected": "r"}},
        ),
        (
            DATASET_INFO["kto_en_demo"],
            "kto",
            {"dataset_format": "unpaired_preference", "columns": {"messages": "messages", "label": "label"}},
        ),
    ],
)
def test_forms_of_dataset_info(folder: Path, entry: dict[str, Any], method: str, expected: dict[str, Any]) -> None:
    describe(folder, entry)
    found = imported(folder, stage=method, dataset="mine")
    assert expected.items() <= found.values.items()
    imported_task([found])


@pytest.mark.parametrize(
    ("entry", "keys", "reason"),
    [
        (
            {"file_name": "x.json", "columns": {"images": "images"}},
            {},
            "expected rows of text, found a column of images",
        ),
        (
            {"file_name": "x.json", "formatting": "other"},
            {},
            "expected the formatting alpaca or sharegpt, found 'other'",
        ),
        ({"script_url": "x"}, {}, "expected file_name or hf_hub_url"),
        ({"hf_hub_url": "a/b", "folder": "part"}, {}, "found only its folder 'part'"),
        ({"file_name": "."}, {}, "found the folder"),
        ({"file_name": "x.json", "columns": {"prompt": "text"}}, {}, "a column of prompts and one of responses"),
        ({"file_name": "x.json", "ranking": True}, {}, "expected rows for method 'sft', found pairs"),
        ({"file_name": "x.json"}, {"stage": "dpo"}, "expected rows for method 'dpo', found replies"),
        (
            {"file_name": "x.json", "columns": {"prompt": "p", "query": "q", "response": "r", "kto_tag": "l"}},
            {"stage": "kto"},
            "one column of prompts",
        ),
        (
            {"file_name": "x.json", "formatting": "sharegpt", "tags": {"role_tag": "who", "content_tag": "says"}},
            {},
            "found 'who' and 'says'. Rename them in the rows",
        ),
        (
            {"file_name": "x.json", "formatting": "sharegpt", "tags": {"user_tag": "client"}},
            {},
            "a known name of the speaker user (user, human), found 'client'",
        ),
        (
            {
                "file_name": "x.json",
                "formatting": "sharegpt",
                "tags": {"role_tag": "role", "content_tag": "content", "assistant_tag": "gpt"},
            },
            {},
            "a known name of the speaker assistant (assistant), found 'gpt'",
        ),
    ],
)
def test_datasets_that_cannot_be_read(folder: Path, entry: dict[str, Any], keys: dict[str, Any], reason: str) -> None:
    describe(folder, entry)
    with pytest.raises(UnsupportedError) as caught:
        imported(folder, dataset="mine", **keys)
    assert reason in str(caught.value)
    assert "config.json" in str(caught.value)


def test_an_unknown_dataset_and_no_dataset_info(folder: Path) -> None:
    with pytest.raises(SpecError, match=r"the dataset 'nothing' of .*dataset_info\.json: expected a mapping"):
        imported(folder, dataset="nothing")
    (folder / "data" / "dataset_info.json").unlink()
    with pytest.raises(SpecError, match=r"dataset_dir: no dataset_info.json in .*data"):
        imported(folder)


def test_dataset_info_is_found_beside_the_file_and_online(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "data" / "dataset_info.json").rename(folder / "dataset_info.json")
    (folder / "data" / "identity.json").rename(folder / "identity.json")
    monkeypatch.chdir("/")
    assert imported(folder).values["dataset"] == str(folder / "identity.json")
    assert imported(folder, dataset_dir="ONLINE", dataset="a/b").values["dataset"] == "a/b"


def test_mixtures(folder: Path) -> None:
    found = imported(
        folder, dataset="identity, alpaca_en_demo", mix_strategy="interleave_under", interleave_probs="0.7,0.3"
    )
    assert [(source["name"], source["weight"]) for source in found.values["dataset"]] == [
        ("identity", 0.7),
        ("alpaca", 0.3),
    ]
    found = imported(folder, dataset="identity,identity")
    assert [source["name"] for source in found.values["dataset"]] == ["identity", "identity-2"]
    assert "set the 'weight' of each source" in "".join(str(each) for each in found.notes)
    assert [source.weight for source in imported_task([found]).task.sources] == [1.0, 1.0]


def test_sources_of_one_long_name_get_names_that_a_task_may_have(folder: Path) -> None:
    name = "rows-of-the-first-quarter-" + 4 * "of-a-year-"
    (folder / "data" / "identity.json").rename(folder / "data" / f"{name}.json")
    describe(folder, {"file_name": f"{name}.json"})
    found = imported(folder, dataset="mine,mine")
    names = [source.name for source in imported_task([found]).task.sources]
    assert names == [name[:40], f"{name[:38]}-2"]


def test_validation_rows(folder: Path) -> None:
    found = imported(folder, eval_dataset="alpaca_en_demo", val_size=0)
    assert found.values["validation_dataset"] == str(folder / "data" / "alpaca.jsonl")
    assert "validation_split" not in found.values
    assert "eval_dataset: not supported" in note(imported(folder, eval_dataset="ultrachat_200k"), "eval_dataset")
    assert "jobs cannot be compared without validation rows" in note(imported(folder, val_size=0), "val_size")
    assert "100 is a number of rows" in note(imported(folder, val_size=100), "val_size")


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"pref_loss": "ipo", "pref_beta": 0.5}, {"method": "dpo", "loss_type": "ipo", "beta": 0.5}),
        ({"pref_loss": "sigmoid", "dpo_label_smoothing": 0.1}, {"method": "dpo", "label_smoothing": 0.1}),
        ({"pref_ftx": 0.5}, {"method": "dpo", "rpo_alpha": 0.5}),
        ({"pref_loss": "orpo"}, {"method": "orpo"}),
        (
            {"pref_loss": "simpo", "simpo_gamma": 0.7, "pref_ftx": 0.2},
            {"method": "cpo", "loss_type": "simpo", "simpo_gamma": 0.7, "cpo_alpha": 0.2},
        ),
    ],
)
def test_losses_of_preferences(folder: Path, keys: dict[str, Any], expected: dict[str, Any]) -> None:
    found = imported(folder, stage="dpo", dataset="dpo_en_demo", **keys)
    assert expected.items() <= found.values.items()
    imported_task([found])


@pytest.mark.parametrize(
    ("keys", "key", "reason"),
    [
        ({"pref_loss": "orpo"}, "pref_loss", "not needed: LLaMA-Factory does not use it with stage: sft"),
        ({"pref_ftx": 0.5}, "pref_ftx", "not needed: LLaMA-Factory does not use it with stage: sft"),
        ({"pref_beta": 0.2}, "pref_beta", "not needed: method sft has no such setting"),
        (
            {"stage": "kto", "dataset": "kto_en_demo", "pref_ftx": 0.5},
            "pref_ftx",
            "not supported: kto has no cross-entropy in addition to its loss",
        ),
        (
            {"stage": "dpo", "dataset": "dpo_en_demo", "pref_loss": "ipo", "dpo_label_smoothing": 0.1},
            "dpo_label_smoothing",
            "not needed: LLaMA-Factory does not use it with pref_loss: ipo",
        ),
        (
            {"stage": "dpo", "dataset": "dpo_en_demo", "simpo_gamma": 0.7},
            "simpo_gamma",
            "not needed: LLaMA-Factory does not use it with pref_loss: sigmoid",
        ),
        ({"interleave_probs": "0.7,0.3"}, "interleave_probs", "not needed: LLaMA-Factory uses it only if"),
        ({"double_quantization": False}, "double_quantization", "not supported: 4 bits are NF4"),
        ({"template": "llama3"}, "template", "not supported: 'llama3' is one of LLaMA-Factory's own templates"),
    ],
)
def test_settings_that_are_not_read_are_reported(folder: Path, keys: dict[str, Any], key: str, reason: str) -> None:
    found = imported(folder, **keys)
    assert note(found, key).startswith(f"{key}: {reason}")
    imported_task([found])


def test_sources_alternate_without_shares(folder: Path) -> None:
    found = imported(folder, dataset="identity,alpaca_en_demo", mix_strategy="interleave_under")
    assert [source["weight"] for source in found.values["dataset"]] == [1.0, 1.0]
    assert "while the tool joins all rows" not in "".join(str(each) for each in found.notes)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"moe_aux_loss_coef": 0.001}, {"router_aux_loss_coef": 0.001}),
        ({"max_length": 64, "cutoff_len": None}, {"max_length": 2048}),
        ({"quantization_bit": 4}, {"load_in_4bit": True}),
        ({"quantization_bit": 8}, {"load_in_8bit": True}),
        ({"train_on_prompt": True}, {"train_on": "all"}),
        ({"mask_history": True}, {"train_on": "last"}),
        ({"lora_target": "q_proj, v_proj"}, {"target_modules": ["q_proj", "v_proj"]}),
        ({"additional_target": "embed_tokens, lm_head"}, {"modules_to_save": ["embed_tokens", "lm_head"]}),
        ({"pure_bf16": True}, {"dtype": "bfloat16"}),
        ({"fp16": True}, {"dtype": "float16"}),
        ({"loraplus_lr_ratio": 16.0}, {"loraplus_lr_ratio": 16.0}),
        ({"warmup_steps": 5, "warmup_ratio": 0.1}, {"warmup_steps": 5}),
        ({"max_steps": 7}, {"max_steps": 7}),
        ({"optim": "adamw_hf"}, {"optim": "adamw_torch"}),
        ({"report_to": ["wandb", "swanlab"]}, {"report_to": ["wandb"]}),
        (
            {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": '{"min_lr_rate": 0.1}'},
            {"lr_scheduler_kwargs": {"min_lr_rate": 0.1}},
        ),
    ],
)
def test_keys_that_become_another_one(folder: Path, keys: dict[str, Any], expected: dict[str, Any]) -> None:
    found = imported(folder, **keys)
    assert expected.items() <= found.values.items()
    imported_task([found])


@pytest.mark.parametrize(
    ("key", "value", "answer"),
    [
        ("adapter_name_or_path", "saves/x", "not supported: "),
        ("use_galore", True, "not supported: "),
        ("neat_packing", True, "used as rows that are concatenated without padding"),
        ("packing", True, "used as rows that are concatenated without padding"),
        ("pissa_init", True, "not supported: "),
        ("deepspeed", "ds_z3.json", "not needed: "),
        ("bogus", 1, "unknown: "),
        ("dataloader_drop_last", True, "not supported: "),
    ],
)
def test_keys_that_are_left_out_are_reported(folder: Path, key: str, value: object, answer: str) -> None:
    assert note(imported(folder, **{key: value}), key).startswith(f"{key}: {answer}")


@pytest.mark.parametrize(
    "keys",
    [
        {"flash_attn": "auto"},
        {"use_galore": False},
        {"save_steps": 500},
        {"resume_from_checkpoint": None},
        {"max_steps": -1},
        {"ppo_epochs": 4},
        {"galore_rank": 16},
        {"double_quantization": True},
    ],
)
def test_keys_that_ask_for_nothing_are_not_reported(folder: Path, keys: dict[str, Any]) -> None:
    assert [each.key for each in imported(folder, **keys).notes] == [each.key for each in imported(folder).notes]


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"finetuning_type": "full"}, "finetuning_type: expected 'lora', found 'full'"),
        ({"stage": "ppo"}, "stage: expected one of sft, dpo, kto, found 'ppo'"),
        ({"stage": "pt"}, "found 'pt'"),
        ({"stage": "dpo", "dataset": "dpo_en_demo", "pref_loss": "kto_pair"}, "found 'kto_pair'"),
        ({"optim": "lomo"}, "optim: expected one of"),
        ({"dataset_dir": "REMOTE:a/b"}, "found 'REMOTE:a/b'"),
    ],
)
def test_other_training_is_refused(folder: Path, keys: dict[str, Any], reason: str) -> None:
    with pytest.raises(AltoError) as caught:
        imported_task([imported(folder, **keys)])
    assert reason in str(caught.value)


def test_rows_to_validate_on_are_a_share_or_a_number_and_called_val_size(folder: Path) -> None:
    assert "20 is a number of rows: a tenth of the rows is used; --set val_size=SHARE" in note(
        imported(folder, val_size=20), "val_size"
    )
    for bad in ("abc", -1, True):
        with pytest.raises(
            SpecError, match="val_size: expected a share of the rows, below 1, or a number of rows, fou"
        ):
            imported(folder, val_size=bad)
    found = import_file(folder / "config.json", "llamafactory", ["val_size=0.2"])
    assert not [note for note in found.notes if note.key == "val_size"]
