"""Configurations from the documentation of LLaMA-Factory, Axolotl and TRL, with rows of their own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

NUM_ROWS = 24

LLAMAFACTORY_SFT = """\
### model
model_name_or_path: alto-tiny
trust_remote_code: true

### method
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: all

### dataset
dataset: identity,alpaca_en_demo
template: llama3
cutoff_len: 2048
max_samples: 1000
overwrite_cache: true
preprocessing_num_workers: 16
dataloader_num_workers: 4

### output
output_dir: saves/llama3-8b/lora/sft
logging_steps: 10
save_steps: 500
plot_loss: true
overwrite_output_dir: true
save_only_model: false
report_to: none  # choices: [none, wandb, tensorboard, swanlab, mlflow]

### train
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
ddp_timeout: 180000000
resume_from_checkpoint: null

### eval
val_size: 0.1
per_device_eval_batch_size: 1
eval_strategy: steps
eval_steps: 500
"""

LLAMAFACTORY_DPO = """\
model_name_or_path: alto-tiny
stage: dpo
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: q_proj,v_proj
lora_dropout: 0.05
pref_beta: 0.2
pref_loss: sigmoid  # choices: [sigmoid (dpo), orpo, simpo]
dataset: dpo_en_demo
template: llama3
cutoff_len: 1024
overwrite_cache: true
output_dir: saves/llama3-8b/lora/dpo
logging_steps: 10
save_steps: 500
plot_loss: true
overwrite_output_dir: true
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 5e-6
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
"""

LLAMAFACTORY_KTO = """\
model_name_or_path: alto-tiny
stage: kto
do_train: true
finetuning_type: lora
lora_target: all
pref_beta: 0.1
dataset: kto_en_demo
template: llama3
cutoff_len: 2048
output_dir: saves/llama3-8b/lora/kto
logging_steps: 10
plot_loss: true
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 5.0e-6
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
val_size: 0.1
"""

AXOLOTL_LORA = """\
base_model: alto-tiny
# optionally might have model_type or tokenizer_type
model_type: LlamaForCausalLM
tokenizer_type: AutoTokenizer
# Automatically upload checkpoint and final model to HF
# hub_model_id: username/custom_model_name

load_in_8bit: false
load_in_4bit: false

datasets:
  - path: data/alpaca.jsonl
    ds_type: json
    type: alpaca
dataset_prepared_path:
val_set_size: 0.05
output_dir: ./outputs/lora-out

sequence_len: 4096
sample_packing: true
eval_sample_packing: false
pad_to_sequence_len: true

adapter: lora
lora_model_dir:
lora_r: 32
lora_alpha: 16
lora_dropout: 0.05
lora_target_linear: true

wandb_project:
wandb_entity:
wandb_watch:
wandb_name:
wandb_log_model:

gradient_accumulation_steps: 4
micro_batch_size: 2
num_epochs: 4
optimizer: adamw_torch_fused
lr_scheduler: cosine
learning_rate: 2e-4

bf16: auto
tf32: false

gradient_checkpointing: true
resume_from_checkpoint:
logging_steps: 1
flash_attention: true

warmup_ratio: 0.1
evals_per_epoch: 4
saves_per_epoch: 1
weight_decay: 0.0
special_tokens:
   pad_token: <|end_of_text|>
"""

AXOLOTL_INSTRUCT = """\
base_model: alto-tiny
# optionally might have model_type or tokenizer_type
model_type: LlamaForCausalLM
tokenizer_type: AutoTokenizer

load_in_8bit: true
load_in_4bit: false

chat_template: llama3
datasets:
  - path: data/chat_messages.jsonl
    ds_type: json
    type: chat_template
    field_messages: messages
    message_property_mappings:
      role: role
      content: content
    roles:
      user:
        - user
      assistant:
        - assistant

dataset_prepared_path:
val_set_size: 0.1
output_dir: ./outputs/lora-out

sequence_len: 4096
sample_packing: false

adapter: lora
lora_model_dir:
lora_r: 16
lora_alpha: 32
lora_dropout: 0.05
lora_target_linear: true

