"""Names of keys: other spellings of fields, unsupported keys, and suggestions for misspelt keys.

Sources of other programs' keys: the dataclasses of transformers 5.23, TRL 1.16 and PEFT 0.21, and keys of their earlier
versions.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from alto.base import nearest_key, quoted
from alto.errors import ConflictingKeysError, SpecError, UnknownKeyError, UnsupportedError

_NOT_NEEDED: Mapping[str, tuple[str, ...]] = {
    "ALTO keeps the best and the last checkpoint of every job": (
        *("save_strategy", "save_steps", "save_total_limit", "save_only_model", "save_on_each_node"),
        *("load_best_model_at_end", "enable_jit_checkpoint", "save_safetensors"),
    ),
    "every run has its own folder": ("overwrite_output_dir",),
    "the best checkpoint is the one of the lowest validation loss, or the best by the task's 'metric'": (
        "metric_for_best_model",
        "greater_is_better",
    ),
    "every step and every evaluation is in the run's journal, and 'report_to' names trackers": (
        *("logging_strategy", "logging_steps", "logging_first_step", "logging_nan_inf_filter", "logging_dir"),
        *("log_level", "log_level_replica", "log_on_each_node", "disable_tqdm"),
        *("include_num_input_tokens_seen", "include_tokens_per_second"),
    ),
    "trackers take such settings from their own environment variables": (
        *("run_name", "project", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"),
    ),
    "every job is evaluated at equal shares of its own steps ('eval_steps: 0.05'), by the loss of its method": (
        *("eval_strategy", "evaluation_strategy", "eval_delay", "eval_on_start", "per_device_eval_batch_size"),
        *("eval_accumulation_steps", "eval_do_concat_batches", "eval_use_gather_object", "batch_eval_metrics"),
        *("prediction_loss_only", "include_for_metrics", "do_eval"),
        *("bf16_full_eval", "fp16_full_eval", "label_names"),
    ),
    "'alto tune' trains": ("do_train",),
    "'alto eval RUN' evaluates held-out rows": ("do_predict",),
    "the folder of runs is not a setting of a task ('alto tune' takes it as --output-dir)": ("output_dir",),
    "nothing is uploaded: the best adapter is in 'best' of the run's folder": (
        *("push_to_hub", "hub_model_id", "hub_strategy", "hub_token", "hub_private_repo", "hub_always_push"),
        "hub_revision",
    ),
    "'alto resume RUN' continues an interrupted run from its checkpoints": (
        *("resume_from_checkpoint", "ignore_data_skip", "restore_callback_states_from_checkpoint"),
    ),
    "ALTO starts its own processes, and 'num_gpus' shards the base model over several GPUs": (
        *("deepspeed", "fsdp", "fsdp_config", "local_rank", "parallelism_config", "accelerator_config", "use_cpu"),
        *("ddp_backend", "ddp_broadcast_buffers", "ddp_bucket_cap_mb", "ddp_find_unused_parameters"),
        *("ddp_static_graph", "ddp_timeout", "no_cuda", "ignore_bias_buffers"),
    ),
    "a job's loss is the mean over all trained tokens of its step, for any number of GPUs": (
        "average_tokens_across_devices",
    ),
    "all rows are tokenised once for all jobs, and batches are made of tokens in memory or on disk": (
        *("dataloader_num_workers", "dataloader_pin_memory", "dataloader_persistent_workers"),
        *("dataloader_prefetch_factor", "dataloader_multiprocessing_context", "dataloader_in_order"),
        *("dataset_num_proc", "length_column_name", "dataset_streaming", "streaming"),
    ),
    "columns without a role are not read": ("remove_unused_columns",),
    "rows are shuffled in every epoch": ("shuffle_dataset",),
    "sequences are concatenated without padding, and never attend to each other": (
        *("padding_free", "pad_to_multiple_of", "pad_token", "packing_strategy", "eval_packing"),
    ),
    "the memory is measured before training, and a step that does not fit is split": (
        *("auto_find_batch_size", "torch_empty_cache_steps", "skip_memory_metrics", "runtime_config"),
    ),
    "ALTO chooses its kernels and its attention by the device": (
        *("use_liger_kernel", "liger_kernel_config", "attn_implementation", "use_cache"),
        *("flash_attention", "flash_attn", "sdp_attention", "xformers_attention", "eager_attention", "flex_attention"),
        *("use_flash_attention_2", "use_flash_attn", "use_unsloth"),
    ),
    "how layers are recomputed and compiled is fixed; 'gradient_checkpointing' and 'torch_compile' switch it on": (
        *("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs"),
        *("torch_compile_backend", "torch_compile_mode"),
    ),
    "dropout of the base model is never applied, and 'lora_dropout' sets the adapter's": ("disable_dropout",),
    "the reference of a preference loss is the frozen base": ("ref_model_mixup_alpha", "ref_model_sync_steps"),
    "4 bits are NF4 with double quantisation": (*("use_bnb_nested_quant", "bnb_4bit_quant_storage"),),
    "every job trains a LoRA adapter": ("use_peft",),
}

NOT_NEEDED_KEYS: Mapping[str, str] = {key: reason for reason, keys in _NOT_NEEDED.items() for key in keys}
"""Keys without an effect on the trained adapter, with the reason why they are not needed."""

_ORDER = (
    "Every job shuffles its rows in every epoch, by its own 'seed', and keeps the last, smaller batch; remove the key."
)
_DETERMINISM = (
    "ALTO's own kernels are deterministic, other operations are torch's own; a run is repeated with 'alto tune "
    "--packing-from RUN'. Remove the key."
)

_OBJECTS = "Give it in 'config', a list of a peft.LoraConfig and the arguments of a trainer, or its settings as keys."
_METRICS = "Set 'metric', or score the answers of the best jobs with 'select_by'."
_OPTIMIZER = "Set 'optim', 'optim_args' and 'lr_scheduler_type'."

UNSUPPORTED_TRAINER_KEYS: Mapping[str, str] = {
    "args": _OBJECTS,
    "peft_config": _OBJECTS,
    "processing_class": "The tokenizer comes from 'model'. If the model is an object, give 'tokenizer' too.",
    "formatting_func": "Set 'columns' and 'dataset_format', or give rows that are formatted already.",
    "data_collator": "Rows are concatenated without padding; 'train_on' says which tokens are trained. Remove the key.",
    "compute_loss_func": "Write an objective of your own (docs/objectives.md), and name it in 'method'.",
    "compute_metrics": _METRICS,
    "preprocess_logits_for_metrics": _METRICS,
    "callbacks": "Give them to alto.Engine(observers=[...]); jobs are stopped early as 'early_exit' says.",
    "optimizers": _OPTIMIZER,
    "optimizer_cls_and_kwargs": _OPTIMIZER,
    "activation_offloading": "Use 'gradient_checkpointing: true' to save the memory of activations.",
    "assistant_only_loss": "Use 'train_on: all' to train every token; 'completion', the default, trains replies.",
    "bnb_4bit_quant_type": "4 bits are NF4 with double quantisation; remove the key.",
    "completion_only_loss": "Use 'train_on: all' to train every token; 'completion', the default, trains replies.",
    "dataloader_drop_last": _ORDER,
    "dataset_kwargs": "Rows are read as 'dataset_format' and 'columns' say; remove the key.",
    "dataset_text_field": "Name the column of texts with 'columns: {text: <its name>}'.",
    "debug": "ALTO has no such checks, but a loss that is not finite ends its job; remove the key.",
    "eos_token": "A turn ends as the model's tokenizer says; save a changed tokenizer, and give its folder in 'model'.",
    "full_determinism": _DETERMINISM,
    "group_by_length": _ORDER,
    "lora_task_type": "CAUSAL_LM is trained, and SEQ_CLS with method: classification; remove the key.",
    "model_init_kwargs": "Set 'dtype', 'load_in_4bit', 'load_in_8bit' and 'trust_remote_code' in the task.",
    "model_revision": "A hub model is loaded in its latest revision; download the revision and give its folder in "
    "'model'.",
    "optim_target_modules": "Only optimizers of whole layers use it, and they are not supported; remove the key.",
    "tf32": "Products in float32 keep torch's own precision; use 'dtype: bfloat16' for faster ones.",
    "train_sampling_strategy": _ORDER,
}
"""Keys and arguments of trainers that would change what is learned, with what to do instead."""

_ACCELERATOR = {
    "split_batches": False,
    "dispatch_batches": None,
    "even_batches": True,
    "use_seedable_sampler": True,
    "non_blocking": False,
    "gradient_accumulation_kwargs": None,
}
"""The default of ``accelerator_config``, as transformers writes it to files."""

TRAINER_OFF_VALUES: Mapping[str, tuple[Any, ...]] = {
    "optimizers": ((None, None), [None, None]),
    **dict.fromkeys(
        (
            *("batch_eval_metrics", "bf16_full_eval", "fp16_full_eval", "dataloader_drop_last"),
            *("dataloader_persistent_workers", "dataset_streaming", "streaming", "enable_jit_checkpoint"),
            *("eval_on_start", "eval_packing", "eval_use_gather_object", "full_determinism", "group_by_length"),
            *("hub_always_push", "ignore_bias_buffers", "ignore_data_skip", "logging_first_step", "no_cuda"),
            *("overwrite_output_dir", "prediction_loss_only", "push_to_hub"),
            *("restore_callback_states_from_checkpoint", "save_on_each_node", "save_only_model"),
            *("activation_offloading", "auto_find_batch_size", "use_cache", "use_cpu", "use_liger_kernel"),
            *("flash_attention", "sdp_attention", "xformers_attention", "eager_attention", "flex_attention"),
            *("use_flash_attention_2", "use_flash_attn", "use_unsloth"),
            *("disable_dropout", "include_tokens_per_second", "hub_private_repo", "tf32"),
        ),
        (False,),
    ),
    **dict.fromkeys(
        (
            *("average_tokens_across_devices", "dataloader_in_order"),
            *("eval_do_concat_batches", "log_on_each_node", "logging_nan_inf_filter", "remove_unused_columns"),
            *("save_safetensors", "skip_memory_metrics", "use_peft"),
        ),
        (True,),
    ),
    # ALTO always does what these keys switch on.
    **dict.fromkeys(
        (
            *("do_eval", "do_train", "load_best_model_at_end", "padding_free", "shuffle_dataset"),
            "use_bnb_nested_quant",
        ),
        (True, False),
    ),
    "dataloader_pin_memory": (True, False),
    **dict.fromkeys(("completion_only_loss", "assistant_only_loss"), (True,)),
    "accelerator_config": ({}, _ACCELERATOR),
    "bnb_4bit_quant_type": ("nf4",),
    "dataset_kwargs": ({},),
    "dataset_text_field": ("text",),
    "dataloader_num_workers": (0,),
    "ddp_timeout": (1800,),
    "debug": ("", [], False),
    "deepspeed": ("", False),
    "disable_tqdm": (False, True),
    "do_predict": (False,),
    # YAML 1.1 reads "no" without quotes as false.
    "eval_strategy": ("no", False),
    "evaluation_strategy": ("no", False),
    "eval_delay": (0,),
    "fsdp": ("", [], False),
    "fsdp_config": ({},),
    "greater_is_better": (False,),
    "hub_strategy": ("every_save",),
    # Placeholders that transformers writes for a token that is hidden or not set.
    "hub_token": ("<HUB_TOKEN>",),
    "eos_token": ("<EOS_TOKEN>",),
    "pad_token": ("<PAD_TOKEN>",),
    "include_for_metrics": ([],),
    "include_num_input_tokens_seen": ("no", False),
    "length_column_name": ("length",),
    "local_rank": (-1, 0),
    "log_level": ("passive",),
    "log_level_replica": ("warning",),
    "logging_steps": (10, 500),
    "logging_strategy": ("steps",),
    "lora_task_type": ("CAUSAL_LM",),
    "metric_for_best_model": ("loss", "eval_loss"),
    "model_init_kwargs": ({},),
    "model_revision": ("main",),
    "output_dir": ("trainer_output",),
    "packing_strategy": ("bfd",),
    "pad_to_multiple_of": ("auto",),
    "per_device_eval_batch_size": (8,),
    "project": ("huggingface",),
    "ref_model_mixup_alpha": (0.6,),
    "ref_model_sync_steps": (512,),
    "resume_from_checkpoint": (False,),
    "runtime_config": ({}, {"ephemeral_gpu_offload": False}),
    "save_steps": (500,),
    "save_strategy": ("steps", "no", False),
    "torch_empty_cache_steps": (0,),
    "train_sampling_strategy": ("random",),
}
"""Values of these keys, besides null, that need nothing from ALTO, because it works in this way anyway. Most are the
trainers' defaults."""

