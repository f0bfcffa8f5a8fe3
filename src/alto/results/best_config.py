"""Converts a job's configuration to the classes of PEFT and TRL."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from alto.errors import UnsupportedError
from alto.runs import RunDir, RunHistory
from alto.spec import SHAPE_FIELDS, TEMPLATE_NAME, DpoSettings, Task, read_run_task

if TYPE_CHECKING:
    from peft import PeftConfig
    from transformers import TrainingArguments

_CLASSES: Mapping[str, tuple[str, str]] = {
    "sft": ("trl", "SFTConfig"),
    "dpo": ("trl", "DPOConfig"),
    "kto": ("trl", "KTOConfig"),
    "orpo": ("trl.experimental.orpo", "ORPOConfig"),
    "cpo": ("trl.experimental.cpo", "CPOConfig"),
    "classification": ("transformers", "TrainingArguments"),
    "regression": ("transformers", "TrainingArguments"),
}
"""Module and name of the class for the trainer's arguments, by method."""

_OF_THE_ADAPTER = frozenset({*SHAPE_FIELDS, "lora_dropout", "init_lora_weights"})
"""Keys of a job that belong to PEFT's configuration, not to the trainer's."""

_MAX_LENGTH = 1024
"""Maximum length of rows, for a run whose journal does not record it."""

_HARMLESS: Mapping[str, Any] = {"loraplus_lr_ratio": 1.0, "mixture_weights": None}
"""Keys that no class of arguments has, each with the value that has no effect."""


_TRL_FORMS = (
    *("messages", "text", "prompt_completion", "raw_prompt_completion"),
    *("preference", "raw_preference", "unpaired_preference"),
)
"""Forms of rows that TRL recognises by their columns."""

_TEMPLATED_FORMS = ("prompt_completion", "preference", "unpaired_preference")
"""Forms whose plain texts ALTO formats with the chat template, while TRL joins them unchanged."""


class BestConfig(NamedTuple):
    """The configuration of the best job for a trainer of TRL or transformers.

    Attributes:
        lora: PEFT's configuration of an adapter to train.
        training: The trainer's arguments: ``SFTConfig``, ``DPOConfig``, …, or ``TrainingArguments`` for a classifier.
            ``output_dir`` is the folder of the run with the suffix ``-trl``.
        not_carried: Settings of the task and the job that these classes cannot hold, or that TRL would ignore, by name.
            They include ``dataset_format`` if TRL makes different tokens from the same rows.
    """

    lora: PeftConfig
    training: TrainingArguments
    not_carried: Mapping[str, Any]


def best_config(history: RunHistory, adapter_dir: Path) -> BestConfig:
    """Return the configuration of a finished run's best job; see :attr:`alto.TaskResult.best_config`."""
    best = history.best
    assert best is not None, "a finished run has a best job"
    run_dir = adapter_dir.parent
    task = read_run_task(RunDir.open(run_dir).task_file)
    kind = _arguments_class(task.method)
    try:
        from peft import PeftConfig
    except ImportError:
        raise UnsupportedError("best_config: expected peft, found that it is not installed; pip install peft") from None
    known = {field.name for field in fields(kind)}
    data = {} if history.started is None else history.started.data
    wanted = training_arguments(task, best.config, data)
    template = adapter_dir / TEMPLATE_NAME
    if task.chat_template is not None:
        is_file = "chat_template_path" in known and template.is_file()
        wanted["chat_template_path" if is_file else "chat_template"] = str(template) if is_file else task.chat_template
    if "disable_dropout" in known and best.config.get("lora_dropout"):
        wanted["disable_dropout"] = False
    carried = {key: value for key, value in wanted.items() if key in known}
    # No recomputation of activations, and no autocast. transformers has renamed the first option.
    checkpointing = "activation_checkpointing" if "activation_checkpointing" in known else "gradient_checkpointing"
    own: dict[str, Any] = {checkpointing: False, "output_dir": f"{run_dir}-trl", "bf16": False, "report_to": "none"}
    training = kind(**carried, **own)
    left = {
        key: value
        for key, value in wanted.items()
        if key not in known and not (key in _HARMLESS and value == _HARMLESS[key])
    }
    left |= _of_the_base(task) | _unread_settings(wanted)
    if "max_length" in known and reads_otherwise_in_trl(str(data.get("form", "")), data.get("of_messages")):
        left["dataset_format"] = data["form"]
    lora = PeftConfig.from_pretrained(str(adapter_dir))
    lora.inference_mode = False  # with the saved value, PEFT would freeze the adapter
    return BestConfig(lora, training, left)


