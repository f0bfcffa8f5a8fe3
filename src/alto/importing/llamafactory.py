"""LLaMA-Factory configurations (``llamafactory-cli train``), read and written."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from alto.base import quoted
from alto.errors import SpecError, UnsupportedError
from alto.importing import trainer
from alto.importing.draft import Draft
from alto.importing.keys import OUTPUT_KEY, TRAINER_KEYS, WARMUP_KEYS, ExportedJob, Key, KeyTable, ToolFiles, same
from alto.importing.llamafactory_data import INFO, read_datasets, written_dataset
from alto.spec import ALL_LINEAR, find_method

MARKS = frozenset(
    {
        *("stage", "finetuning_type", "lora_rank", "lora_target", "cutoff_len", "template", "dataset_dir", "val_size"),
        *("pref_beta", "pref_loss", "pref_ftx", "preprocessing_num_workers", "plot_loss", "overwrite_cache"),
        *("quantization_bit", "additional_target", "adapter_name_or_path", "mask_history", "train_on_prompt"),
        *("flash_attn", "neat_packing", "upcast_layernorm", "use_unsloth", "interleave_probs", "mix_strategy"),
        "dataset",
    }
)
"""Keys that identify a configuration of LLaMA-Factory."""

_PREFIXES = (
    *("freeze_", "oft_", "galore_", "apollo_", "badam_", "ppo_", "swanlab_", "export_", "image_", "video_", "audio_"),
    *("kt_", "vllm_", "sglang_", "profiler_", "asft_", "eaft_", "hyper_parallel_"),
)
"""Prefixes of keys that have no effect alone: other kinds of training, other trackers, exports, images and audio, and
settings of features that another key enables."""

_LOSSES = {"orpo": "orpo", "cpo": "simpo"}
"""Names of the loss, by methods that LLaMA-Factory trains in the stage DPO."""

_DPO_FORMS = ("sigmoid", "hinge", "ipo")
"""Forms of DPO's loss that are written; the import of the file reports a different one as a difference."""


def _loss(job: ExportedJob) -> str | None:
    if job.task.method == "dpo":
        form = job.config.objective.model_dump()["loss_type"]
        return form if form in _DPO_FORMS else None
    return _LOSSES.get(job.task.method)


def _targets(job: ExportedJob) -> str:
    targets = job.config.target_modules
    return "all" if targets == ALL_LINEAR else targets if isinstance(targets, str) else ",".join(targets)


