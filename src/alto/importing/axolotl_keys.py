"""Axolotl's keys that tasks do not have, with the reasons."""

from __future__ import annotations

from collections.abc import Mapping

from alto.importing.draft import Answers

__all__ = ["ANSWERS", "PREFIXES"]

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
    "write it as init_adapter: every job begins with it, and dpo and kto compare with it": ("lora_model_dir",),
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
    "write the arguments of the chat template in a column chat_template_kwargs of the rows": ("chat_template_kwargs",),
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
    "write adapter_dtype: bfloat16 for adapters of that precision": ("peft_autocast_adapter_dtype",),
    "trackers are tensorboard, mlflow, wandb and trackio (report_to)": (
        *("use_comet", "use_trackio", "use_otel_metrics", "use_swanlab"),
    ),
}

ANSWERS = Answers(
    not_needed={key: why for why, keys in _NOT_NEEDED.items() for key in keys},
    not_supported={key: why for why, keys in _NOT_SUPPORTED.items() for key in keys},
    renamed={
        "num_epochs": "num_train_epochs",
        "lora_r": "r",
        "lora_modules_to_save": "modules_to_save",
        "lora_target_parameters": "target_parameters",
        "lora_rank_pattern": "rank_pattern",
        "lora_alpha_pattern": "alpha_pattern",
        "peft_use_rslora": "use_rslora",
        "peft_use_dora": "use_dora",
        "peft_init_lora_weights": "init_lora_weights",
        "dpo_beta": "beta",
        "orpo_alpha": "beta",
        "dpo_loss_type": "loss_type",
        "dpo_loss_weights": "loss_weights",
    },
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