wandb_project:
wandb_entity:
wandb_watch:
wandb_name:
wandb_log_model:

gradient_accumulation_steps: 4
micro_batch_size: 2
num_epochs: 3
optimizer: adamw_bnb_8bit
lr_scheduler: cosine
learning_rate: 0.0002

bf16: auto
tf32: false

gradient_checkpointing: true
resume_from_checkpoint:
logging_steps: 1
attn_implementation: flash_attention_2

warmup_ratio: 0.1
evals_per_epoch: 4
saves_per_epoch: 1
weight_decay: 0.0
special_tokens:
  pad_token: <|finetune_right_pad_id|>
"""

AXOLOTL_QLORA = """\
base_model: alto-tiny
model_type: AutoModelForCausalLM
tokenizer_type: AutoTokenizer

load_in_8bit: false
load_in_4bit: true
strict: false

datasets:
  - path: data/chat.jsonl
    type: chat_template
    field_messages: conversations
    message_property_mappings:
      role: from
      content: value
    roles_to_train: ["assistant"]
    train_on_eos: turn
  - path: json
    data_files: data/texts.jsonl
    type: completion
    field: body
dataset_prepared_path: last_run_prepared
val_set_size: 0
output_dir: ./outputs/qlora-out

adapter: qlora
lora_model_dir:

sequence_len: 4096
sample_packing: true
pad_to_sequence_len: true

lora_r: 32
lora_alpha: 16
lora_dropout: 0.05
lora_target_modules:
  - q_proj
  - v_proj
lora_target_linear:
lora_fan_in_fan_out:

gradient_accumulation_steps: 4
micro_batch_size: 2
num_epochs: 4
optimizer: paged_adamw_32bit
lr_scheduler: cosine
cosine_min_lr_ratio: 0.1
learning_rate: 0.0002

train_on_inputs: false
group_by_length: false
bf16: auto
fp16:
tf32: false

gradient_checkpointing: true
gradient_checkpointing_kwargs:
  use_reentrant: false
early_stopping_patience:
resume_from_checkpoint:
local_rank:
logging_steps: 1
xformers_attention:
flash_attention: true
loss_watchdog_threshold: 5.0
loss_watchdog_patience: 3

warmup_steps: 10
evals_per_epoch: 4
eval_table_size:
saves_per_epoch: 1
debug:
deepspeed:
weight_decay: 0.0
fsdp:
fsdp_config:
special_tokens:
  pad_token: "<|end_of_text|>"
"""

AXOLOTL_DPO = """\
base_model: alto-tiny
model_type: LlamaForCausalLM
tokenizer_type: AutoTokenizer

load_in_8bit: true
load_in_4bit: false

chat_template: llama3
rl: dpo
rl_beta: 0.2
datasets:
  - path: data/chat_pairs.jsonl
    type: chat_template.default
    field_messages: conversation
    field_chosen: chosen
    field_rejected: rejected
    message_property_mappings:
      role: role
      content: content
    roles:
      system:
        - system
      user:
        - user
      assistant:
        - assistant

val_set_size: 0.05
output_dir: ./outputs/lora-out
sequence_len: 4096
sample_packing: false
adapter: lora
lora_r: 32
lora_alpha: 16
lora_dropout: 0.05
lora_target_linear: true
gradient_accumulation_steps: 4
micro_batch_size: 2
num_epochs: 4
optimizer: adamw_bnb_8bit
lr_scheduler: cosine
learning_rate: 0.0002
bf16: auto
gradient_checkpointing: true
flash_attention: true
warmup_steps: 10
weight_decay: 0.0
special_tokens:
  pad_token: <|finetune_right_pad_id|>
  eos_token: <|eot_id|>
"""

AXOLOTL_KTO = """\
base_model: alto-tiny
load_in_8bit: false
load_in_4bit: false
strict: false

rl: kto
rl_beta: 0.5
kto_desirable_weight: 0.2

datasets:
  - path: data/labelled.jsonl
    type: llama3.ultra
    split: train