KEYS = KeyTable(
    keys=(
        Key("model", "model_name_or_path", lambda job: job.model),
        *same("trust_remote_code"),
        Key("method", "stage", lambda job: "dpo" if job.task.method in _LOSSES else job.task.method),
        Key("", "do_train", lambda job: True),
        Key("", "finetuning_type", lambda job: "lora"),
        Key("beta", "pref_beta"),
        Key("simpo_gamma", "simpo_gamma", methods=("cpo",)),
        Key("cpo_alpha", "pref_ftx", methods=("cpo",), by_code=True),
        Key("loss_type", "pref_loss", _loss, methods=("dpo", "orpo", "cpo")),
        Key("label_smoothing", "dpo_label_smoothing", methods=("dpo",), by_code=True),
        Key("rpo_alpha", "pref_ftx", methods=("dpo",), by_code=True),
        Key("desirable_weight", "kto_chosen_weight"),
        Key("undesirable_weight", "kto_rejected_weight"),
        Key("r", "lora_rank"),
        *same("lora_alpha", "lora_dropout"),
        Key("target_modules", "lora_target", _targets),
        Key("modules_to_save", "additional_target", lambda job: ",".join(job.config.modules_to_save or ()) or None),
        *same("use_rslora", "use_dora", "loraplus_lr_ratio"),
        Key("router_aux_loss_coef", "moe_aux_loss_coef"),
        Key(
            "load_in_4bit",
            "quantization_bit",
            lambda job: 4 if job.task.load_in_4bit else 8 if job.task.load_in_8bit else None,
        ),
        Key("dataset", "dataset", lambda job: job.rows.name),
        Key("", "dataset_dir", lambda job: str(job.folder)),
        *same("max_samples"),
        Key("max_length", "cutoff_len"),
        Key("train_on", "train_on_prompt", lambda job: job.task.train_on == "all" or None),
        Key("train_on", "mask_history", lambda job: job.task.train_on == "last" or None),
        Key("validation_split", "val_size", by_code=True),
        *TRAINER_KEYS,
        *WARMUP_KEYS,
        Key("dtype", "bf16", lambda job: job.task.dtype == "bfloat16" or None),
        Key("dtype", "fp16", lambda job: job.task.dtype == "float16" or None),
        OUTPUT_KEY,
    ),
    unneeded={
        "'report.html' of the run has the loss curves": ("plot_loss",),
        "'early_exit' ends jobs by their validation losses": ("early_stopping_steps",),
        "jobs are compared by their validation loss": ("compute_accuracy",),
        "the loss on every source of a mixture is recorded": ("eval_on_each_dataset",),
        "the reference is the frozen base": ("ref_model",),
        "activations are recomputed if memory requires it, or with gradient_checkpointing: true": (
            "disable_gradient_checkpointing",
        ),
        "rows are tokenised once for all jobs, and kept in ALTO's cache if they are large (token_cache)": (
            *("overwrite_cache", "preprocessing_num_workers", "preprocessing_batch_size", "buffer_size"),
            *("tokenized_path", "data_shared_file_system"),
        ),
        "ALTO chooses its kernels and how a model is loaded": (
            *("flash_attn", "enable_liger_kernel", "use_kt", "use_unsloth", "use_unsloth_gc", "use_v1_kernels"),
            *("use_kv_cache", "use_reentrant_gc", "use_fast_tokenizer", "low_cpu_mem_usage", "upcast_layernorm"),
            *("upcast_lmhead_output", "quantization_device_map", "offload_folder", "infer_backend", "infer_dtype"),
        ),
        "models are loaded with the cache and the token of the Hugging Face hub": (
            *("cache_dir", "hf_hub_token", "ms_hub_token", "om_hub_token"),
        ),
        "the journal and the report of a run contain all that is known of every job": (
            *("print_param_status", "include_effective_tokens_per_second", "enable_torch_profiler"),
        ),
        "ALTO trains text models": ("media_dir", "crop_to_patches", "use_audio_in_video"),
        "'alto eval' generates answers": (
            *("max_new_tokens", "max_length", "do_sample", "temperature", "top_p", "top_k", "num_beams"),
            *("eval_num_beams", "repetition_penalty", "length_penalty", "skip_special_tokens"),
            "predict_with_generate",
        ),
        "ALTO starts its own processes, and 'num_gpus' shards the base model over several GPUs": (
            *("ray_run_name", "ray_storage_path", "ray_num_workers", "ray_init_kwargs", "resources_per_worker"),
            *("placement_strategy", "master_addr", "master_port", "device_map", "use_mca", "use_megatron_bridge"),
            "use_hyper_parallel",
        ),
        "with loraplus_lr_ratio no adapter is on the embeddings": ("loraplus_lr_embedding",),
        "there is no padding": ("ignore_pad_token_for_loss",),
        "PiSSA is not supported": ("pissa_iter", "pissa_convert"),
        "every job begins with a new adapter": ("create_new_adapter",),
    },
    unsupported={
        "set it as init_adapter: every job begins with it, and dpo and kto compare with it": (
            *("adapter_name_or_path", "adapter_folder"),
        ),
        "4 bits are NF4 with double quantisation": ("quantization_type", "double_quantization"),
        "only adapters, biases and classification heads are trained": ("additional_target",),
        "set loss_type: [sigmoid, bco_pair] with loss_weights for TRL's form of it": ("pref_bco_weight",),
        "the loss of method sft is the cross-entropy": ("use_dft_loss", "use_asft_loss", "use_eaft_loss"),
        "put the message into the rows, as a column system or a first message": ("default_system",),
        "the chat template of the model's tokenizer decides; a column chat_template_kwargs of the rows sets it": (
            *("enable_thinking", "preserve_thinking"),
        ),
        "every job shuffles its rows in every epoch, by its own 'seed'": ("disable_shuffling",),
        "tools are written by the chat template of the model's tokenizer": ("tool_format",),
        "write it into the model's config.json, and give the folder in 'model'": ("rope_scaling",),
        "the attention of the model is not changed": ("shift_attn",),
        "the layers of the model are not changed": ("mixture_of_depths",),
        "the tokenizer splits texts by its own settings": ("split_special_tokens",),
        "models are quantised by bitsandbytes, or loaded as stored on disk": ("quantization_method",),
        "only PPO has a reward model": ("reward_model",),
        "the reference is the frozen base without an adapter, as it is loaded": (
            *("ref_model_adapters", "ref_model_quantization_bit"),
        ),
        "the base is float32, bfloat16, float16, or quantised": ("fp8",),
        "the embeddings are not trained: save a model and a tokenizer with the new tokens, and name that folder": (
            *("add_tokens", "add_special_tokens", "new_special_tokens_config", "resize_vocab"),
        ),
        "it applies to the weights of whole layers, and ALTO trains adapters": (
            *("use_galore", "use_apollo", "use_badam", "use_adam_mini", "use_muon", "use_llama_pro"),
        ),
        trainer.TRACKERS_ARE: ("use_swanlab",),
        "the base model is frozen": ("train_from_scratch",),
    },
    off={
        "skip_special_tokens": (True,),
        "enable_thinking": (True,),
        "flash_attn": ("auto",),
        "quantization_method": ("bnb", "bitsandbytes"),
        "quantization_type": ("nf4",),
        "double_quantization": (True,),
        "low_cpu_mem_usage": (True,),
        "use_fast_tokenizer": (True,),
        "ignore_pad_token_for_loss": (True,),
        "pref_bco_weight": (0,),
        "use_reentrant_gc": (True,),
        "use_kv_cache": (True,),
    },
    never_off=("double_quantization", "enable_thinking"),
)
"""Handling of the keys of LLaMA-Factory."""

