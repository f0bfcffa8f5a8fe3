"""Names of keys: other spellings of fields, unsupported keys, and suggestions for misspelt keys."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from alto.base import nearest_key, quoted
from alto.errors import ConflictingKeysError, SpecError, UnknownKeyError, UnsupportedError
from alto.spec.trainer_keys import (
    FIELD_DEFAULTS,
    NOT_NEEDED_KEYS,
    TRAINER_OFF_VALUES,
    UNSUPPORTED_TRAINER_KEYS,
)

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
    "lora_target_parameters": "target_parameters",
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
    "moe_aux_loss_coef": "router_aux_loss_coef",
}
"""Other spellings of the fields that every job has, from the paper, LLaMA-Factory and Axolotl."""

TASK_ALIASES: Mapping[str, str] = {
    "base_model": "model",
    "model_name_or_path": "model",
    "dataset_name": "dataset",
    "dataset_config_name": "dataset_config",
    "train_dataset": "dataset",
    "eval_dataset": "validation_dataset",
    "val_size": "validation_split",
    "val_set_size": "validation_split",
    "stage": "method",
    "rl": "method",
    "cutoff_len": "max_length",
    "sequence_len": "max_length",
    "max_seq_length": "max_length",
    "torch_dtype": "dtype",
    "activation_checkpointing": "gradient_checkpointing",
    "chat_template_path": "chat_template",
}
"""Other spellings of a task's own fields."""

_ONLY_PLAIN_LORA = "Only the usual forms of LoRA and DoRA are trained; remove the key."
_USE_DTYPE = "Write 'dtype: bfloat16', 'float16' or 'float32' instead."
_FROZEN_BASE = "The reference of dpo is the frozen base, or 'init_adapter', run once for all jobs; remove the key."
_WHOLE_DISTRIBUTION = (
    "It needs the probabilities of all tokens at every position, but only that of the trained token is computed; "
    "remove the key."
)
_CUT_AT_THE_END = (
    "A conversation is cut after its first 'max_length' tokens, including those of the prompt; remove the key."
)

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
    "ensure_weight_tying": "The output head and the embeddings are trained separately, as by default in PEFT; remove "
    "the key.",
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
    "output_router_logits": "Write 'router_aux_loss_coef', the weight of the loss that balances the load of experts.",
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
    **UNSUPPORTED_TRAINER_KEYS,
}
"""Well-known keys that this version does not support, with the remedy; they are not reported as misspelt."""

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
    **TRAINER_OFF_VALUES,
}
"""Values, besides null, that switch off a key of :data:`UNSUPPORTED_KEYS` or :data:`NOT_NEEDED_KEYS`, such as PEFT's
own default."""

_NOTES = frozenset({"auto_mapping", "inference_mode", "megatron_core", "peft_version", "qalora_group_size"})
"""Other keys that PEFT writes into every configuration; on their own they have no effect."""

_MAX_REFUSED = 20
"""Maximum number of keys that one error lists."""


