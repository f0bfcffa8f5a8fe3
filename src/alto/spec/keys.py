"""Names of keys: spellings of fields, unsupported keys, and suggestions for misspelt ones."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import Any

from alto.errors import ConflictingKeysError, UnknownKeyError, UnsupportedError
from alto.spec.quoting import quoted

__all__ = ["JOB_ALIASES", "OFF_VALUES", "TASK_ALIASES", "UNSUPPORTED_KEYS", "canonical_keys"]

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
    "additional_target": "modules_to_save",
    "lora_modules_to_save": "modules_to_save",
    "peft_use_rslora": "use_rslora",
    "peft_use_dora": "use_dora",
    "peft_init_lora_weights": "init_lora_weights",
    "epochs": "num_train_epochs",
    "num_epochs": "num_train_epochs",
    "lr_scheduler": "lr_scheduler_type",
    "gradient_clipping": "max_grad_norm",
    "optimizer": "optim",
}
"""Other spellings of the fields that every job has: the paper's, LLaMA-Factory's and Axolotl's."""

TASK_ALIASES: Mapping[str, str] = {
    "base_model": "model",
    "model_name_or_path": "model",
    "dataset_name": "dataset",
    "dataset_config_name": "dataset_config",
    "eval_dataset": "validation_dataset",
    "val_size": "validation_split",
    "val_set_size": "validation_split",
    "stage": "method",
    "rl": "method",
    "cutoff_len": "max_length",
    "sequence_len": "max_length",
    "max_seq_length": "max_length",
    "torch_dtype": "dtype",
}
"""Other spellings of a task's own fields."""

_ONLY_PLAIN_LORA = "LoRA and DoRA are trained in their usual forms alone; remove the key."
_USE_DTYPE = "Write 'dtype: bfloat16', 'float16' or 'float32' instead."
_FROZEN_BASE = "The reference of dpo is the frozen base, run once for all jobs; remove the key."
_WHOLE_DISTRIBUTION = (
    "It needs the probabilities of all tokens at every position, and only that of the trained token is computed; "
    "remove the key."
)
_CUT_AT_THE_END = "A conversation is cut after its first 'max_length' tokens, the prompt's included; remove the key."

UNSUPPORTED_KEYS: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "alora_invocation_tokens",
            "arrow_config",
            "corda_config",
            "eva_config",
            "fan_in_fan_out",
            "kasa_config",
            "layer_replication",
            "loftq_config",
            "lora_bias",
            "lora_ga_config",
            "megatron_config",
            "monteclora_config",
            "pissa_init",
            "use_bdlora",
            "use_qalora",
            "velora_config",
        ),
        _ONLY_PLAIN_LORA,
    ),
    "ensure_weight_tying": "The output head and the embeddings are trained apart, PEFT's default; remove the key.",
    "trainable_token_indices": (
        "Single rows of the embeddings are not trained; write modules_to_save: [embed_tokens] to train all of them, or "
        "remove the key."
    ),
    **dict.fromkeys(
        ("adapter", "finetuning_type", "peft_type"),
        "Every job trains a LoRA adapter (VeRA and the like do not exist here; DoRA is use_dora). Remove the key.",
    ),
    "base_model_name_or_path": "Name the base model in the task's 'model'.",
    "revision": "A hub model is loaded in its latest revision; download the revision and give its folder in 'model'.",
    "task_type": "CAUSAL_LM and SEQ_CLS (method: classification or regression) are trained; remove the key.",
    "label2id": "Write id2label, the names by index, instead.",
    "quantization_config": "Write 'load_in_4bit: true' or 'load_in_8bit: true' instead.",
    "quantization_bit": "Write 'load_in_4bit: true' or 'load_in_8bit: true' instead.",
    "bf16": _USE_DTYPE,
    "fp16": _USE_DTYPE,
    "packing": "Sequences are always concatenated without padding and never attend to each other; remove the key.",
    "label_smoothing_factor": "Cross-entropy is not smoothed; dpo has 'label_smoothing'. Remove the key.",
    **dict.fromkeys(
        (
            "precompute_ref_batch_size",
            "precompute_ref_log_probs",
            "ref_model",
            "ref_model_init_kwargs",
            "reference_free",
            "sync_ref_model",
        ),
        _FROZEN_BASE,
    ),
    **dict.fromkeys(("dpo_use_weighting", "use_weighting"), _WHOLE_DISTRIBUTION),
    "pref_ftx": "Write 'rpo_alpha', which adds the cross-entropy per token of all chosen replies of a batch.",
    **dict.fromkeys(("max_completion_length", "max_prompt_length", "truncation_mode"), _CUT_AT_THE_END),
}
"""Well-known keys that this version does not support, with the remedy; they are not treated as misspelt keys."""

