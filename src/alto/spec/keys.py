"""Names of keys: which spelling means which field, which are refused by name, what a misspelt one probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import Any

from alto.errors import ConflictingKeysError, UnknownKeyError, UnsupportedError

__all__ = ["JOB_ALIASES", "TASK_ALIASES", "UNSUPPORTED_KEYS", "canonical_keys"]

JOB_ALIASES: Mapping[str, str] = {
    "lr": "learning_rate",
    "batch_size": "per_device_train_batch_size",
    "micro_batch_size": "per_device_train_batch_size",
    "rank": "r",
    "lora_r": "r",
    "lora_rank": "r",
    "alpha": "lora_alpha",
    "dropout": "lora_dropout",
    "lora_target": "target_modules",
    "lora_target_modules": "target_modules",
    "epochs": "num_train_epochs",
    "num_epochs": "num_train_epochs",
    "lr_scheduler": "lr_scheduler_type",
    "gradient_clipping": "max_grad_norm",
}
"""Other spellings of a job's fields: the paper's, LLaMA-Factory's and Axolotl's."""

TASK_ALIASES: Mapping[str, str] = {
    "base_model": "model",
    "model_name_or_path": "model",
    "eval_dataset": "validation_dataset",
    "val_size": "validation_split",
    "val_set_size": "validation_split",
    "stage": "method",
    "cutoff_len": "max_length",
    "sequence_len": "max_length",
    "max_seq_length": "max_length",
    "torch_dtype": "dtype",
}
"""Other spellings of a task's own fields."""

_ONLY_PLAIN_LORA = "Only plain LoRA (y + alpha/r * x A B) is trained; remove the key."
_ONLY_ADAMW = "Every job is trained with AdamW; remove the key."
_NO_QUANTISATION = "The base model is loaded unquantised; remove the key and choose the precision with 'dtype'."
_USE_DTYPE = "Write 'dtype: bfloat16', 'float16' or 'float32' instead."

UNSUPPORTED_KEYS: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "alpha_pattern",
            "bias",
            "corda_config",
            "eva_config",
            "init_lora_weights",
            "layer_replication",
            "layers_pattern",
            "loftq_config",
            "lora_bias",
            "modules_to_save",
            "rank_pattern",
            "target_parameters",
            "trainable_token_indices",
            "use_dora",
            "use_qalora",
            "use_rslora",
        ),
        _ONLY_PLAIN_LORA,
    ),
    "exclude_modules": "Name the modules to train in 'target_modules' instead.",
    "layers_to_transform": "Adapters are trained in every layer; remove the key.",
    "optim": _ONLY_ADAMW,
    "optimizer": _ONLY_ADAMW,
    "beta": "It belongs to DPO, which is not there yet; remove the key.",
    "lr_scheduler_kwargs": "Schedules have no further settings; remove the key.",
    "gradient_accumulation_steps": (
        "'per_device_train_batch_size' is the whole batch of one step, however it is split; multiply the two."
    ),
    "load_in_4bit": _NO_QUANTISATION,
    "load_in_8bit": _NO_QUANTISATION,
    "quantization_config": _NO_QUANTISATION,
    "bf16": _USE_DTYPE,
    "fp16": _USE_DTYPE,
    "packing": "Sequences are always concatenated without padding and never attend to each other; remove the key.",
    "label_smoothing_factor": "The loss is plain cross-entropy; remove the key.",
    "neftune_noise_alpha": "No noise is added to embeddings; remove the key.",
}
"""Well-known keys this version refuses, with the remedy: a user who writes one is not misspelling another."""


def canonical_keys(
    given: Mapping[Any, Any], *, fields: Collection[str], aliases: Mapping[str, str], where: str
) -> dict[str, Any]:
    """Rename every key to its canonical spelling; order and values stay.

    Args:
        given: Keys as the user wrote them.
        fields: Canonical names allowed here.
        aliases: Other spellings; those of fields not allowed here are ignored.
        where: Where the keys stand, for the messages ("the task", "search_space", ...).

    Raises:
        UnknownKeyError: A key is neither a field nor an alias of one.
        ConflictingKeysError: Two spellings of one field.
        UnsupportedError: A key that is known from PEFT or a trainer, and that this version cannot honour.
    """
    spellings = {name: name for name in fields} | {a: name for a, name in aliases.items() if name in fields}
    written: dict[str, str] = {}
    for key in given:
        name = spellings.get(key) if isinstance(key, str) else None
        if name is None:
            raise _refusal(key, spellings, where)
        if name in written:
            raise ConflictingKeysError(
                f"{where} gives {name!r} twice: found both {written[name]!r} and {key!r}, expected one. Remove one."
            )
        written[name] = key
    return {name: given[key] for name, key in written.items()}


def _refusal(key: object, spellings: Mapping[str, str], where: str) -> UnknownKeyError | UnsupportedError:
    if not isinstance(key, str):
        return UnknownKeyError(
            f"{where} has the key {key!r} ({type(key).__name__}); expected text. Put the key in quotes if it is meant."
        )
    if key in UNSUPPORTED_KEYS:
        return UnsupportedError(f"{where} asks for {key!r}, which is not supported. {UNSUPPORTED_KEYS[key]}")
    near = difflib.get_close_matches(key.lower(), spellings, n=1, cutoff=0.6)
    remedy = f"Did you mean {near[0]!r}?" if near else f"Known keys are {', '.join(sorted(set(spellings.values())))}."
    return UnknownKeyError(f"{where} has the unknown key {key!r}. {remedy}")
