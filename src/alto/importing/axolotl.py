"""Axolotl configurations (``axolotl train``), read and written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from alto.base import quoted
from alto.errors import UnsupportedError
from alto.importing import trainer
from alto.importing.axolotl_data import read_datasets, written_dataset
from alto.importing.draft import Draft, checked
from alto.importing.keys import (
    CHECKPOINTING_KEY,
    OUTPUT_KEY,
    TRAINER_KEYS,
    WARMUP_KEYS,
    ExportedJob,
    Key,
    KeyTable,
    ToolFiles,
    same,
)
from alto.spec import ALL_LINEAR, find_method

PREFIXES = ("swanlab_", "comet_", "otel_", "gradio_", "trackio_")
"""Prefixes of keys for other trackers and for a chat in the browser, which have no effect alone."""

_NOT_NEEDED: Mapping[str, tuple[str, ...]] = {
    "transformers finds the classes of model and tokenizer by itself": (
        *("model_type", "type_of_model", "tokenizer_type", "tokenizer_use_fast", "tokenizer_legacy"),
        *("tokenizer_save_jinja_files", "is_falcon_derived_model", "is_llama_derived_model"),
        *("is_mistral_derived_model", "is_qwen_derived_model", "processor_type", "cls_model_config"),
    ),
    "ALTO keeps the best and the last checkpoint of every job": (
        "saves_per_epoch",
        "save_first_step",
        "auto_resume_from_checkpoints",
        "dynamic_checkpoint",
    ),
    "every job is evaluated at equal shares of its own steps ('eval_steps: 0.05')": (
        *("evals_per_epoch", "eval_batch_size", "eval_sample_packing", "eval_table_size", "eval_max_new_tokens"),
        *("do_causal_lm_eval", "eval_causal_lm_metrics", "do_bench_eval", "bench_dataset", "bench_split"),
        *("generate_samples", "num_generation_samples", "generation_max_new_tokens", "generation_do_sample"),
        *("generation_prompt_ratio", "generation_temperature", "generation_top_k", "generation_top_p"),
        "eval_sequence_len",
    ),
    "'early_exit' ends jobs by their validation losses": (
        *("early_stopping_patience", "loss_watchdog_threshold", "loss_watchdog_patience"),
    ),
    "rows are concatenated without padding, and never attend to each other": (
        *("pad_to_sequence_len", "sample_packing_group_size", "sample_packing_bin_size", "batch_flattening"),
        *("sample_packing_sequentially", "multipack_real_batches", "sample_packing_eff_est"),
        *("pretrain_multipack_buffer_size", "pretrain_multipack_attn", "pretraining_sample_concatenation"),
        *("streaming_multipack_buffer_size", "sample_packing_mp_start_method", "dpo_padding_free"),
    ),
    "rows are tokenised once for all jobs, and kept in ALTO's cache if they are large (token_cache)": (
        *("dataset_prepared_path", "dataset_processes", "dataset_keep_in_memory", "dataset_shard_num"),
        *("dataset_shard_idx", "push_dataset_to_hub", "hf_use_auth_token", "is_preprocess", "preprocess_iterable"),
        *("skip_prepare_dataset", "dataset_num_proc"),
    ),
    "ALTO chooses its kernels and its attention by the device": (
        *("flash_attention", "sdp_attention", "xformers_attention", "eager_attention", "flex_attention"),
        *("flex_attn_compile_kwargs", "flash_attn_cross_entropy", "flash_attn_rms_norm", "flash_attn_fuse_qkv"),
        *("flash_attn_fuse_mlp", "flash_optimum", "attn_implementation", "unsloth_cross_entropy_loss"),
        *("fused_attn_kernel", "use_scattermoe", "use_sonicmoe", "experts_implementation", "gptq_disable_exllama"),
        *("unsloth_lora_mlp", "unsloth_lora_qkv", "unsloth_lora_o", "unsloth_rms_norm", "unsloth_rope"),
        *("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "lora_embedding_kernel", "use_kernels"),
        *("liger_rope", "liger_rms_norm", "liger_glu_activation", "liger_layer_norm", "liger_cross_entropy"),
        *("liger_fused_linear_cross_entropy", "liger_swiglu", "cut_cross_entropy", "chunked_cross_entropy"),
        *("chunked_cross_entropy_num_chunks", "flash_attn_d512", "large_head_attention", "sage_attention"),
        *("sdpa_varlen", "tiled_mlp", "tiled_mlp_num_shards", "tiled_mlp_use_original_mlp", "liger_rms_norm_gated"),
        *("dpo_use_liger_kernel", "gemma4_hybrid_attn_impl", "deepcompile", "torch_compile_options"),
    ),
    "how a layer stores its weight is read from the model": ("lora_fan_in_fan_out",),
    "ALTO chooses how a model is loaded": ("strict", "experimental_skip_move_to_device", "low_cpu_mem_usage"),
    "only the kind of training or the plugin to which the key belongs reads it": (
        *("eaft_alpha", "eaft_k", "dion_lr", "dion_momentum", "dion_rank_fraction", "dion_rank_multiple_of"),
        *("scaling_softmax_factor", "scaling_softmax_bias", "center_rewards_coefficient", "vllm"),
    ),
    "ALTO trains text models": (
        *("image_size", "image_resize_algorithm", "freeze_mm_modules", "processor_kwargs", "role_boundaries"),
    ),
    "ALTO starts its own processes, and 'num_gpus' shards the base model over several GPUs": (
        *("device", "device_map", "world_size", "ddp", "fsdp_version", "fsdp_final_state_dict_type", "max_memory"),
        *("gpu_memory_limit", "lora_on_cpu", "qlora_sharded_model_loading", "use_ray", "expert_parallel_size"),
        *("ray_num_workers", "ray_run_name", "resources_per_worker", "sequence_parallel_degree", "heads_k_stride"),
        *("ring_attn_func", "tensor_parallel_size", "context_parallel_size", "dp_shard_size", "dp_replicate_size"),
        *("gc_steps", "gc_collect_steps", "amp_level", "layer_offloading", "selective_checkpointing"),
    ),
    "trackers take such settings from their own environment variables": (
        *("wandb_entity", "wandb_name", "wandb_watch", "wandb_log_model", "wandb_run_id", "mlflow_tracking_uri"),
        *("mlflow_experiment_name", "mlflow_run_name", "hf_mlflow_log_artifacts", "profiler_steps"),
        *("profiler_steps_start", "include_tkps"),
    ),
    "'alto tune' trains, and nothing is merged": (
        "merge_lora",
        "merge_method",
        "inference",
        "axolotl_config_path",
    ),
    "rows are shuffled in every epoch": ("shuffle_merged_datasets", "shuffle_before_merging_datasets"),
    "with loraplus_lr_ratio no adapter is on the embeddings": ("loraplus_lr_embedding",),
    "the base keeps one precision, and 'modules_to_save' are trained in float32": ("embeddings_skip_upcast",),
    "the chat template writes the ends of turns": ("eot_tokens",),
}

_NOT_SUPPORTED: Mapping[str, tuple[str, ...]] = {
    "set it as init_adapter: every job begins with it, and dpo and kto compare with it": ("lora_model_dir",),
    "the tokenizer is not changed: save a model and a tokenizer with the tokens, and name that folder in 'model'": (
        *("tokens", "added_tokens_overrides", "resize_token_embeddings_to_32x", "mean_resizing_embeddings"),
        *("shrink_embeddings", "tokenizer_config", "fix_untrained_tokens", "tokenizer_use_mistral_common"),
    ),
    "write it into the model's config.json, and give the folder in 'model'": (
        *(
            "base_model_config",
            "overrides_of_model_config",
            "model_config",
            "rope_scaling",
            "overrides_of_model_kwargs",
        ),
        "model_kwargs",
    ),
    "a hub model is loaded in its latest revision: download the revision, and give its folder in 'model'": (
        "revision_of_model",
    ),
    "put the message into the rows, as a column system or a first message": ("default_system_message",),
    "put the arguments of the chat template into a column chat_template_kwargs of the rows": ("chat_template_kwargs",),
    "the loss of method sft is the cross-entropy": ("use_eaft", "scaling_softmax"),
    "the base keeps one precision": ("fp32_norms", "fp32_norm_classes"),
    "the weights of the base model are not changed": ("reinit_weights",),
    "every job shuffles its rows in every epoch, by its own 'seed'": ("curriculum_sampling",),
    "all adapter matrices have one learning rate; loraplus_lr_ratio sets a different one for B": (
        *("lr_groups", "embedding_lr", "embedding_lr_scale"),
    ),
    "ALTO has the schedules of transformers": (
        *("cosine_constant_lr_ratio", "lr_quadratic_warmup", "lr_div_factor", "jagged_restart_steps"),
        *("jagged_restart_warmup_steps", "jagged_restart_anneal_steps"),
    ),
    "the key applies to optimizers that ALTO does not have": ("adam_epsilon2", "adam_beta3", "torchdistx_path"),
    "only adapters of LoRA and DoRA, biases and classification heads are trained": (
        *("unfrozen_parameters", "relora", "relora_steps", "relora_warmup_steps", "relora_prune_ratio"),
        *("relora_prune_method", "relora_cpu_offload", "relora_anneal_steps", "lisa_n_layers", "lisa_step_interval"),
        *("peft_layer_replication", "peft_trainable_token_indices", "peft_ensure_weight_tying", "peft", "qat"),
    ),
    "models are quantised by bitsandbytes (NF4 or 8 bits), or loaded as stored on disk": (
        *("gptq", "bnb_config_kwargs", "quantization", "model_quantization_config", "fp8", "quantize_moe_experts"),
        *("model_quantization_config_kwargs", "llama4_linearized_experts"),
    ),
    "the attention and the positions of the model are not changed": (
        *("s2_attention", "use_pose", "pose_split_on_token_ids", "pose_max_context_len", "pose_num_chunks"),
    ),
    "all rows are trained; remove rows that are too short and duplicates from the file": (
        *("min_sample_len", "dataset_exact_deduplication"),
    ),
    "a conversation is cut after its first max_length tokens, which include the prompt": ("max_prompt_len",),
    "jobs are trained with the losses of ALTO's methods": (
        *("trl", "trainer_cls", "dpo_norm_loss", "dpo_use_logits_to_keep", "dpo_generate_during_eval", "ebft"),
    ),
    "set adapter_dtype: bfloat16 for adapters of that precision": ("peft_autocast_adapter_dtype",),
    trainer.TRACKERS_ARE: ("use_comet", "use_trackio", "use_otel_metrics", "use_swanlab"),
}

_METHODS = {None: "sft", "dpo": "dpo", "ipo": "dpo", "orpo": "orpo", "kto": "kto", "simpo": "cpo"}
"""ALTO's method for each value of Axolotl's key ``rl``; None if the key is absent."""


def _kind(job: ExportedJob) -> str | None:
    if job.task.method == "dpo" and job.config.objective.model_dump()["loss_type"] == "ipo":
        return "ipo"
    return next(kind for kind, method in _METHODS.items() if method == job.task.method)


def _is_linear(job: ExportedJob) -> bool:
    return job.config.target_modules == ALL_LINEAR


_AXOLOTL_NAMES = {
    "per_device_train_batch_size": Key("per_device_train_batch_size", "micro_batch_size", by_code=True),
    "num_train_epochs": Key("num_train_epochs", "num_epochs"),
    "lr_scheduler_type": Key("lr_scheduler_type", "lr_scheduler"),
    "optim": Key("optim", "optimizer"),
    "neftune_noise_alpha": Key("neftune_noise_alpha", "neftune_noise_alpha", also=("noisy_embedding_alpha",)),
}
"""Keys of ``TrainingArguments`` that have names of their own."""

KEYS = KeyTable(
    keys=(
        Key("model", "base_model", lambda job: job.model),
        *same("trust_remote_code"),
        Key("", "adapter", lambda job: "qlora" if job.task.load_in_4bit else "lora"),
        *same("load_in_4bit", "load_in_8bit"),
        Key("method", "rl", _kind),
        Key("beta", "rl_beta", also=("dpo_beta", "orpo_alpha")),
        Key("loss_type", None, also=("dpo_loss_type",)),
        Key("loss_weights", None, also=("dpo_loss_weights",)),
        Key("label_smoothing", "dpo_label_smoothing", methods=("dpo",), by_code=True),
        Key("desirable_weight", "kto_desirable_weight"),
        Key("undesirable_weight", "kto_undesirable_weight"),
        *same("cpo_alpha", "simpo_gamma"),
        Key("r", "lora_r"),
        *same("lora_alpha", "lora_dropout"),
        Key("target_modules", "lora_target_linear", lambda job: _is_linear(job) or None),
        Key(
            "target_modules",
            "lora_target_modules",
            lambda job: None if _is_linear(job) else job.setting("target_modules"),
        ),
        Key("target_parameters", "lora_target_parameters"),
        Key("modules_to_save", "lora_modules_to_save"),
        Key("rank_pattern", None, also=("lora_rank_pattern",)),
        Key("alpha_pattern", None, also=("lora_alpha_pattern",)),
        Key("exclude_modules", "lora_exclude_modules"),
        Key("layers_to_transform", "peft_layers_to_transform"),
        Key("layers_pattern", "peft_layers_pattern"),
        Key("use_rslora", "peft_use_rslora"),
        Key("use_dora", "peft_use_dora"),
        Key("init_lora_weights", "peft_init_lora_weights"),
        *same("loraplus_lr_ratio"),
        Key("dataset", "datasets", lambda job: [written_dataset(job)]),
        Key("chat_template", "chat_template", lambda job: "jinja" if job.task.chat_template else None),
        Key("chat_template", "chat_template_jinja", lambda job: job.task.base_model.chat_template),
        Key(
            "train_on",
            "train_on_inputs",
            lambda job: job.task.train_on == "all",
            methods=("sft",),
        ),
        Key("validation_split", "val_set_size", by_code=True),
        Key("max_length", "sequence_len", by_code=True),
        Key("", "excess_length_strategy", lambda job: "truncate"),
        Key("", "sample_packing", lambda job: False),
        *(_AXOLOTL_NAMES.get(key.ours, key) for key in TRAINER_KEYS),
        *WARMUP_KEYS,
        Key("dtype", "bf16", lambda job: job.task.dtype == "bfloat16"),
        Key("dtype", "fp16", lambda job: job.task.dtype == "float16" or None),
        CHECKPOINTING_KEY,
        OUTPUT_KEY,
    ),
    unneeded=_NOT_NEEDED,
    unsupported=_NOT_SUPPORTED,
    off={
        "dataset_processes": (0,),
        "generation_do_sample": (True,),
        "tiled_mlp_use_original_mlp": (True,),
        "shuffle_merged_datasets": (True,),
        "peft_autocast_adapter_dtype": (True,),
        "max_prompt_len": (512,),
    },
    never_off=("shuffle_merged_datasets", "peft_autocast_adapter_dtype"),
)
"""Handling of the keys in Axolotl's schema (0.8 to 0.13)."""


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