OFF_VALUES: Mapping[str, tuple[Any, ...]] = {
    "adapter": ("lora",),
    "bf16": (False,),
    "finetuning_type": ("lora",),
    "fp16": (False,),
    "label_smoothing_factor": (0,),
    "packing": (False,),
    "peft_type": ("LORA",),
    "precompute_ref_log_probs": (False, True),
    "pref_ftx": (0,),
    "task_type": ("CAUSAL_LM",),
    "truncation_mode": ("keep_start",),
    "loftq_config": ({},),
    **dict.fromkeys(
        (
            "ensure_weight_tying",
            "fan_in_fan_out",
            "lora_bias",
            "dpo_use_weighting",
            "pissa_init",
            "reference_free",
            "sync_ref_model",
            "use_qalora",
            "use_weighting",
        ),
        (False,),
    ),
}
"""Values, besides null, with which a key of :data:`UNSUPPORTED_KEYS` has no effect, such as PEFT's own default."""

_NOTES = frozenset({"auto_mapping", "inference_mode", "megatron_core", "peft_version", "qalora_group_size"})
"""Other keys that PEFT writes into every configuration; alone they have no effect."""


def canonical_keys(
    given: Mapping[Any, Any], *, fields: Collection[str], aliases: Mapping[str, str], where: str
) -> dict[str, Any]:
    """Rename every key to its canonical spelling; order and values stay.

    A known, unsupported key that is switched off is left out, so that a pasted configuration works.

    Args:
        given: Keys as the user wrote them.
        fields: Canonical names allowed here.
        aliases: Other spellings; those of fields not allowed here are ignored.
        where: Place of the keys, for messages ("the task", "search_space", ...).

    Raises:
        UnknownKeyError: A key is neither a field nor an alias of one.
        ConflictingKeysError: Two spellings of one field.
        UnsupportedError: A key of PEFT or of a trainer that this version does not support.
    """
    given = {key: value for key, value in given.items() if key in fields or not _asks_for_nothing(key, value)}
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


def _asks_for_nothing(key: object, value: object) -> bool:
    if key in UNSUPPORTED_KEYS:
        return value is None or value in OFF_VALUES.get(str(key), ())
    return key in _NOTES


def _refusal(key: object, spellings: Mapping[str, str], where: str) -> UnknownKeyError | UnsupportedError:
    if not isinstance(key, str):
        return UnknownKeyError(
            f"{where} has the key {quoted(key)} ({type(key).__name__}); expected text. Put the key in quotes if it is "
            f"meant."
        )
    if key in UNSUPPORTED_KEYS:
        return UnsupportedError(f"{where} has the key {key!r}, which is not supported. {UNSUPPORTED_KEYS[key]}")
    near = difflib.get_close_matches(key.lower(), spellings, n=1, cutoff=0.6)
    remedy = f"Did you mean {near[0]!r}?" if near else f"Known keys are {', '.join(sorted(set(spellings.values())))}."
    # A letter of another alphabet may look like the right one.
    written = quoted(key) if quoted(key).isascii() else f"{quoted(key)} ({ascii(quoted(key))[1:-1]})"
    return UnknownKeyError(f"{where} has the unknown key {written}. {remedy}")
