"""Import of Axolotl configurations (``axolotl train``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from alto.errors import UnsupportedError
from alto.importing.axolotl_data import read_datasets
from alto.importing.axolotl_keys import ANSWERS, PREFIXES
from alto.importing.draft import Draft, checked
from alto.importing.trainer import (
    compares_replies_as_tool,
    local_model,
    read_template_file,
    read_trainer_keys,
    set_defaults,
    validation_share,
)
from alto.spec.method import find_method
from alto.spec.quoting import quoted

__all__ = ["MARKS", "read_axolotl"]

MARKS = frozenset(
    {
        *("base_model", "adapter", "sequence_len", "micro_batch_size", "num_epochs", "val_set_size", "sample_packing"),
        *("lora_target_linear", "lora_model_dir", "dataset_prepared_path", "train_on_inputs", "flash_attention"),
        *("special_tokens", "wandb_project", "evals_per_epoch", "saves_per_epoch", "pad_to_sequence_len", "rl"),
        *("tokenizer_type", "model_type", "eval_sample_packing", "early_stopping_patience", "test_datasets"),
        *("shuffle_merged_datasets", "chat_template_jinja", "strict", "lora_fan_in_fan_out", "xformers_attention"),
    }
)
"""Keys that identify a configuration of Axolotl."""

_METHODS = {None: "sft", "dpo": "dpo", "ipo": "dpo", "orpo": "orpo", "kto": "kto", "simpo": "cpo"}
_ADAPTERS = ("lora", "qlora")

_DEFAULTS = {
    "max_length": 512,
    "per_device_train_batch_size": 1,
    "num_train_epochs": 1,
    "lr_scheduler_type": "cosine",
}
_WARMUP = 0.03

_OTHER_NAMES = {
    "optimizer": "optim",
    "lr_scheduler": "lr_scheduler_type",
    "noisy_embedding_alpha": "neftune_noise_alpha",
    "peft_layers_to_transform": "layers_to_transform",
    "peft_layers_pattern": "layers_pattern",
    "lora_exclude_modules": "exclude_modules",
}

_PACKED = (
    "rows that are concatenated without padding and stay separate; a packed row of Axolotl holds as many rows as fit "
    "into sequence_len: raise per_device_train_batch_size to about that number"
)
_KERNEL_PLUGINS = ("liger", "cut_cross_entropy", "kernels")
"""Substrings in the names of plugins that replace kernels without changing results."""


def read_axolotl(draft: Draft, method_name: str | None) -> None:
    """Convert a configuration of Axolotl to a task.

    Args:
        draft: The configuration; task values and notes are added to it.
        method_name: The method, if the user named one.

    Raises:
        SpecError: A key has a value that Axolotl does not accept.
        UnsupportedError: The configuration does not train adapters, or has a dataset that ALTO cannot read.
    """
    _check_adapter(draft)
    if method_name is not None and draft.take("rl") is not None:
        draft.not_needed("rl", "'--set method' names the method")
    method = find_method(method_name or _read_method(draft))
    if method.compares_replies:
        _read_beta(draft)
    draft.put("method", method.name)
    draft.put("model", local_model(draft, draft.take("base_model")))
    read_datasets(draft, method)
    validation_share(draft, "val_set_size")
    _read_template(draft)
    for key, name in _OTHER_NAMES.items():
        draft.rename(key, name)
    _read_schedule(draft)
    read_trainer_keys(draft)
    _read_batch(draft)
    _read_targets(draft)
    _read_trackers(draft)
    _read_tokens(draft)
    _read_plugins(draft)
    _read_length(draft)
    if draft.take("train_on_inputs"):
        if method.name == "sft":
            draft.put("train_on", "all")
            draft.used("train_on_inputs", "train_on: all")
        else:
            draft.not_needed("train_on_inputs", f"method {method.name} learns only from replies")
    draft.drop(PREFIXES)
    draft.pass_on(ANSWERS, method)
    set_defaults(draft, _DEFAULTS)
    compares_replies_as_tool(draft, method)


def _check_adapter(draft: Draft) -> None:
    adapter = draft.take("adapter")
    if adapter not in _ADAPTERS:
        found = "none" if adapter is None else quoted(adapter)
        raise UnsupportedError(
            f"adapter: expected {' or '.join(_ADAPTERS)}, found {found}: ALTO trains LoRA adapters. Write "
            "adapter: lora."
        )
    if adapter == "qlora" and not draft.given.get("load_in_4bit"):
        draft.given["load_in_4bit"] = True
    if draft.take("pretraining_dataset") is not None:
        raise UnsupportedError(
            "pretraining_dataset: expected datasets, found a stream of texts. Write the texts into a file, "
            "and name it in datasets with type: completion."
        )


def _read_method(draft: Draft) -> str:
    kind = draft.take_text("rl")
    if kind not in _METHODS:
        raise UnsupportedError(
            f"rl: expected one of {', '.join(filter(None, _METHODS))}, found {quoted(kind)}, which ALTO does "
            "not train. Give a configuration of another kind."
        )
    for key in ("reward_model", "process_reward_model"):
        if draft.take(key):
            raise UnsupportedError(f"{key}: expected false, found true: ALTO trains no reward models. Remove the key.")
    name = _METHODS[kind]
    if kind != "dpo" and draft.take("dpo_label_smoothing"):
        draft.not_needed("dpo_label_smoothing", "Axolotl uses it only with rl: dpo")
    if kind == "ipo":
        draft.put("loss_type", "ipo")
        draft.used("rl", "method: dpo with loss_type: ipo")
    if kind == "simpo":
        draft.put("loss_type", "simpo")
        draft.used("rl", "method: cpo with loss_type: simpo")
    if kind == "dpo":
        draft.put("label_smoothing", draft.take("dpo_label_smoothing") or None)
    return name


def _read_beta(draft: Draft) -> None:
    """Read ``beta``; the value in the mapping ``trl`` takes precedence over the other keys."""
    settings = draft.given.get("trl")
    if isinstance(settings, Mapping):
        draft.put("beta", settings.get("beta"))
        draft.given["trl"] = {key: value for key, value in settings.items() if key != "beta" and value is not None}
    for key in ("rl_beta", "dpo_beta", "orpo_alpha"):
        if "beta" not in draft.values:
            draft.put("beta", draft.take(key))


def _read_template(draft: Draft) -> None:
    """Read ``chat_template``: the name of one of Axolotl's templates, or a reference to ``chat_template_jinja``."""
    name = draft.take_text("chat_template", "tokenizer_default")
    read_template_file(draft, "chat_template_jinja")
    if "chat_template" not in draft.values and name not in ("tokenizer_default", "jinja"):
        draft.not_supported(
            "chat_template",
            f"{quoted(name)} is one of Axolotl's own templates: rows are written by the template of the model's "
            "tokenizer; write the Jinja text of a different template in chat_template",
        )


