"""Configurations with many keys that ALTO does not use: one import reports all of them, each with the reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from alto.cli import app
from alto.importing import NoteKind, import_file

LLAMAFACTORY_RAY = """\
model_name_or_path: alto-tiny
trust_remote_code: true
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: all
deepspeed: examples/deepspeed/ds_z3_config.json  # choices: [ds_z0_config.json, ds_z2_config.json]
flash_attn: fa2
enable_liger_kernel: true
neat_packing: true
moe_aux_loss_coef: 0.001
dataset: identity
dataset_dir: data
template: qwen3
enable_thinking: false
default_system: Be brief.
cutoff_len: 2048
tokenized_path: saves/tokenized
output_dir: saves/lora
save_total_limit: 3
use_swanlab: true
swanlab_project: llamafactory
per_device_train_batch_size: 1
learning_rate: 1.0e-4
bf16: true
val_size: 0.1
ray_run_name: sft
ray_num_workers: 4
placement_strategy: PACK
resources_per_worker:
  GPU: 1
max_length: 64
learning_rat: 1.0e-3
"""

LLAMAFACTORY_QLORA = """\
model_name_or_path: alto-tiny
quantization_bit: 4
quantization_type: fp4
double_quantization: false
stage: dpo
finetuning_type: lora
adapter_name_or_path: saves/sft
pref_beta: 0.1
pref_loss: sigmoid
ref_model_adapters: saves/sft
dataset: dpo_en_demo
template: llama3
val_size: 0.1
use_unsloth: true
disable_gradient_checkpointing: true
predict_with_generate: true
early_stopping_steps: 3
galore_rank: 16
"""

AXOLOTL_KERNELS = """\
base_model: alto-tiny
strict: true
plugins:
  - axolotl.integrations.liger.LigerPlugin
  - axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin
liger_rope: true
liger_glu_activation: true
cut_cross_entropy: true
datasets:
  - path: data/alpaca.jsonl
    type: alpaca
val_set_size: 0.1
adapter: lora
lora_r: 16
lora_alpha: 32
lora_target_linear: true
lora_mlp_kernel: true
lora_fan_in_fan_out: true
loraplus_lr_ratio: 16
loraplus_lr_embedding: 1.0e-6
sequence_len: 2048
micro_batch_size: 2
num_epochs: 1
optimizer: adamw_torch
lr_scheduler: cosine
learning_rate: 2e-4
warmup_steps: 0
bf16: full
tf32: true
gradient_checkpointing: offload
wandb_project: mine
wandb_entity: me
use_comet: true
gc_steps: 10
dataloader_num_workers: 4
deepspeed: deepspeed_configs/zero3.json
relora: true
sequence_lenn: 4096
"""

AXOLOTL_DATASET = """\
base_model: alto-tiny
plugins: [axolotl.integrations.kd.KDPlugin]
chat_template: qwen_25
chat_template_kwargs:
  enable_thinking: false
default_system_message: Be brief.
datasets:
  - path: data/chat_messages.jsonl
    ds_type: json
    type: chat_template
    feild_messages: conversations
    field_messages: messages
    trust_remote_code: true
    shards: 10
    roles_to_train: [user, assistant]
    train_on_eos: last
    train_on_eot: all
    message_property_mappings:
      role: role
      content: content
      tool_calls: calls
val_set_size: 0.1
adapter: lora
lora_r: 16
lora_alpha: 32
learning_rate: 2e-4
warmup_steps: 5
curriculum_sampling: true
rl_beta: 0.2
alpha: 16
"""

TRL_SFT = """\
model_name_or_path: alto-tiny
model_revision: v1.0
attn_implementation: flash_attention_2
datasets:
  - path: json
    data_files: data/chat_messages.jsonl
    columns: [messages]
    streeming: true
assistant_only_loss: true
use_peft: true
lora_target_modules: all-linear
load_in_4bit: true
bnb_4bit_quant_type: fp4
learning_rate: 2.0e-4
packing: true
packing_strategy: wrapped
padding_free: true
use_liger_kernel: true
activation_offloading: true
overwrite_output_dir: true
hub_model_id: me/mine
report_to: [wandb, comet_ml]
neftune_noise_alpha: 5
warmup_step: 10
rank: 64
env:
  TOKENIZERS_PARALLELISM: "false"