def training_arguments(task: Task, config: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that decide the training of a job, with the names and meanings of TRL and transformers.

    Args:
        task: Task of the job.
        config: Configuration of the job, with canonical keys.
        data: Field ``data`` of the event ``task_started``: the form of the rows, and their maximum length.
    """
    found = {key: value for key, value in config.items() if key not in _OF_THE_ADAPTER and value is not None}
    found["max_length"] = task.max_length or data.get("max_length") or _MAX_LENGTH
    found["max_grad_norm"] = config.get("max_grad_norm") or 0.0
    ratio = found.pop("warmup_ratio", 0.0)
    found["warmup_steps"] = found.get("warmup_steps") or ratio  # transformers too reads a value below 1 as a ratio
    found["optim_args"] = (
        ",".join(f"{key}={value}" for key, value in dict(found.get("optim_args") or {}).items()) or None
    )
    if task.method == "sft":
        found |= _trained_tokens(task, data)
    if task.method == "dpo":
        settings: dict[str, Any] = {key: config.get(key) for key in DpoSettings.model_fields}
        forms = DpoSettings(**settings).forms
        found |= {"loss_type": list(forms), "loss_weights": list(forms.values()) if len(forms) > 1 else None}
        found.pop("rpo_alpha", None)
    return found


def reads_otherwise_in_trl(form: str, of_messages: bool | None) -> bool:
    """Return whether TRL cannot read rows of ``form``, or makes different tokens from them than ALTO.

    Args:
        form: Form of the rows; empty if unknown.
        of_messages: Whether their replies are lists of messages; None if unknown.
    """
    if form in _TEMPLATED_FORMS:
        return of_messages is False
    return bool(form) and form not in _TRL_FORMS


def _of_the_base(task: Task) -> dict[str, Any]:
    """Return settings of precision that differ from float32; TRL's trainers load a model by its name in float32."""
    found = {
        "dtype": task.dtype if task.dtype not in ("auto", "float32") else None,
        "load_in_4bit": task.load_in_4bit or None,
        "load_in_8bit": task.load_in_8bit or None,
        "adapter_dtype": task.adapter_dtype if task.adapter_dtype != "float32" else None,
        "optim_state_dtype": task.optim_state_dtype,
    }
    return {key: value for key, value in found.items() if value is not None}


def _unread_settings(wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings that TRL's class has but its trainer ignores: label smoothing with DPO's sigmoid loss."""
    smoothing = wanted.get("label_smoothing")
    return {"label_smoothing": smoothing} if smoothing and "sigmoid" in wanted.get("loss_type", ()) else {}


def _trained_tokens(task: Task, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return TRL's arguments that train the tokens of ``train_on``; TRL's default trains all tokens of ``messages``."""
    are_messages = data.get("form") in ("messages", "sharegpt")
    if task.train_on == "all":
        return {"completion_only_loss": False}
    if task.train_on == "last" and are_messages:
        return {"train_on": "last"}
    return {"assistant_only_loss": True} if are_messages else {}


def _arguments_class(method: str) -> type[TrainingArguments]:
    if method not in _CLASSES:
        raise UnsupportedError(
            f"best_config: expected one of the methods {', '.join(_CLASSES)}, which TRL or transformers trains, found "
            f"{method!r}; result.jobs has the settings themselves"
        )
    module, name = _CLASSES[method]
    try:
        found: type[TrainingArguments] = getattr(import_module(module), name)
    except ImportError as error:
        raise UnsupportedError(
            f"best_config: expected {module} with {name}, found that it cannot be imported ({error}); pip install trl"
        ) from None
    return found