def _read_schedule(draft: Draft) -> None:
    """Read Axolotl's minimum learning rate of a cosine schedule, and set its default warmup if none is given."""
    if draft.given.get("bf16") == "full":
        draft.given["bf16"] = True
    floor = draft.take("cosine_min_lr_ratio")
    if floor and draft.given.get("lr_scheduler_type", "cosine") == "cosine":
        draft.given["lr_scheduler_type"] = "cosine_with_min_lr"
        draft.given["lr_scheduler_kwargs"] = {"min_lr_rate": floor}
        draft.used("cosine_min_lr_ratio", "lr_scheduler_type: cosine_with_min_lr with min_lr_rate")
    elif floor:
        draft.not_needed("cosine_min_lr_ratio", "only the schedule 'cosine' has such a floor")
    has_none = all(draft.given.get(key) is None for key in ("warmup_steps", "warmup_ratio"))
    if has_none and draft.given.get("lr_scheduler_type") != "constant":
        draft.given["warmup_ratio"] = _WARMUP
        draft.used(
            "warmup_steps",
            f"warmup_ratio: {_WARMUP}, Axolotl's default warmup; Axolotl ends it after at most 100 steps",
        )


def _read_batch(draft: Draft) -> None:
    """Read the batch size; ``batch_size`` is the number of rows in a whole optimizer step, and two of the three keys
    determine the third."""
    rows, parts, step = (draft.take(key) for key in ("micro_batch_size", "gradient_accumulation_steps", "batch_size"))
    if isinstance(step, int) and rows is None and isinstance(parts, int) and parts > 0:
        rows = step // parts
    elif isinstance(step, int) and parts is None and isinstance(rows, int) and rows > 0:
        parts = step // rows
    draft.put("per_device_train_batch_size", rows)
    draft.put("gradient_accumulation_steps", parts)
    if draft.take("sample_packing"):
        draft.used("sample_packing", _PACKED)


def _read_targets(draft: Draft) -> None:
    linear, names = draft.take("lora_target_linear"), draft.take("lora_target_modules")
    if linear:
        draft.put("target_modules", "all-linear")
        if names:
            draft.used("lora_target_modules", "target_modules: all-linear, as lora_target_linear requests")
    else:
        draft.put("target_modules", names or None)


def _read_trackers(draft: Draft) -> None:
    """Read the trackers; as in Axolotl, naming a project of Weights & Biases enables that tracker."""
    wandb: Any = draft.take("use_wandb")
    project, mode = draft.take("wandb_project"), draft.take("wandb_mode")
    names = []
    if (wandb if wandb is not None else bool(project)) and mode != "disabled":
        names.append("wandb")
        draft.used("wandb_project", "report_to: wandb; its settings come from environment variables (WANDB_PROJECT)")
    if draft.take("use_mlflow") or draft.given.get("mlflow_experiment_name"):
        names.append("mlflow")
    if draft.take("use_tensorboard"):
        names.append("tensorboard")
    draft.put("report_to", names or None)


def _read_plugins(draft: Draft) -> None:
    names = [str(name) for name in draft.take_list("plugins")]
    foreign = [name for name in names if not any(part in name.lower() for part in _KERNEL_PLUGINS)]
    if foreign:
        draft.not_supported("plugins", f"{quoted(', '.join(foreign))}: plugins of Axolotl are not loaded")
    elif names:
        draft.not_needed("plugins", "plugins of Axolotl are not loaded; ALTO has its own kernels")


def _read_length(draft: Draft) -> None:
    length = draft.take("sequence_len", _DEFAULTS["max_length"])
    draft.put("max_length", length)
    if draft.take("excess_length_strategy", "drop") != "truncate":
        draft.used("sequence_len", f"max_length: {quoted(length)}; Axolotl leaves longer rows out, and ALTO cuts them")


def _read_tokens(draft: Draft) -> None:
    tokens = checked(draft.take("special_tokens", {}), dict, "special_tokens")
    changed = [key for key, value in tokens.items() if value is not None and key != "pad_token"]
    if tokens.get("pad_token") is not None:
        draft.not_needed("special_tokens.pad_token", "rows are concatenated without padding")
    for key in changed:
        draft.not_supported(
            f"special_tokens.{key}",
            "the tokenizer is not changed: save a tokenizer with this token, and name its folder in 'model'",
        )