FIELD_DEFAULTS: Mapping[str, tuple[Any, ...]] = {
    "data_seed": (None,),
    "eval_steps": (None,),
    "gradient_checkpointing": (None,),
    "max_steps": (-1,),
}
"""Values, by field of a task, that mean the default: transformers' ``TrainingArguments`` treats them so, and therefore
ALTO too."""


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
_USE_DTYPE = "Use 'dtype: bfloat16', 'float16' or 'float32' instead."
_FROZEN_BASE = "The reference of dpo is the frozen base, or 'init_adapter', run once for all jobs; remove the key."
_WHOLE_DISTRIBUTION = (
    "It needs the probabilities of all tokens at every position, but only the trained token's is computed; "
    "remove the key."
)
_CUT_AT_THE_END = (
    "A conversation is cut after its first 'max_length' tokens, including the tokens of the prompt; remove the key."
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
        "Single rows of the embeddings are not trained; set modules_to_save: [embed_tokens] to train all of them, or "
        "remove the key."
    ),
    **dict.fromkeys(
        ("adapter", "finetuning_type", "peft_type"),
        "Every job trains a LoRA adapter (VeRA and the like do not exist here; DoRA is use_dora). Remove the key.",
    ),
    "base_model_name_or_path": "Name the base model in the task's 'model'.",
    "revision": "A hub model is loaded in its latest revision; download the revision and give its folder in 'model'.",
    "task_type": "CAUSAL_LM and SEQ_CLS (method: classification or regression) are trained; remove the key.",
    "label2id": "Use id2label, the names by index, instead.",
    "quantization_config": "Use 'load_in_4bit: true' or 'load_in_8bit: true' instead.",
    "quantization_bit": "Use 'load_in_4bit: true' or 'load_in_8bit: true' instead.",
    "bf16": _USE_DTYPE,
    "fp16": _USE_DTYPE,
    "output_router_logits": "Set 'router_aux_loss_coef', the weight of the loss that balances the load of experts.",
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
    "pref_ftx": "Set 'rpo_alpha', which adds the cross-entropy per token of all chosen replies of a batch.",
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
    """Put the user's own spelling of a field in front of its name in errors that the block raises."""
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