def canonical_keys(
    given: Mapping[Any, Any],
    *,
    fields: Collection[str],
    aliases: Mapping[str, str],
    where: str,
    elsewhere: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Rename every key to its canonical spelling; order and values stay.

    A known key of another program is dropped if its value switches it off or is a default without effect, so that a
    pasted configuration works. One error lists all refused keys, one per line.

    Args:
        given: Keys as the user wrote them.
        fields: Canonical names allowed here.
        aliases: Other spellings; those of fields not allowed here are ignored.
        where: Place of the keys, for messages ("the task", "search_space", ...).
        elsewhere: Keys that belong under another key, with the name of that key.

    Raises:
        UnknownKeyError: A key is neither a field nor an alias of one.
        ConflictingKeysError: Two spellings of one field are given.
        UnsupportedError: All refused keys are keys of PEFT or of a trainer that are not supported or not needed.
    """
    spellings = {name: name for name in fields} | {a: name for a, name in aliases.items() if name in fields}
    kept = {key: value for key, value in given.items() if not _asks_for_nothing(key, value, spellings)}
    refused = [key for key in kept if not (isinstance(key, str) and key in spellings)]
    if refused:
        raise _refusal(refused, spellings, where, elsewhere or {})
    written: dict[str, str] = {}
    for key in kept:
        name = spellings[key]
        if name in written:
            raise ConflictingKeysError(
                f"{where} gives {name!r} twice: found both {written[name]!r} and {key!r}, expected one. Remove one."
            )
        written[name] = key
    return {name: kept[key] for name, key in written.items()}


@contextlib.contextmanager
def spelt_as(written: Collection[str], aliases: Mapping[str, str]) -> Iterator[None]:
    """Put the user's own spelling of a field in front of its name in errors that the block raises.

    Args:
        written: Keys as the user wrote them.
        aliases: Other spellings of fields.

    Raises:
        SpecError: The block raises one; its lines that begin with such a field are changed.
    """
    spelt = {aliases[key]: key for key in written if key in aliases}

    def renamed(line: str) -> str:
        found = re.match(r"(\w+)(?: \(|\b)", line)
        if found is None or found[1] not in spelt:
            return line
        is_explained = found[0].endswith("(")
        return f"{spelt[found[1]]} ({found[1]}{', ' if is_explained else ')'}{line[found.end() :]}"

    try:
        yield
    except SpecError as error:
        raise type(error)("\n".join(map(renamed, str(error).split("\n")))) from None


def asks_for_nothing(key: str, value: object) -> bool:
    """Return whether ``key``, a key of another program that tasks do not have, has no effect with ``value``."""
    if key in UNSUPPORTED_KEYS or key in NOT_NEEDED_KEYS:
        return value is None or value in OFF_VALUES.get(key, ())
    return key in _NOTES


def _asks_for_nothing(key: object, value: object, spellings: Mapping[str, str]) -> bool:
    if not isinstance(key, str):
        return False
    if key in spellings:
        defaults = FIELD_DEFAULTS.get(spellings[key], ())
        return any(value is default or (value == default and not isinstance(value, bool)) for default in defaults)
    return asks_for_nothing(key, value)


def _refusal(
    keys: Sequence[Any], spellings: Mapping[str, str], where: str, elsewhere: Mapping[str, str]
) -> UnknownKeyError | UnsupportedError:
    """Return one error for all ``keys``: `UnsupportedError` if each is unsupported or not needed, else unknown."""
    answers = {key: _answer(key, elsewhere) for key in keys}
    listed = keys[:_MAX_REFUSED]
    near = {key: nearest_key(key, spellings) for key in listed if isinstance(key, str) and answers[key] is None}
    lines = [f"{where} has {answers[key] or _unknown(key, near.get(key))}" for key in listed]
    if len(keys) > _MAX_REFUSED:
        lines.append(f"{where} has {len(keys) - _MAX_REFUSED} further keys that are unknown or not supported.")
    if None in near.values():
        known = f"Known keys are {', '.join(sorted(set(spellings.values())))}."
        lines = [f"{lines[0]} {known}"] if len(lines) == 1 else [*lines, known]
    are_answered = all(answer is not None and key not in elsewhere for key, answer in answers.items())
    return (UnsupportedError if are_answered else UnknownKeyError)("\n".join(lines))


def _answer(key: object, elsewhere: Mapping[str, str]) -> str | None:
    """Return why a known key is refused and what to do about it; None for an unknown key."""
    if not isinstance(key, str):
        return None
    if key in elsewhere:
        return f"the key {key!r}, which is expected under {elsewhere[key]!r}. Move it there."
    if key in UNSUPPORTED_KEYS:
        return f"the key {key!r}, which is not supported. {UNSUPPORTED_KEYS[key]}"
    if key in NOT_NEEDED_KEYS:
        return f"the key {key!r}, which is not needed: {NOT_NEEDED_KEYS[key]}. Remove the key."
    return None


def _unknown(key: object, near: str | None) -> str:
    if not isinstance(key, str):
        kind = type(key).__name__
        return f"the key {quoted(key)} ({kind}); expected text. Put the key in quotes if it is meant."
    # A letter of another alphabet may look like the right letter, so it is shown as an escape too.
    shown = quoted(key) if quoted(key).isascii() else f"{quoted(key)} ({ascii(quoted(key))[1:-1]})"
    return f"the unknown key {shown}." + (f" Did you mean {near!r}?" if near is not None else "")
