"""Configurations with many keys that ALTO does not use: one import reports all of them, each with the reason."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from alto.cli import app
from alto.importing import NoteKind, import_file

_OWN_TEMPLATE = "own templates: rows are written by the template of the model's tokenizer"
_PROCESSES = "ALTO starts its own processes"
_KERNELS = "ALTO chooses its kernels"
_UNKNOWN = "ALTO does not know this key"

UNUSED = Path(__file__).parent / "unused"
EXPECTED: dict[str, dict[str, tuple[str, str]]] = {
    "llamafactory-ray": {
        "template": ("not supported", f"'qwen3' is one of LLaMA-Factory's {_OWN_TEMPLATE}"),
        "enable_thinking": ("not supported", "the chat template of the model's tokenizer decides"),
        "default_system": ("not supported", "put the message into the rows"),
        "use_swanlab": ("not supported", "trackers are tensorboard"),
        "learning_rat": ("unknown", _UNKNOWN),
        "dataset": ("used as", "dataset_format: alpaca"),
        "bf16": ("used as", "dtype: bfloat16"),
        "neat_packing": ("used as", "raise per_device_train_batch_size"),
        "deepspeed": ("not needed", _PROCESSES),
        "flash_attn": ("not needed", _KERNELS),
        "enable_liger_kernel": ("not needed", _KERNELS),
        "tokenized_path": ("not needed", "rows are tokenised once"),
        "output_dir": ("not needed", "'alto tune' takes it as --output-dir"),
        "save_total_limit": ("not needed", "the best and the last checkpoint"),
        "ray_run_name": ("not needed", _PROCESSES),
        "ray_num_workers": ("not needed", _PROCESSES),
        "placement_strategy": ("not needed", _PROCESSES),
        "resources_per_worker": ("not needed", _PROCESSES),
        "max_length": ("not needed", "'alto eval' generates answers"),
    },
    "llamafactory-qlora": {
        "quantization_type": ("not supported", "4 bits are NF4"),
        "double_quantization": ("not supported", "4 bits are NF4 with double quantisation"),
        "adapter_name_or_path": ("not supported", "set it as init_adapter"),
        "ref_model_adapters": ("not supported", "the reference is the frozen base"),
        "template": ("not supported", f"'llama3' is one of LLaMA-Factory's {_OWN_TEMPLATE}"),
        "use_unsloth": ("not needed", _KERNELS),
        "disable_gradient_checkpointing": ("not needed", "activations are recomputed if memory requires it"),
        "predict_with_generate": ("not needed", "'alto eval' generates answers"),
        "early_stopping_steps": ("not needed", "'early_exit' ends jobs"),
    },
    "axolotl-kernels": {
        "tf32": ("not supported", "Products in float32 keep torch's own precision"),
        "use_comet": ("not supported", "trackers are tensorboard"),
        "relora": ("not supported", "only adapters of LoRA and DoRA"),
        "sequence_lenn": ("unknown", _UNKNOWN),
        "datasets[0].type": ("used as", "dataset_format: alpaca"),
        "bf16": ("used as", "dtype: bfloat16"),
        "sequence_len": ("used as", "Axolotl leaves longer rows out"),
        "wandb_project": ("used as", "report_to: wandb"),
        "wandb_entity": ("not needed", "their own environment variables"),
        "strict": ("not needed", "ALTO chooses how a model is loaded"),
        "plugins": ("not needed", "ALTO has its own kernels"),
        "liger_rope": ("not needed", _KERNELS),
        "liger_glu_activation": ("not needed", _KERNELS),
        "cut_cross_entropy": ("not needed", _KERNELS),
        "lora_mlp_kernel": ("not needed", _KERNELS),
        "lora_fan_in_fan_out": ("not needed", "read from the model"),
        "loraplus_lr_embedding": ("not needed", "no adapter is on the embeddings"),
        "gc_steps": ("not needed", _PROCESSES),
        "dataloader_num_workers": ("not needed", "all rows are tokenised once"),
        "deepspeed": ("not needed", _PROCESSES),
    },
    "axolotl-dataset": {
        "plugins": ("not supported", "'axolotl.integrations.kd.KDPlugin': plugins of Axolotl are not loaded"),
        "chat_template": ("not supported", f"'qwen_25' is one of Axolotl's {_OWN_TEMPLATE}"),
        "chat_template_kwargs": ("not supported", "a column chat_template_kwargs of the rows"),
        "default_system_message": ("not supported", "put the message into the rows"),
        "datasets[0].shards": ("not supported", "set max_samples"),
        "datasets[0].roles_to_train": ("not supported", "replies are trained"),
        "datasets[0].train_on_eos": ("not supported", "only those of trained replies are trained"),
        "datasets[0].train_on_eot": ("not supported", "only those of trained replies are trained"),
        "datasets[0].message_property_mappings.tool_calls": ("not supported", "rename 'calls' in the rows"),
        "curriculum_sampling": ("not supported", "every job shuffles its rows"),
        "datasets[0].feild_messages": ("unknown", _UNKNOWN),
        "alpha": ("unknown", _UNKNOWN),
        "sequence_len": ("used as", "max_length: 512"),
        "datasets[0].ds_type": ("not needed", "the ending of a file's name"),
        "datasets[0].trust_remote_code": ("not needed", "no code of a dataset is run"),
        "rl_beta": ("not needed", "method sft has no such setting"),
    },
    "trl-sft": {
        "model_revision": ("not supported", "download the revision"),
        "bnb_4bit_quant_type": ("not supported", "4 bits are NF4"),
        "activation_offloading": ("not supported", "gradient_checkpointing: true"),
        "report_to": ("not supported", "'comet_ml'"),
        "datasets[0].streeming": ("unknown", _UNKNOWN),
        "warmup_step": ("unknown", _UNKNOWN),
        "rank": ("unknown", _UNKNOWN),
        "assistant_only_loss": ("used as", "train_on: completion"),
        "packing": ("used as", "raise per_device_train_batch_size"),
        "eval_strategy": ("used as", "or a tenth of its rows"),
        "datasets[0].columns": ("not needed", "columns without a role are not read"),
        "attn_implementation": ("not needed", _KERNELS),
        "packing_strategy": ("not needed", "concatenated without padding"),
        "use_liger_kernel": ("not needed", _KERNELS),
        "overwrite_output_dir": ("not needed", "every run has its own folder"),
        "hub_model_id": ("not needed", "nothing is uploaded"),
        "env": ("not needed", "in the shell that starts ALTO"),
    },
}
"""The report on each key, by the name of a configuration in the folder ``unused``."""


@pytest.mark.parametrize("name", EXPECTED)
def test_all_unused_keys_are_in_one_report(name: str, folder: Path) -> None:
    expected = EXPECTED[name]
    shutil.copy(UNUSED / f"{name}.yaml", folder / "config.yaml")
    done = CliRunner().invoke(app, ["import", "config.yaml", "--to", "task.yaml"])
    assert done.exit_code == 0, done.output
    lines = [line.strip() for line in done.stderr.splitlines()[1:]]
    found = {note.key: (str(note.kind), note.text) for note in import_file(Path("config.yaml")).notes}
    assert len(found) == len(lines), "every key has one line"
    assert found.keys() == expected.keys()
    for key, (kind, reason) in expected.items():
        assert found[key][0] == kind, key
        assert reason in found[key][1], key
        assert any(line.startswith(f"{key}: {kind}") for line in lines), key


def test_what_the_report_says_is_used_is_in_the_task(folder: Path) -> None:
    shutil.copy(UNUSED / "llamafactory-ray.yaml", folder / "config.yaml")
    CliRunner().invoke(app, ["import", "config.yaml", "--to", "task.yaml"])
    task = yaml.safe_load((folder / "task.yaml").read_text(encoding="utf-8"))
    assert (task["max_length"], task["router_aux_loss_coef"], task["dtype"]) == (2048, 0.001, "bfloat16")
    shutil.copy(UNUSED / "axolotl-kernels.yaml", folder / "config.yaml")
    values = import_file(Path("config.yaml")).values
    assert values["dtype"] == "bfloat16"
    assert "warmup_ratio" not in values, "no warmup was asked for"


@pytest.mark.parametrize(
    ("entry", "key"),
    [
        ({"file_name": "identity.json", "load_from": "file"}, "dataset_info.json[mine].load_from"),
        ({"file_name": "x.json", "columns": {"prompt": "a", "response": "b", "sytem": "c"}}, "sytem"),
        ({"file_name": "x.json", "formatting": "sharegpt", "tags": {"usr_tag": "human"}}, "usr_tag"),
    ],
)
def test_unknown_keys_of_dataset_info(entry: dict[str, Any], key: str, folder: Path) -> None:
    (folder / "data" / "dataset_info.json").write_text(json.dumps({"mine": entry}), encoding="utf-8")
    (folder / "config.yaml").write_text("model_name_or_path: m\nstage: sft\ndataset: mine\n", encoding="utf-8")
    (note,) = [note for note in import_file(Path("config.yaml")).notes if note.kind == "unknown"]
    assert note.key.startswith("dataset_info.json[mine].")
    assert note.key.endswith(key)


@pytest.mark.parametrize("split", ["train", "train[:10%]"])
def test_a_part_of_a_file_of_dataset_info_is_reported(split: str, folder: Path) -> None:
    entry = {"file_name": "rows.json", "split": split}
    (folder / "data" / "dataset_info.json").write_text(json.dumps({"mine": entry}), encoding="utf-8")
    (folder / "config.yaml").write_text("model_name_or_path: m\nstage: sft\ndataset: mine\n", encoding="utf-8")
    notes = [str(note) for note in import_file(Path("config.yaml")).notes if note.key.endswith("split")]
    answer = "not supported: a file has no splits: all of its rows are used; set max_samples for a part of them"
    assert notes == ([] if split == "train" else [f"dataset_info.json[mine].split: {answer}"])


def test_a_misspelt_key_is_reported_with_the_one_that_is_near(tmp_path: Path) -> None:
    file = tmp_path / "lora.yaml"
    file.write_text("use_peft: true\nlearning_rte: 1e-3\nwholly_unknown: 1\n", encoding="utf-8")
    notes = {note.key: note.text for note in import_file(file, "trl").notes if note.kind is NoteKind.UNKNOWN}
    assert notes == {
        "learning_rte": "ALTO does not know this key (did you mean 'learning_rate'?); it is left out",
        "wholly_unknown": "ALTO does not know this key; it is left out",
    }
