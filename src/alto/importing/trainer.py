"""Import of the keys that all tools share, because all of them use transformers' ``TrainingArguments``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from alto.base import quoted, strict_json
from alto.errors import SpecError
from alto.importing.draft import Draft, checked
from alto.spec import TRACKERS, Method, is_finite_number, is_template_text

TRACKERS_ARE = f"trackers are {', '.join(TRACKERS[:-1])} and {TRACKERS[-1]} (report_to)"
"""The reason for which keys of other trackers are not supported."""

_EVALUATED = "every job is evaluated at equal shares of its own steps ('eval_steps: 0.05')"

_SAME_OPTIMIZERS = {
    "adamw_hf": "adamw_torch",
    "adamw_apex_fused": "adamw_torch",
    "adamw_torch_npu_fused": "adamw_torch",
    "adamw_torch_xla": "adamw_torch",
    "adamw_bnb": "adamw_torch",
    "paged_adamw_32bit": "adamw_torch",
    "paged_adamw": "adamw_torch",
}
"""Optimizers that compute the same as another optimizer."""


def read_trainer_keys(draft: Draft) -> None:
    """Read the keys of ``TrainingArguments`` whose values have another meaning in a task."""
    _read_precision(draft)
    _read_schedule(draft)
    _read_trackers(draft)
    optim = draft.take("optim")
    if isinstance(optim, str) and optim in _SAME_OPTIMIZERS:
        draft.used("optim", f"optim: {_SAME_OPTIMIZERS[optim]}, which computes the same; its state is not paged")
        optim = _SAME_OPTIMIZERS[optim]
    draft.put("optim", optim)
    if draft.take("eval_steps") is not None:
        draft.not_needed("eval_steps", _EVALUATED)
    if draft.take("data_seed") is not None:
        draft.not_needed(
            "data_seed", "the order of a job's rows depends on its 'seed'; ALTO's data_seed is the seed of the split"
        )
    for key in ("activation_checkpointing", "gradient_checkpointing"):
        if draft.take(key) not in (None, False):
            draft.put("gradient_checkpointing", True)
    if draft.take("torch_compile") not in (None, False, "auto"):
        draft.put("torch_compile", True)


def local_model(draft: Draft, name: object) -> object:
    """Return the absolute path of the model's folder if ``name`` is a folder, else ``name`` unchanged."""
    found = draft.locate(name) if isinstance(name, str) else name
    return found if isinstance(found, str) and os.path.isdir(found) else name


def packed_rows(tool: str, num_rows: str = "several rows") -> str:
    """Return how packing of ``tool`` is replaced.

    Args:
        num_rows: The number of rows that the tool packs into one.
    """
    return (
        "rows that are concatenated without padding and stay separate; a packed row of "
        f"{tool} holds {num_rows}: raise per_device_train_batch_size to about that number"
    )


def report_own_template(draft: Draft, key: str, name: object, tool: str) -> None:
    """Report that ``key`` names one of the tool's own chat templates, which is not used."""
    draft.not_supported(
        key,
        f"{quoted(name)} is one of {tool}'s own templates: rows are written by the template of the model's "
        "tokenizer; to use a different template, set chat_template to its Jinja text",
    )


def read_template_file(draft: Draft, key: str) -> None:
    """Read a chat template from ``key``, which holds its text or the path of a file."""
    given = draft.take_text(key)
    if given is None:
        return
    found = given if is_template_text(given) else draft.locate(given)
    if is_template_text(found) or os.path.isfile(found):
        draft.put("chat_template", found)
    else:
        draft.not_supported(key, f"{quoted(given)} is not a template file; set chat_template to the Jinja text")


def set_defaults(draft: Draft, defaults: Mapping[str, Any]) -> None:
    """Set the tool's ``defaults`` for keys that the configuration leaves out; ALTO's defaults for them differ."""
    for key, value in defaults.items():
        draft.values.setdefault(key, value)