_ADAPTERS = ("lora", "qlora")

_DEFAULTS = {
    "max_length": 512,
    "per_device_train_batch_size": 1,
    "num_train_epochs": 1,
    "lr_scheduler_type": "cosine",
}
_WARMUP = 0.03

_RENAMED_FIRST = ("optimizer", "lr_scheduler")
"""Keys that are read like those of all tools."""

_KERNEL_PLUGINS = ("liger", "cut_cross_entropy", "kernels")
"""Substrings in the names of plugins that replace kernels without changing results."""


def read_axolotl(draft: Draft, method_name: str | None) -> None:
    """Convert a configuration of Axolotl to a task."""
    _check_adapter(draft)
    if method_name is not None and draft.take("rl") is not None:
        draft.not_needed("rl", "'--set method' names the method")
    method = find_method(method_name or _read_method(draft))
    if method.compares_replies:
        _read_beta(draft)
    draft.put("method", method.name)
    draft.put("model", trainer.local_model(draft, draft.take("base_model")))
    read_datasets(draft, method)
    trainer.validation_split(draft, "val_set_size")
    _read_template(draft)
    names = KEYS.names(method)
    for key in _RENAMED_FIRST:
        draft.rename(key, names[key])
    _read_schedule(draft)
    trainer.read_trainer_keys(draft)
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
    draft.pass_on(KEYS, method)
    trainer.set_defaults(draft, _DEFAULTS)
    trainer.compares_replies_as_tool(draft, method)