_DEFAULTS = {
    "max_length": 2048,
    "learning_rate": 5e-5,
    "per_device_train_batch_size": 8,
    "r": 8,
    "num_train_epochs": 3,
}
_STAGES = {"sft": "sft", "dpo": "dpo", "kto": "kto"}


def read_llamafactory(draft: Draft, method_name: str | None) -> None:
    """Convert a configuration of LLaMA-Factory to a task."""
    stage, kind = draft.take_text("stage", "sft"), draft.take_text("finetuning_type", "lora")
    if kind != "lora":
        raise UnsupportedError(
            f"finetuning_type: expected 'lora', found {quoted(kind)}: ALTO trains LoRA adapters. Set "
            "finetuning_type: lora."
        )
    if stage not in _STAGES:
        raise UnsupportedError(
            f"stage: expected one of {', '.join(_STAGES)}, found {quoted(stage)}, which ALTO does not train. Give a "
            "configuration of another stage."
        )
    method = find_method(method_name or _read_preference(draft, stage))
    draft.put("method", method.name)
    draft.put("model", trainer.local_model(draft, draft.take("model_name_or_path")))
    read_datasets(draft, method)
    trainer.validation_split(draft, "val_size")
    template = draft.take_text("template")
    if template is not None:
        trainer.report_own_template(draft, "template", template, "LLaMA-Factory")
    _read_masks(draft)
    trainer.read_trainer_keys(draft)
    _read_adapter(draft)
    _read_quantisation(draft)
    draft.drop(_PREFIXES)
    draft.pass_on(KEYS, method)
    trainer.set_defaults(draft, _DEFAULTS)
    trainer.compares_replies_as_tool(draft, method)