"""

_OWN_TEMPLATE = "own templates: rows are written by the template of the model's tokenizer"
_PROCESSES = "ALTO starts its own processes"
_KERNELS = "ALTO chooses its kernels"
_UNKNOWN = "ALTO does not know this key"

EXPECTED: dict[str, tuple[str, dict[str, tuple[str, str]]]] = {
    "llamafactory-ray": (
        LLAMAFACTORY_RAY,
        {
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
    ),
    "llamafactory-qlora": (
        LLAMAFACTORY_QLORA,
        {
            "quantization_type": ("not supported", "4 bits are NF4"),
            "double_quantization": ("not supported", "4 bits are NF4 with double quantisation"),
            "adapter_name_or_path": ("not supported", "write it as init_adapter"),
            "ref_model_adapters": ("not supported", "the reference is the frozen base"),
            "template": ("not supported", f"'llama3' is one of LLaMA-Factory's {_OWN_TEMPLATE}"),
            "use_unsloth": ("not needed", _KERNELS),
            "disable_gradient_checkpointing": ("not needed", "activations are recomputed if memory requires it"),
            "predict_with_generate": ("not needed", "'alto eval' generates answers"),
            "early_stopping_steps": ("not needed", "'early_exit' ends jobs"),
        },
    ),
    "axolotl-kernels": (
        AXOLOTL_KERNELS,
        {
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
    ),
    "axolotl-dataset": (
        AXOLOTL_DATASET,
        {
            "plugins": ("not supported", "'axolotl.integrations.kd.KDPlugin': plugins of Axolotl are not loaded"),
            "chat_template": ("not supported", f"'qwen_25' is one of Axolotl's {_OWN_TEMPLATE}"),
            "chat_template_kwargs": ("not supported", "a column chat_template_kwargs of the rows"),
            "default_system_message": ("not supported", "put the message into the rows"),
            "datasets[0].shards": ("not supported", "write max_samples"),
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
    ),
    "trl-sft": (
        TRL_SFT,
        {
            "model_revision": ("not supported", "download the revision"),
            "bnb_4bit_quant_type": ("not supported", "4 bits are NF4"),
            "activation_offloading": ("not supported", "gradient_checkpointing: true"),
            "report_to": ("not supported", "'comet_ml'"),
            "datasets[0].streeming": ("unknown", _UNKNOWN),
            "warmup_step": ("unknown", _UNKNOWN),
            "rank": ("unknown", _UNKNOWN),
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
    ),
}
"""By name: a configuration, and by key what the report says of it."""


@pytest.mark.parametrize("name", EXPECTED)
def test_all_unused_keys_are_in_one_report(name: str, folder: Path) -> None:
    text, expected = EXPECTED[name]
    (folder / "config.yaml").write_text(text, encoding="utf-8")
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
    (folder / "config.yaml").write_text(LLAMAFACTORY_RAY, encoding="utf-8")
    CliRunner().invoke(app, ["import", "config.yaml", "--to", "task.yaml"])
    task = yaml.safe_load((folder / "task.yaml").read_text(encoding="utf-8"))
    assert (task["max_length"], task["router_aux_loss_coef"], task["dtype"]) == (2048, 0.001, "bfloat16")
    (folder / "config.yaml").write_text(AXOLOTL_KERNELS, encoding="utf-8")
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
    answer = "not supported: a file has no splits: all of its rows are used; write max_samples for a part of them"
    assert notes == ([] if split == "train" else [f"dataset_info.json[mine].split: {answer}"])


def test_a_misspelt_key_is_reported_with_the_one_that_is_near(tmp_path: Path) -> None:
    file = tmp_path / "lora.yaml"
    file.write_text("use_peft: true\nlearning_rte: 1e-3\nwholly_unknown: 1\n", encoding="utf-8")
    notes = {note.key: note.text for note in import_file(file, "trl").notes if note.kind is NoteKind.UNKNOWN}
    assert notes == {
        "learning_rte": "ALTO does not know this key (did you mean 'learning_rate'?); it is left out",
        "wholly_unknown": "ALTO does not know this key; it is left out",
    }
