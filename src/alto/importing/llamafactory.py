"""Import of LLaMA-Factory configurations (``llamafactory-cli train``)."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from alto.base import quoted, read_json
from alto.errors import SpecError, UnsupportedError
from alto.importing.draft import Answers, Draft, checked
from alto.importing.sources import Source, message_form, put_sources, readable_path, report_split
from alto.importing.trainer import (
    compares_replies_as_tool,
    local_model,
    read_trainer_keys,
    set_defaults,
    validation_share,
)
from alto.spec import Method, find_method

_INFO = "dataset_info.json"
_MEDIA = ("images", "videos", "audios")
_KEYS = (
    *("hf_hub_url", "ms_hub_url", "om_hub_url", "file_name", "script_url", "formatting", "ranking", "subset", "split"),
    *("folder", "num_samples", "columns", "tags"),
)
_COLUMNS = (
    *("prompt", "query", "response", "history", "messages", "system", "tools", "chosen", "rejected", "kto_tag"),
    *_MEDIA,
)
_TAGS = {
    "role_tag": "from",
    "content_tag": "value",
    "user_tag": "human",
    "assistant_tag": "gpt",
    "observation_tag": "observation",
    "function_tag": "function_call",
    "system_tag": "system",
}
_ROLE_OF_TAG = {
    "user_tag": "user",
    "assistant_tag": "assistant",
    "observation_tag": "tool",
    "function_tag": "function",
    "system_tag": "system",
}


def read_datasets(draft: Draft, method: Method) -> None:
    """Read ``dataset``, ``eval_dataset``, ``dataset_dir``, and the keys for mixing several datasets.

    Raises:
        SpecError: There is no ``dataset_info.json``, or a dataset is not in it.
        UnsupportedError: A dataset has a form that ALTO cannot read.
    """
    if draft.replaces_dataset("dataset", "eval_dataset", "dataset_dir", "mix_strategy", "interleave_probs"):
        return
    names, held_out = (_data_names(draft.take(key)) for key in ("dataset", "eval_dataset"))
    strategy, probabilities = draft.take("mix_strategy", "concat"), draft.take("interleave_probs")
    folder = draft.take("dataset_dir", "data")
    if not names:
        return
    info, at = _read_info(draft, folder)
    sources = [_source(draft, info, at, name, method) for name in names]
    if strategy != "concat" and len(sources) > 1:
        # Without probabilities, LLaMA-Factory takes rows from all sources in turn.
        weights = _data_names(probabilities) or ["1"] * len(sources)
        sources = [_weighted(source, weight) for source, weight in zip(sources, weights, strict=False)]
        if probabilities is not None:
            draft.used("interleave_probs", "the weights of the mixture's sources")
    elif probabilities is not None:
        draft.not_needed("interleave_probs", "LLaMA-Factory uses it only if mix_strategy interleaves several datasets")
    put_sources(draft, sources, "dataset")
    if any(source.form == "alpaca" for source in sources):
        draft.used(
            "dataset", "dataset_format: alpaca: an input follows its instruction after a blank line, not a line break"
        )
    if len(held_out) > 1:
        draft.not_supported(
            "eval_dataset", "only one dataset of validation rows can be named; write validation_dataset"
        )
    elif held_out:
        _put_validation(draft, _source(draft, info, at, held_out[0], method), sources)


def _data_names(given: object) -> list[str]:
    listed = given.split(",") if isinstance(given, str) else given if isinstance(given, list) else []
    return [str(name).strip() for name in listed]


def _weighted(source: Source, weight: str) -> Source:
    try:
        share = float(weight)
    except ValueError:
        raise SpecError(f"interleave_probs: expected numbers, found {quoted(weight)}. Correct it.") from None
    return Source(path=source.path, form=source.form, columns=source.columns, config=source.config, weight=share)


def _put_validation(draft: Draft, found: Source, sources: list[Source]) -> None:
    like = sources[0]
    if len(sources) == 1 and (found.form, found.columns) == (like.form, like.columns) and found.has_usual_split:
        draft.put("validation_dataset", found.path)
    else:
        draft.not_supported(
            "eval_dataset",
            "validation rows must have the form, the columns and the split 'train' of the training rows: convert them, "
            "and write validation_dataset",
        )


def _read_info(draft: Draft, folder: object) -> tuple[Mapping[str, Any] | None, Path]:
    """Return the contents of ``dataset_info.json`` and its folder; the contents are None if datasets have hub names."""
    if folder == "ONLINE":
        return None, draft.folders[0]
    if not isinstance(folder, str) or folder.startswith("REMOTE:"):
        raise UnsupportedError(
            f"dataset_dir: expected a folder with a {_INFO}, found {quoted(folder)}. Download it, and name its folder."
        )
    looked = [base / part for base in draft.folders for part in (Path(folder).expanduser(), Path())]
    at = next((path for path in looked if (path / _INFO).is_file()), None)
    if at is None:
        raise SpecError(
            f"dataset_dir: expected a folder with a {_INFO}, found none in "
            f"{', '.join(dict.fromkeys(map(str, looked)))}. Correct dataset_dir, or start ALTO in the folder where "
            "you train with LLaMA-Factory."
        )
    try:
        info = read_json(at / _INFO)
    except (OSError, ValueError) as error:
        raise SpecError(f"{at / _INFO}: expected a JSON object, found: {error}. Correct the file.") from None
    if not isinstance(info, Mapping):
        raise SpecError(f"{at / _INFO}: expected a JSON object, found {quoted(info)}. Correct the file.")
    return info, at


def _source(draft: Draft, info: Mapping[str, Any] | None, at: Path, name: str, method: Method) -> Source:
    if info is None:
        return Source(path=name, form="alpaca")
    entry, where = info.get(name), f"the dataset {quoted(name)} of {at / _INFO}"
    if not isinstance(entry, Mapping):
        raise SpecError(f"{where}: expected a mapping, found {quoted(entry)}. Correct the name, or add the dataset.")
    if entry.get("num_samples") is not None:
        draft.not_supported("num_samples", f"in {where}: write max_samples, which applies to every source")
    columns = entry.get("columns")
    if not isinstance(columns, Mapping | None):
        raise SpecError(f"{where}: expected columns that are a mapping, found {quoted(columns)}. Correct the file.")
    media = [key for key in _MEDIA if (columns or {}).get(key)]
    if media:
        raise UnsupportedError(
            f"{where}: expected rows of text, found a column of {media[0]}: ALTO trains text models. Name "
            "a different dataset."
        )
    form, roles = _form(entry, columns, where, method)
    for part, known in ((entry, _KEYS), (columns or {}, _COLUMNS), (entry.get("tags") or {}, _TAGS)):
        draft.report_unread(part, known, f"{_INFO}[{name}]")
    source = Source(
        path=_path(draft, entry, at, where),
        form=form,
        columns=roles,
        config=entry.get("subset"),
        split=entry.get("split"),
    )
    report_split(draft, source, f"{_INFO}[{name}].split")
    return source


def _path(draft: Draft, entry: Mapping[str, Any], at: Path, where: str) -> str:
    if isinstance(entry.get("hf_hub_url"), str):
        if entry.get("folder"):
            raise UnsupportedError(
                f"{where}: expected a whole hub dataset, found only its folder {quoted(entry['folder'])}. Download "
                "the file, and write file_name."
            )
        return str(entry["hf_hub_url"])
    file = entry.get("file_name")
    if not isinstance(file, str):
        raise UnsupportedError(
            f"{where}: expected file_name or hf_hub_url, found {quoted(dict(entry))}. Download the rows, and write "
            "file_name."
        )
    return readable_path(draft, os.path.abspath(at / file), where)


def _form(
    entry: Mapping[str, Any], columns: Mapping[str, Any] | None, where: str, method: Method
) -> tuple[str, dict[str, str]]:
    """Return form and columns of the rows; ``ranking`` indicates pairs, and ``kto_tag`` labelled replies."""
    formatting, named = entry.get("formatting", "alpaca"), dict(columns or {})
    is_pair, is_labelled = bool(entry.get("ranking")), bool(named.get("kto_tag"))
    if is_pair != bool(method.entry.is_paired) or is_labelled != method.entry.is_labelled:
        kind = "pairs" if is_pair else "labelled replies" if is_labelled else "replies"
        raise UnsupportedError(
            f"{where}: expected rows for method {method.name!r}, found {kind}. Name another dataset, or another stage."
        )
    if formatting in ("sharegpt", "openai"):
        form, roles = _conversation(entry, named, where, is_pair=is_pair, is_labelled=is_labelled)
    elif formatting == "alpaca":
        form, roles = _alpaca(columns, where, is_pair=is_pair, is_labelled=is_labelled)
    else:
        raise UnsupportedError(
            f"{where}: expected the formatting alpaca or sharegpt, found {quoted(formatting)}. Convert the rows."
        )
    return form, {**roles, **{role: named[role] for role in ("system", "tools") if named.get(role)}}


def _conversation(
    entry: Mapping[str, Any], named: Mapping[str, Any], where: str, *, is_pair: bool, is_labelled: bool
) -> tuple[str, dict[str, str]]:
    given = checked(entry.get("tags") or {}, dict, f"tags of {where}")
    tags = {**_TAGS, **given}
    # If the file has tags, speakers without a tag do not occur in its rows.
    roles = {_ROLE_OF_TAG[tag]: [tags[tag]] for tag in (given or _TAGS) if tag in _ROLE_OF_TAG}
    form = message_form(tags["role_tag"], tags["content_tag"], roles, where)
    messages = named.get("messages", "conversations")
    if is_labelled:
        return "unpaired_preference", {"messages": messages, "label": named["kto_tag"]}
    if is_pair:
        return "preference", {"prompt": messages, **_pair(named)}
    return form, {"messages": messages}


def _alpaca(
    columns: Mapping[str, Any] | None, where: str, *, is_pair: bool, is_labelled: bool
) -> tuple[str, dict[str, str]]:
    if columns is None and not is_pair:
        return "alpaca", {}
    named = dict(columns or {"prompt": "instruction", "query": "input"})
    prompt, query, reply = (named.get(key) for key in ("prompt", "query", "response"))
    if is_pair:
        return "preference", _known({"prompt": prompt, "input": query, **_pair(named)})
    if prompt is None or reply is None:
        raise UnsupportedError(
            f"{where}: expected a column of prompts and one of responses, found {quoted(named)}. Name both in columns."
        )
    if is_labelled:
        if query is not None:
            raise UnsupportedError(
                f"{where}: expected one column of prompts for labelled replies, found {quoted(prompt)} and "
                f"{quoted(query)}. Join them in the rows."
            )
        return "unpaired_preference", {"prompt": prompt, "completion": reply, "label": named["kto_tag"]}
    history = named.get("history")
    if query is None and history is None:
        return "prompt_completion", {"prompt": prompt, "completion": reply}
    return "alpaca", _known({"instruction": prompt, "input": query, "output": reply, "history": history})


def _pair(named: Mapping[str, Any]) -> dict[str, str]:
    return {role: named.get(role, role) for role in ("chosen", "rejected")}


def _known(columns: Mapping[str, str | None]) -> dict[str, str]:
    return {role: column for role, column in columns.items() if column is not None}


MARKS = frozenset(
    {
        *("stage", "finetuning_type", "lora_rank", "lora_target", "cutoff_len", "template", "dataset_dir", "val_size"),
        *("pref_beta", "pref_loss", "pref_ftx", "preprocessing_num_workers", "plot_loss", "overwrite_cache"),
        *("quantization_bit", "additional_target", "adapter_name_or_path", "mask_history", "train_on_prompt"),
        *("flash_attn", "neat_packing", "upcast_layernorm", "use_unsloth", "interleave_probs", "mix_strategy"),
    }
)
"""Keys that identify a configuration of LLaMA-Factory."""

_PREFIXES = (
    *("freeze_", "oft_", "galore_", "apollo_", "badam_", "ppo_", "swanlab_", "export_", "image_", "video_", "audio_"),
    *("kt_", "vllm_", "sglang_", "profiler_", "asft_", "eaft_", "hyper_parallel_"),
)
"""Prefixes of keys that have no effect alone: other kinds of training, other trackers, exports, images and audio, and
settings of features that another key enables."""

_PACKED = (
    "rows that are concatenated without padding, and never attend to each other; a packed row of LLaMA-Factory holds "
    "several rows: raise per_device_train_batch_size to about that number"
)

_ANSWERS = Answers(
    not_needed={
        "plot_loss": "'report.html' of the run has the loss curves",
        "early_stopping_steps": "'early_exit' ends jobs by their validation losses",
        "compute_accuracy": "jobs are compared by their validation loss",
        "eval_on_each_dataset": "the loss on every source of a mixture is recorded",
        "ref_model": "the reference is the frozen base",
        "disable_gradient_checkpointing": "activations are recomputed if memory requires it, or with "
        "gradient_checkpointing: true",
        **dict.fromkeys(
            (
                "overwrite_cache",
                "preprocessing_num_workers",
                "preprocessing_batch_size",
                "buffer_size",
                "tokenized_path",
                "data_shared_file_system",
            ),
            "rows are tokenised once for all jobs, and kept in ALTO's cache if they are large (token_cache)",
        ),
        **dict.fromkeys(
            (
                *(
                    "flash_attn",
                    "enable_liger_kernel",
                    "use_kt",
                    "use_unsloth",
                    "use_unsloth_gc",
                    "use_v1_kernels",
                    "use_kv_cache",
                ),
                *("use_reentrant_gc", "use_fast_tokenizer", "low_cpu_mem_usage", "upcast_layernorm"),
                *("upcast_lmhead_output", "quantization_device_map", "offload_folder", "infer_backend", "infer_dtype"),
            ),
            "ALTO chooses its kernels and how a model is loaded",
        ),
        **dict.fromkeys(
            ("cache_dir", "hf_hub_token", "ms_hub_token", "om_hub_token"),
            "models are loaded with the cache and the token of the Hugging Face hub",
        ),
        **dict.fromkeys(
            ("print_param_status", "include_effective_tokens_per_second", "enable_torch_profiler"),
            "the journal and the report of a run contain all that is known of every job",
        ),
        **dict.fromkeys(("media_dir", "crop_to_patches", "use_audio_in_video"), "ALTO trains text models"),
        **dict.fromkeys(
            (
                *("max_new_tokens", "max_length", "do_sample", "temperature", "top_p", "top_k", "num_beams"),
                *("eval_num_beams", "repetition_penalty", "length_penalty", "skip_special_tokens"),
                "predict_with_generate",
            ),
            "'alto eval' generates answers",
        ),
        **dict.fromkeys(
            (
                *("ray_run_name", "ray_storage_path", "ray_num_workers", "ray_init_kwargs", "resources_per_worker"),
                *("placement_strategy", "master_addr", "master_port", "device_map", "use_mca", "use_megatron_bridge"),
                "use_hyper_parallel",
            ),
            "ALTO starts its own processes, and 'num_gpus' shards the base model over several GPUs",
        ),
        "loraplus_lr_embedding": "with loraplus_lr_ratio no adapter is on the embeddings",
        "ignore_pad_token_for_loss": "there is no padding",
        "pissa_iter": "PiSSA is not supported",
        "pissa_convert": "PiSSA is not supported",
        "create_new_adapter": "every job begins with a new adapter",
    },
    not_supported={
        **dict.fromkeys(
            ("adapter_name_or_path", "adapter_folder"),
            "write it as init_adapter: every job begins with it, and dpo and kto compare with it",
        ),
        **dict.fromkeys(("quantization_type", "double_quantization"), "4 bits are NF4 with double quantisation"),
        "additional_target": "only adapters, biases and classification heads are trained",
        "pref_bco_weight": "write loss_type: [sigmoid, bco_pair] with loss_weights for TRL's form of it",
        **dict.fromkeys(
            ("use_dft_loss", "use_asft_loss", "use_eaft_loss"), "the loss of method sft is the cross-entropy"
        ),
        "default_system": "put the message into the rows, as a column system or a first message",
        **dict.fromkeys(
            ("enable_thinking", "preserve_thinking"),
            "the chat template of the model's tokenizer decides; a column chat_template_kwargs of the rows sets it",
        ),
        "disable_shuffling": "every job shuffles its rows in every epoch, by its own 'seed'",
        "tool_format": "tools are written by the chat template of the model's tokenizer",
        "rope_scaling": "write it into the model's config.json, and give the folder in 'model'",
        "shift_attn": "the attention of the model is not changed",
        "mixture_of_depths": "the layers of the model are not changed",
        "split_special_tokens": "the tokenizer splits texts by its own settings",
        "quantization_method": "models are quantised by bitsandbytes, or loaded as stored on disk",
        "reward_model": "only PPO has a reward model",
        **dict.fromkeys(
            ("ref_model_adapters", "ref_model_quantization_bit"),
            "the reference is the frozen base without an adapter, as it is loaded",
        ),
        "fp8": "the base is float32, bfloat16, float16, or quantised",
        **dict.fromkeys(
            ("add_tokens", "add_special_tokens", "new_special_tokens_config", "resize_vocab"),
            "the embeddings are not trained: save a model and a tokenizer with the new tokens, and name that folder",
        ),
        **dict.fromkeys(
            ("use_galore", "use_apollo", "use_badam", "use_adam_mini", "use_muon", "use_llama_pro"),
            "it applies to the weights of whole layers, and ALTO trains adapters",
        ),
        "use_swanlab": "trackers are tensorboard, mlflow, wandb and trackio (report_to)",
        "train_from_scratch": "the base model is frozen",
    },
    renamed={"lora_rank": "r", "moe_aux_loss_coef": "router_aux_loss_coef"},
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

_DEFAULTS = {
    "max_length": 2048,
    "learning_rate": 5e-5,
    "per_device_train_batch_size": 8,
    "r": 8,
    "num_train_epochs": 3,
}
_STAGES = {"sft": "sft", "dpo": "dpo", "kto": "kto"}


def read_llamafactory(draft: Draft, method_name: str | None) -> None:
    """Convert a configuration of LLaMA-Factory to a task.

    Args:
        draft: The configuration; task values and notes are added to it.
        method_name: The method, if the user named one.

    Raises:
        SpecError: ``dataset_info.json`` or a key of the file is not valid in LLaMA-Factory.
        UnsupportedError: The configuration does not train adapters, or has a dataset that ALTO cannot read.
    """
    stage, kind = draft.take_text("stage", "sft"), draft.take_text("finetuning_type", "lora")
    if kind != "lora":
        raise UnsupportedError(
            f"finetuning_type: expected 'lora', found {quoted(kind)}: ALTO trains LoRA adapters. Write "
            "finetuning_type: lora."
        )
    if stage not in _STAGES:
        raise UnsupportedError(
            f"stage: expected one of {', '.join(_STAGES)}, found {quoted(stage)}, which ALTO does not train. Give a "
            "configuration of another stage."
        )
    method = find_method(method_name or _read_preference(draft, stage))
    draft.put("method", method.name)
    draft.put("model", local_model(draft, draft.take("model_name_or_path")))
    read_datasets(draft, method)
    validation_share(draft, "val_size")
    _read_template(draft)
    _read_masks(draft)
    draft.put("max_length", draft.take("cutoff_len"))
    read_trainer_keys(draft)
    _read_adapter(draft)
    _read_quantisation(draft)
    draft.drop(_PREFIXES)
    draft.pass_on(_ANSWERS, method)
    set_defaults(draft, _DEFAULTS)
    compares_replies_as_tool(draft, method)


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
            "pref_loss: expected a loss of pairs, found 'kto_pair'. Write stage: kto, with labelled rows."
        )
    draft.put("loss_type", loss)
    if smoothing:
        draft.put("label_smoothing", smoothing)
    if weight:
        draft.put("rpo_alpha", weight)
        draft.used("pref_ftx", "rpo_alpha: the cross-entropy is averaged over the tokens of a step, not row by row")
    return "dpo"


def _leave_out(draft: Draft, keys: Iterable[str], where: str) -> None:
    """Report the keys that have a value which LLaMA-Factory ignores because of the setting ``where``."""
    for key in keys:
        if draft.take(key):
            draft.not_needed(key, f"LLaMA-Factory does not use it with {where}")


def _read_template(draft: Draft) -> None:
    name = draft.take_text("template")
    if name is not None:
        draft.not_supported(
            "template",
            f"{quoted(name)} is one of LLaMA-Factory's own templates: rows are written by the template of the "
            "model's tokenizer; write the Jinja text of a different template in chat_template",
        )


def _read_masks(draft: Draft) -> None:
    """Read which tokens are trained.

    Raises:
        SpecError: The configuration requests both all tokens and the last reply alone, which LLaMA-Factory rejects too.
    """
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
            draft.used(key, _PACKED)


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