def _read_preference(draft: Draft, stage: str) -> str:
    """Return the method of ``stage``; in LLaMA-Factory, ORPO and SimPO are losses of the stage DPO."""
    if stage != "dpo":
        if stage == "kto" and draft.take("pref_ftx"):
            draft.not_supported("pref_ftx", "kto has no cross-entropy in addition to its loss")
        _leave_out(draft, ("pref_loss", "pref_ftx", "dpo_label_smoothing", "simpo_gamma"), f"stage: {stage}")
        return _STAGES[stage]
    loss, weight = draft.take_text("pref_loss", "sigmoid"), draft.take("pref_ftx")
    smoothed = loss in ("sigmoid", "robust", "exo_pair")
    others = [*([] if smoothed else ["dpo_label_smoothing"]), *([] if loss == "simpo" else ["simpo_gamma"])]
    _leave_out(draft, others, f"pref_loss: {loss}")
    smoothing, gamma = draft.take("dpo_label_smoothing"), draft.take("simpo_gamma")
    if loss == "orpo":
        if weight:
            draft.not_supported(
                "pref_ftx", "ORPO already includes the cross-entropy of chosen replies, with the weight 1"
            )
        return "orpo"
    if loss == "simpo":
        draft.values.update({"loss_type": "simpo", "cpo_alpha": weight or 0.0})
        draft.put("simpo_gamma", gamma)
        draft.used("pref_loss", "method: cpo with loss_type: simpo and cpo_alpha: the weight of pref_ftx")
        return "cpo"
    if loss == "kto_pair":
        raise UnsupportedError(
            "pref_loss: expected a loss of pairs, found 'kto_pair'. Set stage: kto, and use labelled rows."
        )
    draft.put("loss_type", loss)
    if smoothing:
        draft.put("label_smoothing", smoothing)
    if weight:
        draft.put("rpo_alpha", weight)
        draft.used("pref_ftx", "rpo_alpha: the cross-entropy is averaged over the tokens of a step, not row by row")
    return "dpo"


def _leave_out(draft: Draft, keys: Iterable[str], where: str) -> None:
    """Report the keys with values that LLaMA-Factory ignores because of the setting ``where``."""
    for key in keys:
        if draft.take(key):
            draft.not_needed(key, f"LLaMA-Factory does not use it with {where}")


def _read_masks(draft: Draft) -> None:
    """Read which tokens are trained."""
    if draft.given.get("train_on_prompt") and draft.given.get("mask_history"):
        raise SpecError(
            "mask_history: expected one of train_on_prompt (all tokens) and mask_history (the last reply), found both. "
            "Remove one."
        )
    if draft.take("train_on_prompt"):
        draft.put("train_on", "all")
        draft.used("train_on_prompt", "train_on: all")
    if draft.take("mask_history"):
        draft.put("train_on", "last")
        draft.used("mask_history", "train_on: last")
    for key in ("packing", "neat_packing"):
        if draft.take(key):
            draft.used(key, trainer.packed_rows("LLaMA-Factory"))


def _read_adapter(draft: Draft) -> None:
    names = _names(draft.take("lora_target", "all"))
    draft.put("target_modules", "all-linear" if names == ["all"] else names)
    draft.put("modules_to_save", _names(draft.take("additional_target")))


def _names(given: Any) -> Any:
    """Return a list of module names from comma-separated text; other values are returned unchanged."""
    return [name.strip() for name in given.split(",")] if isinstance(given, str) else given


def _read_quantisation(draft: Draft) -> None:
    bits = draft.take("quantization_bit")
    if bits in (4, 8):
        draft.put(f"load_in_{bits}bit", True)
    elif bits is not None:
        draft.not_supported("quantization_bit", f"{quoted(bits)}: load_in_4bit and load_in_8bit quantise the base")


def llamafactory_files(job: ExportedJob) -> ToolFiles | None:
    """Return the configuration of ``llamafactory-cli train``, with the ``dataset_info.json`` that it needs; None for
    methods, or forms of CPO's loss, that LLaMA-Factory does not have."""
    method = job.task.method
    if method not in (*_STAGES, *_LOSSES) or (method == "cpo" and job.setting("loss_type") != "simpo"):
        return None
    info = json.dumps({job.rows.name: written_dataset(job)}, indent=2)
    return ToolFiles(keys=KEYS.written(job), command=("llamafactory-cli", "train"), others={INFO: f"{info}\n"})
