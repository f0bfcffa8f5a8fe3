"""Writing of a TRL, Axolotl or LLaMA-Factory configuration that trains the exported job.

:mod:`alto.importing` reads the written file back, and every setting that is then different is reported, so that no
setting is lost silently.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from alto.artifacts.tool_data import NAMED_TYPES, Rows, axolotl_dataset, check_dataset, llamafactory_info, trl_dataset
from alto.artifacts.winner import Winner
from alto.base import quoted
from alto.errors import SpecError, UnsupportedError
from alto.importing import TOOLS, import_file, imported_task
from alto.records import ForeignTool
from alto.results.best_config import reads_otherwise_in_trl, training_arguments
from alto.spec import ALL_LINEAR, TEMPLATE_NAME, DpoSettings, JobConfig, Task, write_yaml

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


_WRITERS: Mapping[ForeignTool, Callable[[Task, JobConfig, str, Rows, Path], ToolFiles | None]] = {
    "trl": trl_files,
    "axolotl": axolotl_files,
    "llamafactory": llamafactory_files,
}

_SHARED = (
    *("method", "dataset", "dataset_config", "dataset_train_split", "max_length", "train_on"),
    *("validation_dataset", "validation_split", "max_samples", "dtype", "load_in_4bit", "load_in_8bit"),
)
"""Keys of a task that affect training or validation of its jobs."""

_OF_FORMS = ("loss_type", "loss_weights", "rpo_alpha")
"""Settings of DPO that are compared as one weighted sum of loss forms."""


def write_tool_config(winner: Winner, tool: ForeignTool, fresh: Path, folder: Path) -> tuple[str, tuple[str, ...]]:
    """Write the configuration of ``tool`` that trains the job of ``winner``.

    Args:
        winner: An adapter of a run.
        fresh: The folder in which files are written.
        folder: The final path of ``fresh``.

    Returns:
        The command that starts training; and notices, as sentences, one for each setting that the tool does not have.

    Raises:
        SpecError: The adapter does not come from a run.
        UnsupportedError: The tool cannot train with the method, or cannot read the dataset.
    """
    task, config = winner.task, winner.config
    if task is None or config is None or winner.rows is None:
        raise SpecError(
            f"config: expected a run, whose task names the model, the data and the method, found the adapter "
            f"{winner.adapter.folder}; name the run"
        )
    check_dataset(task)
    model, title = winner.base_model, TOOLS[tool].title
    written = _WRITERS[tool](task, config, model, winner.rows, fresh)
    if written is None:
        raise UnsupportedError(
            f"config: expected a method that {title} trains from a configuration file, found {task.method!r}"
            f"{' with this loss_type' if task.method == 'cpo' else ''}; result.best_config has PEFT's and TRL's objects"
        )
    for name, text in written.others.items():
        (fresh / name).write_text(text, encoding="utf-8")
    file = fresh / f"{tool}.yaml"
    file.write_text(write_yaml(dict(written.keys)), encoding="utf-8")
    left = _left_out(task, config, winner.rows, file, tool)
    notes = tuple(f"{title} has no place for {line}." for line in left)
    comments = "".join(f"# {note}\n" for note in notes)
    keys = {key: _moved(value, str(fresh), str(folder)) for key, value in written.keys.items()}
    file.write_text(f"# Exported by alto from {winner.name}\n{comments}{write_yaml(keys)}", encoding="utf-8")
    return shlex.join([*written.command, str(folder / file.name)]), notes


def _moved(value: Any, old: str, new: str) -> Any:
    """Return ``value`` with the leading folder ``old`` replaced by ``new``; other values are returned unchanged."""
    return new + value.removeprefix(old) if isinstance(value, str) and value.startswith(old) else value


def _left_out(task: Task, config: JobConfig, rows: Rows, file: Path, tool: ForeignTool) -> list[str]:
    """Return the settings, as ``key: value``, that differ in the task that results from importing ``file``."""
    method = [f"method={task.method}"] if tool == "trl" else []
    imported = imported_task([import_file(file, tool, method)], method).task
    ours, theirs = _comparable(config), _comparable(imported.jobs[0].config)
    differing = {key: value for key, value in ours.items() if value != theirs.get(key)}
    for key in _SHARED:
        value = getattr(task, key)
        usual = 1024 if key == "max_length" else Task.model_fields[key].default
        if (value or usual) != (getattr(imported, key) or usual):
            differing[key] = value
    if tool == "trl":
        differing |= _unread_by_trl(rows)
    elif tool == "axolotl" and rows.of_messages is False and rows.form not in NAMED_TYPES:
        differing["dataset_format"] = rows.form  # Axolotl's custom types do not use the chat template
    if task.base_model.chat_template != imported.base_model.chat_template:
        differing["chat_template"] = task.chat_template
    if task.adapter_dtype != "float32":
        differing["adapter_dtype"] = task.adapter_dtype
    if task.optim_state_dtype is not None:
        differing["optim_state_dtype"] = task.optim_state_dtype
    return [f"{key}: {quoted(value)}" for key, value in differing.items()]


def _unread_by_trl(rows: Rows) -> dict[str, Any]:
    """Return row settings that TRL cannot express: it knows only fixed column names, and joins texts directly."""
    if reads_otherwise_in_trl(rows.form, rows.of_messages):
        return {"dataset_format": rows.form}
    renamed = {role: column for role, column in rows.columns.items() if role != column}
    return {"columns": renamed} if renamed else {}


def _comparable(config: JobConfig) -> dict[str, Any]:
    """Return the settings of a job, in one spelling where several are possible."""
    found = config.to_dict()
    found["warmup_steps"] = found.pop("warmup_ratio", 0) or found.get("warmup_steps", 0)
    if isinstance(config.objective, DpoSettings):
        found |= dict.fromkeys(_OF_FORMS)
        found["loss_type"] = dict(config.objective.forms)
    return found
