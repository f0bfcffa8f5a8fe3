"""Converts a job's settings to the keys of TRL, Axolotl and LLaMA-Factory; the reverse is :mod:`alto.importing`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from alto.exporting.tool_data import Rows, axolotl_dataset, llamafactory_info, trl_dataset
from alto.results.best_config import training_arguments
from alto.spec import JobConfig, Task
from alto.spec.chat_template import TEMPLATE_NAME
from alto.spec.job_config import ALL_LINEAR

__all__ = ["ToolFiles", "axolotl_files", "llamafactory_files", "trl_files"]

_TRAINER = (
    *("learning_rate", "per_device_train_batch_size", "gradient_accumulation_steps", "num_train_epochs", "max_steps"),
    *("lr_scheduler_type", "lr_scheduler_kwargs", "optim", "optim_args", "weight_decay", "max_grad_norm"),
    *("adam_beta1", "adam_beta2", "adam_epsilon", "seed", "neftune_noise_alpha", "warmup_steps"),
)
"""Keys of transformers' ``TrainingArguments``."""

_TRL_OF_METHODS: Mapping[str, tuple[str, ...]] = {
    "sft": ("completion_only_loss", "assistant_only_loss", "router_aux_loss_coef"),
    "dpo": (
        *("beta", "loss_type", "loss_weights", "label_smoothing", "ld_alpha", "f_divergence_type"),
        *("f_alpha_divergence_coef", "discopop_tau", "router_aux_loss_coef"),
    ),
    "kto": ("beta", "loss_type", "desirable_weight", "undesirable_weight", "router_aux_loss_coef"),
}
"""Keys of TRL's argument class, by method; only methods that have a TRL command."""

_AXOLOTL_NAMES = {
    "per_device_train_batch_size": "micro_batch_size",
    "num_train_epochs": "num_epochs",
    "lr_scheduler_type": "lr_scheduler",
    "optim": "optimizer",
}
_AXOLOTL_METHODS: Mapping[str, Mapping[str, str]] = {
    "sft": {},
    "dpo": {"beta": "rl_beta", "label_smoothing": "dpo_label_smoothing"},
    "orpo": {"beta": "rl_beta"},
    "kto": {
        "beta": "rl_beta",
        "desirable_weight": "kto_desirable_weight",
        "undesirable_weight": "kto_undesirable_weight",
    },
    "cpo": {"beta": "rl_beta", "cpo_alpha": "cpo_alpha", "simpo_gamma": "simpo_gamma"},
}
"""Axolotl's keys by method and setting."""

_LLAMAFACTORY_METHODS: Mapping[str, Mapping[str, str]] = {
    "sft": {},
    "dpo": {
        "beta": "pref_beta",
        "loss_type": "pref_loss",
        "label_smoothing": "dpo_label_smoothing",
        "rpo_alpha": "pref_ftx",
    },
    "orpo": {"beta": "pref_beta"},
    "kto": {"beta": "pref_beta", "desirable_weight": "kto_chosen_weight", "undesirable_weight": "kto_rejected_weight"},
    "cpo": {"beta": "pref_beta", "simpo_gamma": "simpo_gamma", "cpo_alpha": "pref_ftx"},
}
"""LLaMA-Factory's keys by method and setting."""