def _check_adapter(draft: Draft) -> None:
    adapter = draft.take("adapter")
    if adapter not in _ADAPTERS:
        found = "none" if adapter is None else quoted(adapter)
        raise UnsupportedError(
            f"adapter: expected {' or '.join(_ADAPTERS)}, found {found}: ALTO trains LoRA adapters. Set adapter: lora."
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
            f"rl: ALTO does not support {quoted(kind)}; supported values: {', '.join(filter(None, _METHODS))}. Import "
            "a configuration with one of these."
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
    trainer.read_template_file(draft, "chat_template_jinja")
    if "chat_template" not in draft.values and name not in ("tokenizer_default", "jinja"):
        trainer.report_own_template(draft, "chat_template", name, "Axolotl")


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
        draft.used("sample_packing", trainer.packed_rows("Axolotl", "as many rows as fit into sequence_len"))


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


def axolotl_files(job: ExportedJob) -> ToolFiles | None:
    """Return the configuration of ``axolotl train``; None for methods, or forms of CPO's loss, that Axolotl does not
    have."""
    method = job.task.method
    if method not in _METHODS.values() or (method == "cpo" and job.setting("loss_type") != "simpo"):
        return None
    return ToolFiles(keys=KEYS.written(job), command=("axolotl", "train"))
