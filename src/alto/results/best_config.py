"""A job's configuration as PEFT and TRL take it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from alto.errors import UnsupportedError
from alto.runs import RunDir, RunHistory
from alto.spec import Task, read_run_task
from alto.spec.chat_template import TEMPLATE_NAME
from alto.spec.job_config import SHAPE_FIELDS
from alto.spec.objective_settings import DpoSettings

if TYPE_CHECKING:
    from peft import PeftConfig
    from transformers import TrainingArguments

__all__ = ["BestConfig", "best_config", "reads_otherwise_in_trl", "training_arguments"]

_CLASSES: Mapping[str, tuple[str, str]] = {
    "sft": ("trl", "SFTConfig"),
    "dpo": ("trl", "DPOConfig"),
    "kto": ("trl", "KTOConfig"),
    "orpo": ("trl.experimental.orpo", "ORPOConfig"),
    "cpo": ("trl.experimental.cpo", "CPOConfig"),
    "classification": ("transformers", "TrainingArguments"),
    "regression": ("transformers", "TrainingArguments"),
}
"""By method: module and name of the class that holds its trainer's arguments."""

_OF_THE_ADAPTER = frozenset({*SHAPE_FIELDS, "lora_dropout", "init_lora_weights"})
"""Keys of a job that are in PEFT's configuration, not in the trainer's."""

_MAX_LENGTH = 1024
"""Where rows are cut, of a run whose journal does not have it."""

_HARMLESS: Mapping[str, Any] = {"loraplus_lr_ratio": 1.0, "mixture_weights": None}
"""Keys that no class of arguments has, each with the value that needs none."""


_TRL_FORMS = (
    *("messages", "text", "prompt_completion", "raw_prompt_completion"),
    *("preference", "raw_preference", "unpaired_preference"),
)
"""Forms of rows that TRL knows by their columns."""

_TEMPLATED_FORMS = ("prompt_completion", "preference", "unpaired_preference")
"""Forms whose texts ALTO writes with the chat template, and TRL joins as they are."""


class BestConfig(NamedTuple):
    """The configuration of the best job for a trainer of TRL or transformers.

    Attributes:
        lora: PEFT's configuration of the adapter, to be trained.
        training: The trainer's arguments: ``SFTConfig``, ``DPOConfig``, …, or ``TrainingArguments`` of a classifier.
            ``output_dir`` is the folder of the run with ``-trl`` behind it.
        not_carried: Settings of the task and the job that these classes have no place for, or that TRL would not train
            with, by name. ``dataset_format`` is among them where TRL makes other tokens of the same rows.
    """

    lora: PeftConfig
    training: TrainingArguments
    not_carried: Mapping[str, Any]


def best_config(history: RunHistory, adapter_dir: Path) -> BestConfig:
    """The configuration of the job that a finished run chose; see :attr:`alto.TaskResult.best_config`."""
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
    # Nothing is recomputed, and there is no autocast: transformers renamed the option.
    checkpointing = "activation_checkpointing" if "activation_checkpointing" in known else "gradient_checkpointing"
    own: dict[str, Any] = {checkpointing: False, "output_dir": f"{run_dir}-trl", "bf16": False, "report_to": "none"}
    training = kind(**carried, **own)
    left = {
        key: value
        for key, value in wanted.items()
        if key not in known and not (key in _HARMLESS and value == _HARMLESS[key])
    }
    left |= _of_the_base(task) | _unread_settings(task, wanted)
    if "max_length" in known and reads_otherwise_in_trl(str(data.get("form", "")), data.get("of_messages")):
        left["dataset_format"] = data["form"]
    lora = PeftConfig.from_pretrained(str(adapter_dir))
    lora.inference_mode = False  # as it is saved, PEFT would freeze the adapter
    return BestConfig(lora, training, left)


def training_arguments(task: Task, config: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a job that decide its training, in the spelling and with the meaning of TRL and transformers.

    Args:
        task: Of the job.
        config: Of the job, canonical keys.
        data: As the event ``task_started`` has it: the form of the rows, and where they are cut.
    """
    found = {key: value for key, value in config.items() if key not in _OF_THE_ADAPTER and value is not None}
    found["max_length"] = task.max_length or data.get("max_length") or _MAX_LENGTH
    found["max_grad_norm"] = config.get("max_grad_norm") or 0.0
    ratio = found.pop("warmup_ratio", 0.0)
    found["warmup_steps"] = found.get("warmup_steps") or ratio  # below 1 a share, in transformers too
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
    """Whether TRL cannot read rows of ``form``, or makes other tokens of them than ALTO.

    Args:
        form: Of the rows; empty where it is not known.
        of_messages: Whether their replies are lists of messages; None where it is not known.
    """
    if form in _TEMPLATED_FORMS:
        return of_messages is False
    return bool(form) and form not in _TRL_FORMS


def _of_the_base(task: Task) -> dict[str, Any]:
    """How the base model is loaded, where that is not in float32, as TRL's trainers load a model by its name."""
    found = {
        "dtype": task.dtype if task.dtype not in ("auto", "float32") else None,
        "load_in_4bit": task.load_in_4bit or None,
        "load_in_8bit": task.load_in_8bit or None,
        "adapter_dtype": task.adapter_dtype if task.adapter_dtype != "float32" else None,
        "optim_state_dtype": task.optim_state_dtype,
    }
    return {key: value for key, value in found.items() if value is not None}


def _unread_settings(task: Task, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that TRL's class has, and its trainer does not read: DPO smooths labels in other losses alone."""
    smoothing = wanted.get("label_smoothing")
    return {"label_smoothing": smoothing} if smoothing and "sigmoid" in wanted.get("loss_type", ()) else {}


def _trained_tokens(task: Task, data: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of TRL that train the tokens of ``train_on``; by default it trains all tokens of ``messages``."""
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
            f"{method!r}; the settings themselves are in result.jobs"
        )
    module, name = _CLASSES[method]
    try:
        found: type[TrainingArguments] = getattr(import_module(module), name)
    except ImportError as error:
        raise UnsupportedError(
            f"best_config: expected {module} with {name}, found that it cannot be imported ({error}); pip install trl"
        ) from None
    return found