val_set_size: 0.1
output_dir: ./outputs/qlora-out
remove_unused_columns: false
adapter: lora
sequence_len: 2048
sample_packing: false  # not supported with kto
lora_r: 32
lora_alpha: 64
lora_dropout: 0.05
lora_target_linear: true
gradient_accumulation_steps: 1
micro_batch_size: 2
num_epochs: 1
optimizer: adamw_torch
lr_scheduler: cosine
learning_rate: 0.0002
bf16: auto
tf32: true
warmup_steps: 20
weight_decay: 0.0
"""

TRL_SFT = """\
# trl sft --config sft_config.yaml
model_name_or_path: alto-tiny
datasets:
  - path: json
    data_files: data/chat_messages.jsonl
    split: train
learning_rate: 2.0e-4
num_train_epochs: 1
packing: true
per_device_train_batch_size: 2
gradient_accumulation_steps: 8
gradient_checkpointing: true
eos_token: <|im_end|>
eval_strategy: "no"
logging_steps: 25
output_dir: Qwen2-0.5B-SFT
push_to_hub: true
use_peft: true
lora_r: 32
lora_alpha: 16
lora_target_modules: [q_proj, k_proj, v_proj, o_proj]
max_length: 512
assistant_only_loss: true
dtype: bfloat16
"""

TRL_DPO = """\
# trl dpo --config dpo_config.yaml
model_name_or_path: alto-tiny
dataset_name: trl-lib/ultrafeedback_binarized
dataset_test_split: holdout
loss_type: [sigmoid]
beta: 0.3
learning_rate: 5e-6
num_train_epochs: 1
per_device_train_batch_size: 2
gradient_accumulation_steps: 8
eval_strategy: steps
eval_steps: 50
no_remove_unused_columns: true
output_dir: Qwen2-0.5B-DPO
use_peft: true
lora_r: 32
lora_alpha: 16
lora_target_modules: all-linear
"""

TRL_KTO = """\
# trl kto --config kto_config.yaml
model_name_or_path: alto-tiny
dataset_name: trl-lib/kto-mix-14k
per_device_train_batch_size: 8
gradient_accumulation_steps: 2
num_train_epochs: 2
learning_rate: 5.0e-7
lr_scheduler_type: cosine
warmup_steps: 0.1
beta: 0.2
loss_type: kto
undesirable_weight: 1.33
eval_steps: 500
logging_first_step: true
output_dir: kto-aligned-model-lora
use_peft: true
load_in_4bit: true
lora_target_modules: all-linear
lora_r: 16
lora_alpha: 16
"""

CONFIGS: Mapping[str, tuple[str, str]] = {
    "llamafactory-sft.yaml": ("LLaMA-Factory", LLAMAFACTORY_SFT),
    "llamafactory-dpo.yaml": ("LLaMA-Factory", LLAMAFACTORY_DPO),
    "llamafactory-kto.yaml": ("LLaMA-Factory", LLAMAFACTORY_KTO),
    "axolotl-lora.yml": ("Axolotl", AXOLOTL_LORA),
    "axolotl-instruct.yml": ("Axolotl", AXOLOTL_INSTRUCT),
    "axolotl-qlora.yml": ("Axolotl", AXOLOTL_QLORA),
    "axolotl-dpo.yml": ("Axolotl", AXOLOTL_DPO),
    "axolotl-kto.yml": ("Axolotl", AXOLOTL_KTO),
    "trl-sft.yaml": ("TRL", TRL_SFT),
    "trl-dpo.yaml": ("TRL", TRL_DPO),
    "trl-kto.yaml": ("TRL", TRL_KTO),
}
"""File name, tool and text of each configuration."""

LOCAL_ROWS: Mapping[str, str] = {
    "trl-lib/ultrafeedback_binarized": "data/ultrafeedback.jsonl",
    "trl-lib/kto-mix-14k": "data/kto_mix.jsonl",
}
"""Files with rows of the right form, by the hub dataset that a configuration names."""

DATASET_INFO: Mapping[str, Any] = {
    "identity": {"file_name": "identity.json"},
    "alpaca_en_demo": {"file_name": "alpaca.jsonl"},
    "dpo_en_demo": {
        "file_name": "sharegpt_pairs.json",
        "ranking": True,
        "formatting": "sharegpt",
        "columns": {"messages": "conversations", "chosen": "chosen", "rejected": "rejected"},
    },
    "kto_en_demo": {
        "file_name": "kto_en_demo.json",
        "formatting": "sharegpt",
        "columns": {"messages": "messages", "kto_tag": "label"},
        "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"},
    },
    "ultrachat_200k": {
        "hf_hub_url": "HuggingFaceH4/ultrachat_200k",
        "split": "train_sft",
        "formatting": "sharegpt",
        "columns": {"messages": "messages"},
        "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"},
    },
    "openorca": {
        "hf_hub_url": "Open-Orca/OpenOrca",
        "columns": {"prompt": "question", "response": "response", "system": "system_prompt"},
    },
    "mllm_demo": {
        "file_name": "mllm_demo.json",
        "formatting": "sharegpt",
        "columns": {"messages": "messages", "images": "images"},
    },
}


def write_configs(folder: Path) -> Path:
    """Write all configurations into ``folder``, and the rows that they name into ``folder/data``."""
    data = folder / "data"
    data.mkdir(parents=True)
    sums = [(f"{n} plus {n % 7}?", f"It is {n + n % 7}.", f"It is {n + n % 7 + 1}.") for n in range(NUM_ROWS)]
    rows: dict[str, list[dict[str, Any]]] = {
        "identity.json": [{"instruction": asks, "input": "", "output": says} for asks, says, _ in sums],
        "alpaca.jsonl": [{"instruction": "Add.", "input": asks, "output": says} for asks, says, _ in sums],
        "sharegpt_pairs.json": [
            {
                "conversations": [{"from": "human", "value": asks}],
                "chosen": {"from": "gpt", "value": says},
                "rejected": {"from": "gpt", "value": wrong},
            }
            for asks, says, wrong in sums
        ],
        "labelled.jsonl": [
            {"prompt": asks, "completion": says if number % 2 else wrong, "label": bool(number % 2)}
            for number, (asks, says, wrong) in enumerate(sums)
        ],
        "kto_en_demo.json": [
            {"messages": [_user(asks), _assistant(says if number % 2 else wrong)], "label": bool(number % 2)}
            for number, (asks, says, wrong) in enumerate(sums)
        ],
        "chat.jsonl": [
            {"conversations": [{"from": "human", "value": asks}, {"from": "gpt", "value": says}]}
            for asks, says, _ in sums
        ],
        "texts.jsonl": [{"body": f"{asks} {says}"} for asks, says, _ in sums],
        "chat_messages.jsonl": [{"messages": [_user(asks), _assistant(says)]} for asks, says, _ in sums],
        "chat_pairs.jsonl": [
            {"conversation": [_user(asks)], "chosen": _assistant(says), "rejected": _assistant(wrong)}
            for asks, says, wrong in sums
        ],
        "ultrafeedback.jsonl": [
            {
                "chosen": [_user(asks), _assistant(says)],
                "rejected": [_user(asks), _assistant(wrong)],
                "score_chosen": 9.0,
                "score_rejected": 2.0,
            }
            for asks, says, wrong in sums
        ],
        "kto_mix.jsonl": [
            {
                "prompt": [_user(asks)],
                "completion": [_assistant(says if number % 2 else wrong)],
                "label": bool(number % 2),
            }
            for number, (asks, says, wrong) in enumerate(sums)
        ],
    }
    for name, found in rows.items():
        text = json.dumps(found) if name.endswith(".json") else "".join(json.dumps(row) + "\n" for row in found)
        (data / name).write_text(text, encoding="utf-8")
    (data / "dataset_info.json").write_text(json.dumps(DATASET_INFO), encoding="utf-8")
    for name, (_, text) in CONFIGS.items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}