def validation_split(draft: Draft, key: str) -> None:
    """Read the fraction of validation rows from ``key``, which contains a fraction or a number of rows."""
    size = draft.take(key, 0)
    if draft.values.get("validation_dataset") is not None or "validation_split" in draft.replaced:
        return
    if not is_finite_number(size) or size < 0:
        raise SpecError(
            f"{key}: expected a share of the rows, below 1, or a number of rows, found {quoted(size)}. Correct it."
        )
    if 0 < size < 1:
        draft.put("validation_split", float(size))
    elif size == 0:
        draft.not_supported(
            key,
            "jobs cannot be compared without validation rows: those of the dataset are used, or a tenth of its rows; "
            "validation_split and validation_dataset choose others",
        )
    else:
        draft.not_supported(
            key,
            f"{quoted(size)} is a number of rows: a tenth of the rows is used; --set {key}=SHARE sets a different "
            "share",
        )


def compares_replies_as_tool(draft: Draft, method: Method, *, drops_out: bool = False) -> None:
    """Make a training step of a preference method equal to that of TRL's trainer, which all tools use.

    TRL's trainer averages the loss over micro-batches, and disables all dropout of the model, including the adapters'
    (``disable_dropout``).

    Args:
        method: The task's method; nothing changes unless it is a preference method.
        drops_out: Whether the configuration keeps dropout enabled.
    """
    if not method.compares_replies:
        return
    rows = draft.values.get("per_device_train_batch_size")
    parts = draft.values.get("gradient_accumulation_steps")
    if isinstance(rows, int) and isinstance(parts, int) and parts > 1:
        draft.values["per_device_train_batch_size"] = rows * parts
        draft.used(
            "gradient_accumulation_steps",
            f"per_device_train_batch_size: {rows * parts}, all rows of a step, over which its loss is averaged",
        )
        del draft.values["gradient_accumulation_steps"]
    if not drops_out and draft.values.get("lora_dropout"):
        draft.values["lora_dropout"] = 0.0
        draft.used("lora_dropout", "0.0: preference trainers switch off all dropout (TRL's disable_dropout)")


def _read_precision(draft: Draft) -> None:
    dtype = draft.take("dtype") or draft.take("torch_dtype")
    draft.given.pop("torch_dtype", None)
    names = {"bfloat16": ("bf16", "bfloat16", "pure_bf16"), "float16": ("fp16", "float16"), "float32": ("float32",)}
    given = {key: draft.take(key) for keys in names.values() for key in keys if key in draft.given}
    if dtype not in (None, "auto"):
        draft.put("dtype", dtype)
        return
    for name, keys in names.items():
        key = next((key for key in keys if given.get(key) is True), None)
        if key is not None:
            draft.put("dtype", name)
            draft.used(key, f"dtype: {name} of the frozen base; adapters and their optimizer stay in float32")
            return


def _read_schedule(draft: Draft) -> None:
    """Read steps, warmup and schedule; keys that transformers ignores in favour of another key are left out."""
    max_steps = draft.take("max_steps")
    if isinstance(max_steps, int) and max_steps > 0:
        draft.put("max_steps", max_steps)
    scheduler = draft.take_text("lr_scheduler_type")
    draft.put("lr_scheduler_type", scheduler)
    kwargs = draft.take("lr_scheduler_kwargs")
    if isinstance(kwargs, str):
        try:
            kwargs = strict_json(kwargs)
        except ValueError:
            raise SpecError(
                f"lr_scheduler_kwargs: expected a mapping, or its JSON text, found {quoted(kwargs)}. Correct it."
            ) from None
    draft.put("lr_scheduler_kwargs", kwargs or None)
    steps, ratio = draft.take("warmup_steps", 0), draft.take("warmup_ratio", 0)
    if (steps or ratio) and scheduler == "constant":
        draft.not_needed("warmup_steps" if steps else "warmup_ratio", "lr_scheduler_type 'constant' has no warmup")
    elif steps:
        draft.put("warmup_steps", steps)
        if ratio:
            draft.not_needed("warmup_ratio", "warmup_steps overrides it")
    elif ratio:
        draft.put("warmup_ratio", ratio)


def _read_trackers(draft: Draft) -> None:
    given = draft.take("report_to")
    names = [given] if isinstance(given, str) else checked(given or [], list, "report_to")
    if names in (["none"], ["all"]):
        draft.put("report_to", names[0])
        return
    known = [name for name in names if name in TRACKERS]
    draft.put("report_to", known or None)
    foreign = [str(name) for name in names if name not in TRACKERS]
    if foreign:
        draft.not_supported("report_to", f"{quoted(', '.join(foreign))}: {TRACKERS_ARE}")