_LLAMAFACTORY_FORMS = ("sigmoid", "hinge", "ipo")
"""Forms of DPO's loss in LLaMA-Factory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFiles:
    """The files of another trainer's configuration.

    Attributes:
        keys: The configuration itself.
        command: Words of the training command, before the name of the configuration file.
        others: Texts of additional files, by file name.
    """

    keys: Mapping[str, Any]
    command: tuple[str, ...]
    others: Mapping[str, str] = field(default_factory=dict)


def trl_files(task: Task, config: JobConfig, model: str, rows: Rows, folder: Path) -> ToolFiles | None:
    """Return the files for ``trl sft --config``, ``trl dpo`` or ``trl kto``; None for methods without such a command.

    Args:
        model: The base model, as an argument of ``from_pretrained``.
        folder: The folder of the files.
    """
    if task.method not in _TRL_OF_METHODS:
        return None
    trained = training_arguments(task, config.to_dict(), {"form": rows.form})
    kept = {key: trained.get(key) for key in (*_TRAINER, *_TRL_OF_METHODS[task.method], "max_length")}
    if task.method != "sft" and config.lora_dropout:
        kept["disable_dropout"] = False
    template = task.base_model.chat_template
    files = {TEMPLATE_NAME: template} if template is not None and task.method == "sft" else {}
    targets = config.target_modules
    keys = {
        "model_name_or_path": model,
        "dtype": task.dtype,
        **_quantised(task, nested="use_bnb_nested_quant"),
        "trust_remote_code": task.trust_remote_code or None,
        "use_peft": True,
        "lora_r": config.r,
        "lora_alpha": _whole(config.lora_alpha),
        "lora_dropout": config.lora_dropout,
        "lora_target_modules": targets if isinstance(targets, str) else list(targets),
        "lora_target_parameters": _listed(config.target_parameters),
        "lora_modules_to_save": _listed(config.modules_to_save),
        "use_rslora": config.use_rslora or None,
        "use_dora": config.use_dora or None,
        **trl_dataset(task),
        "chat_template_path": str(folder / TEMPLATE_NAME) if files else None,
        **kept,
        "bf16": False,
        "gradient_checkpointing": task.gradient_checkpointing is True,
        "output_dir": str(folder / "output"),
    }
    return ToolFiles(keys=_given(keys), command=("trl", task.method, "--config"), others=files)


def axolotl_files(task: Task, config: JobConfig, model: str, rows: Rows, folder: Path) -> ToolFiles | None:
    """Return the files for ``axolotl train``; None for methods, or forms of CPO's loss, that Axolotl does not have.

    The arguments are those of :func:`trl_files`.
    """
    settings = config.objective.model_dump()
    if task.method not in _AXOLOTL_METHODS or (task.method == "cpo" and settings["loss_type"] != "simpo"):
        return None
    kind = {"cpo": "simpo", "sft": None}.get(task.method, task.method)
    if task.method == "dpo" and settings["loss_type"] == "ipo":
        kind = "ipo"
    trained = _trainer_keys(task, config)
    targets = _listed(config.target_modules)
    keys = {
        "base_model": model,
        "trust_remote_code": task.trust_remote_code or None,
        "adapter": "qlora" if task.load_in_4bit else "lora",
        "load_in_4bit": task.load_in_4bit or None,
        "load_in_8bit": task.load_in_8bit or None,
        "rl": kind,
        **{name: settings[key] for key, name in _AXOLOTL_METHODS[task.method].items()},
        "lora_r": config.r,
        "lora_alpha": _whole(config.lora_alpha),
        "lora_dropout": config.lora_dropout,
        "lora_target_linear": True if targets == ALL_LINEAR else None,
        "lora_target_modules": None if targets == ALL_LINEAR else targets,
        "lora_target_parameters": _listed(config.target_parameters),
        "lora_modules_to_save": _listed(config.modules_to_save),
        "lora_exclude_modules": _listed(config.exclude_modules),
        "peft_layers_to_transform": _listed(config.layers_to_transform),
        "peft_layers_pattern": _listed(config.layers_pattern),
        "peft_use_rslora": config.use_rslora or None,
        "peft_use_dora": config.use_dora or None,
        "peft_init_lora_weights": None if config.init_lora_weights == "default" else config.init_lora_weights,
        "loraplus_lr_ratio": None if config.loraplus_lr_ratio == 1 else config.loraplus_lr_ratio,
        "datasets": [axolotl_dataset(task, rows)],
        "chat_template": "jinja" if task.chat_template else None,
        "chat_template_jinja": task.base_model.chat_template,
        "train_on_inputs": task.train_on == "all" if task.method == "sft" else None,
        "val_set_size": task.validation_split,
        "sequence_len": task.max_length or 1024,
        "excess_length_strategy": "truncate",
        "sample_packing": False,
        **{_AXOLOTL_NAMES.get(key, key): value for key, value in trained.items()},
        "bf16": task.dtype == "bfloat16",
        "fp16": task.dtype == "float16" or None,
        "gradient_checkpointing": task.gradient_checkpointing is True,
        "output_dir": str(folder / "output"),
    }
    return ToolFiles(keys=_given(keys), command=("axolotl", "train"))


def llamafactory_files(task: Task, config: JobConfig, model: str, rows: Rows, folder: Path) -> ToolFiles | None:
    """Return the files for ``llamafactory-cli train``, with the ``dataset_info.json`` that it needs; None for methods,
    or forms of CPO's loss, that LLaMA-Factory does not have.

    The arguments are those of :func:`trl_files`.
    """
    settings = config.objective.model_dump()
    if task.method not in _LLAMAFACTORY_METHODS or (task.method == "cpo" and settings["loss_type"] != "simpo"):
        return None
    own = {name: settings[key] for key, name in _LLAMAFACTORY_METHODS[task.method].items()}
    if own.get("pref_loss") not in _LLAMAFACTORY_FORMS:  # the re-import then finds and reports the difference
        own.pop("pref_loss", None)
    own |= {"orpo": {"pref_loss": "orpo"}, "cpo": {"pref_loss": "simpo"}}.get(task.method, {})
    targets = config.target_modules
    keys = {
        "model_name_or_path": model,
        "trust_remote_code": task.trust_remote_code or None,
        "stage": {"orpo": "dpo", "cpo": "dpo"}.get(task.method, task.method),
        "do_train": True,
        "finetuning_type": "lora",
        **own,
        "lora_rank": config.r,
        "lora_alpha": _whole(config.lora_alpha),
        "lora_dropout": config.lora_dropout,
        "lora_target": "all" if targets == ALL_LINEAR else targets if isinstance(targets, str) else ",".join(targets),
        "additional_target": ",".join(config.modules_to_save) if config.modules_to_save else None,
        "use_rslora": config.use_rslora or None,
        "use_dora": config.use_dora or None,
        "loraplus_lr_ratio": None if config.loraplus_lr_ratio == 1 else config.loraplus_lr_ratio,
        "moe_aux_loss_coef": config.router_aux_loss_coef,
        "quantization_bit": 4 if task.load_in_4bit else 8 if task.load_in_8bit else None,
        "dataset": rows.name,
        "dataset_dir": str(folder),
        "max_samples": task.max_samples,
        "cutoff_len": task.max_length or 1024,
        "train_on_prompt": True if task.train_on == "all" else None,
        "mask_history": True if task.train_on == "last" else None,
        "val_size": task.validation_split,
        **_trainer_keys(task, config),
        "bf16": True if task.dtype == "bfloat16" else None,
        "fp16": True if task.dtype == "float16" else None,
        "output_dir": str(folder / "output"),
    }
    info = json.dumps({rows.name: llamafactory_info(task, rows)}, indent=2)
    others = {"dataset_info.json": f"{info}\n"}
    return ToolFiles(keys=_given(keys), command=("llamafactory-cli", "train"), others=others)


def _trainer_keys(task: Task, config: JobConfig) -> dict[str, Any]:
    """Return keys of ``TrainingArguments``; a warmup share has the name from before transformers 5."""
    trained = training_arguments(task, config.to_dict(), {})
    found = {key: trained.get(key) for key in _TRAINER}
    share = found["warmup_steps"] or 0
    return found | {"warmup_steps": None, "warmup_ratio": share} if 0 < share < 1 else found


def _quantised(task: Task, *, nested: str) -> dict[str, Any]:
    if task.load_in_4bit:
        return {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", nested: True}
    return {"load_in_8bit": True} if task.load_in_8bit else {}


def _whole(number: float) -> float | int:
    return int(number) if float(number).is_integer() else number


def _listed(names: Any) -> Any:
    return list(names) if isinstance(names, tuple) else names


def _given(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of ``keys`` that have a value."""
    return {key: value for key, value in keys.items() if value is not None and value != {}}
