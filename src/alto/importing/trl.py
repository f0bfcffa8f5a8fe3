"""TRL configurations: files of ``trl sft --config``, read and written, and JSON of ``TrainingArguments``, ``SFTConfig``
and similar classes, read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from alto.base import quoted
from alto.errors import SpecError, UnsupportedError
from alto.importing import trainer
from alto.importing.draft import Draft, checked
from alto.importing.keys import CHECKPOINTING_KEY, OUTPUT_KEY, TRAINER_KEYS, ExportedJob, Key, KeyTable, ToolFiles, same
from alto.importing.sources import BUILDERS, ImportedSource, builder_of, put_sources, readable_path, report_split
from alto.spec import KTO_LOSS_TYPES, LOSS_TYPES, NOT_NEEDED_KEYS, PEFT_DEFAULT, TEMPLATE_NAME, find_method

FORM = "dataset_format"
"""The task key under which the tokenisation of texts is reported; TRL has no key for it."""

_PEFT_KEYS = frozenset({"r", "target_modules"})
"""Keys of PEFT's ``LoraConfig`` that TRL's ``ModelConfig`` spells otherwise."""

MARKS = frozenset(
    {
        *("dataset_name", "dataset_config", "dataset_train_split", "dataset_test_split", "dataset_streaming"),
        *("use_peft", "model_revision", "attn_implementation", "use_bnb_nested_quant", "lora_task_type"),
        *("assistant_only_loss", "completion_only_loss", "dataset_text_field", "dataset_num_proc", "max_length"),
        *("chat_template_path", "loss_type", "beta", "precompute_ref_log_probs", "padding_free", "eos_token"),
        *("desirable_weight", "undesirable_weight", "max_completion_length"),
        *("logging_first_step", "eval_do_concat_batches", "per_gpu_train_batch_size", "project"),
        *_PEFT_KEYS,
    }
)
"""Keys that identify a configuration of TRL, transformers or PEFT."""

TRAINER_MARKS = frozenset({"num_train_epochs", "per_device_train_batch_size", "lr_scheduler_type"})
"""Keys of ``TrainingArguments`` that LLaMA-Factory has too, always with keys of its own."""

_KTO_KEYS = ("desirable_weight", "undesirable_weight")
_CPO_KEYS = ("cpo_alpha", "simpo_gamma")
_DPO_KEYS = (
    *("beta", "loss_weights", "ld_alpha", "f_divergence_type", "f_alpha_divergence_coef", "discopop_tau"),
    *("precompute_ref_log_probs", "precompute_ref_batch_size", "use_weighting", "label_smoothing", "sync_ref_model"),
    *("ref_model_mixup_alpha", "ref_model_sync_steps", "disable_dropout", "rpo_alpha"),
)
_SFT_KEYS = (
    *("assistant_only_loss", "completion_only_loss", "dataset_text_field", "packing", "packing_strategy"),
    *("eval_packing", "shuffle_dataset", "eos_token", "dataset_kwargs", "chat_template_path"),
)

_SMOOTHED = {"dpo": ("robust", "exo_pair", "aot", "aot_unpaired"), "cpo": ("sigmoid", "simpo")}
"""Forms of the loss to which TRL 1.16 applies label smoothing, by method."""

_LEARNING_RATES = {"sft": 2e-5, "dpo": 1e-6, "kto": 1e-6, "cpo": 1e-6, "orpo": 1e-6}
_MAX_LENGTH = 1024
_SIMPO_GAMMA = 0.5
_UNLIMITED = 2**20

_RAW_FORMS: Mapping[str, tuple[str, str | None]] = {
    "sft": ("prompts and completions", "raw_prompt_completion"),
    **dict.fromkeys(("dpo", "orpo", "cpo"), ("prompts and replies", "raw_preference")),
    "kto": ("prompts and completions", None),
}
"""By method: a description of the columns that may hold texts; and the form of rows that joins texts as TRL does, or
None."""

_KEYS_OF_A_DATASET = ("path", "name", "data_dir", "data_files", "split", "columns", "fraction")

_WRITTEN_METHODS = ("sft", "dpo", "kto")
"""Methods that have a command of TRL."""


def _bnb(value: Any) -> Callable[[ExportedJob], Any]:
    return lambda job: value if job.task.load_in_4bit else None


def _of_hub(name: str) -> Key:
    """Return the key of a setting that only a hub dataset has."""
    theirs = "dataset_name" if name == "dataset" else name
    return Key(name, theirs, lambda job: None if builder_of(job.task) else getattr(job.task, name))


def _files(job: ExportedJob) -> list[dict[str, Any]] | None:
    builder = builder_of(job.task)
    return [{"path": builder, "data_files": str(job.task.dataset), "split": "train"}] if builder else None


def _template(job: ExportedJob) -> str | None:
    """Return the file of the chat template, which only ``trl sft`` reads."""
    has_one = job.task.base_model.chat_template is not None and job.task.method == "sft"
    return str(job.folder / TEMPLATE_NAME) if has_one else None


KEYS = KeyTable(
    keys=(
        Key("model", "model_name_or_path", lambda job: job.model),
        *same("dtype", "load_in_4bit"),
        Key("", "bnb_4bit_quant_type", _bnb("nf4")),
        Key("", "use_bnb_nested_quant", _bnb(True)),
        *same("load_in_8bit", "trust_remote_code"),
        Key("", "use_peft", lambda job: True),
        Key("r", "lora_r"),
        *same("lora_alpha", "lora_dropout"),
        Key("target_modules", "lora_target_modules"),
        Key("target_parameters", "lora_target_parameters"),
        Key("modules_to_save", "lora_modules_to_save"),
        *same("use_rslora", "use_dora"),
        Key("dataset", "datasets", _files),
        Key(
            "validation_split",
            "test_split_size",
            lambda job: job.task.validation_split if builder_of(job.task) else None,
        ),
        *map(_of_hub, ("dataset", "dataset_config", "dataset_train_split", "dataset_test_split")),
        Key("chat_template", "chat_template_path", _template),
        *TRAINER_KEYS,
        *same("warmup_steps"),
        Key("train_on", "completion_only_loss", lambda job: job.trained.get("completion_only_loss")),
        Key("train_on", "assistant_only_loss", lambda job: job.trained.get("assistant_only_loss")),
        *same("beta", "loss_type", "loss_weights", "label_smoothing", "ld_alpha", "f_divergence_type"),
        *same("f_alpha_divergence_coef", "discopop_tau", "desirable_weight", "undesirable_weight"),
        *same("router_aux_loss_coef"),
        Key("max_length", "max_length", also=("max_seq_length",)),
        Key(
            "lora_dropout",
            "disable_dropout",
            lambda job: False if job.task.method != "sft" and job.config.lora_dropout else None,
        ),
        Key("dtype", "bf16", lambda job: False),
        CHECKPOINTING_KEY,
        OUTPUT_KEY,
    ),
    unneeded={
        "set environment variables in the shell that starts ALTO": ("env",),
        "'alto eval' generates answers": ("generate_during_eval",),
        "ALTO trains models that continue a text": ("is_encoder_decoder",),
        "there is no padding": ("label_pad_token_id", "padding_value"),
    },
    off={"label_pad_token_id": (-100,)},
)
"""Handling of the keys of TRL."""


def read_trl(draft: Draft, method_name: str | None) -> None:
    """Convert a configuration of TRL, or of transformers' ``TrainingArguments``, to a task."""
    use_peft = draft.take("use_peft")
    is_of_a_class = draft.is_of_a_class or draft.given.keys() & _PEFT_KEYS
    if use_peft is not True and not (use_peft is None and is_of_a_class):
        shown = "none" if use_peft is None else quoted(use_peft).lower()
        raise UnsupportedError(
            f"use_peft: expected true, found {shown}: TRL would train all weights, and ALTO trains LoRA adapters. "
            "Set use_peft: true, and the learning rate that you want for LoRA."
        )
    _read_flags(draft)
    computes_in_float32 = _computes_in_float32(draft)
    name = method_name or _command(draft)
    draft.put("method", name)
    method = find_method(name)
    draft.put("model", trainer.local_model(draft, draft.take("model_name_or_path")))
    _read_dataset(draft)
    _read_length(draft)
    trainer.read_template_file(draft, "chat_template_path")
    if name == "sft":
        _read_masks(draft)
    elif name in _RAW_FORMS:
        _report_texts(draft, name)
    _report_held_out(draft)
    if name == "kto":
        _report_order(draft)
    trainer.read_trainer_keys(draft)
    if computes_in_float32:
        draft.put("dtype", "float32")
        draft.used("bf16", "dtype: float32, also for the frozen base: without bf16 and fp16, TRL computes in float32")
    drops_out = draft.take("disable_dropout") is False
    read_adapter(draft, has_defaults=use_peft is True)
    if name == "cpo":
        _read_cpo(draft)
    if name in _SMOOTHED:
        _leave_out_smoothing(draft, name)
    draft.pass_on(KEYS, method)
    trainer.set_defaults(draft, {"learning_rate": _LEARNING_RATES.get(name, 2e-5), "per_device_train_batch_size": 8})
    trainer.compares_replies_as_tool(draft, method, drops_out=drops_out)


def _computes_in_float32(draft: Draft) -> bool:
    """Return whether TRL would load weights and compute in float32.

    TRL loads weights in float32 unless ``dtype`` is set, and computes in 16 bits unless ``bf16`` is set to false. For
    the arguments of transformers' own trainer (without ``max_length``), ``bf16`` is false by default and says nothing
    about the model's precision.
    """
    given = draft.given
    if (draft.is_of_a_class and "max_length" not in given) or given.get("dtype") or given.get("torch_dtype"):
        return False
    return given.get("bf16") is False and not given.get("fp16")


def _report_held_out(draft: Draft) -> None:
    """Report on which rows jobs are validated, unless the task names them; TRL trains on its whole training split."""
    if {"validation_dataset", "validation_split"} & {*draft.replaced, *draft.values}:
        return
    draft.take("eval_strategy")
    draft.used(
        "eval_strategy",
        "validation at equal shares of every job's steps ('eval_steps: 0.05'), on rows that are not trained: the "
        "validation rows of the dataset, or a tenth of its rows; validation_split and validation_dataset choose others",
    )


def _report_order(draft: Draft) -> None:
    """Report that the order of rows differs for KTO; in TRL, the estimate of the KL term depends on this order."""
    if draft.given.get("train_sampling_strategy") not in (None, "sequential"):
        return
    draft.take("train_sampling_strategy")
    draft.used(
        "train_sampling_strategy",
        "random: every job shuffles its rows, and pairs the rows of a batch for the KL term; TRL takes and pairs rows "
        "in the order of the dataset",
    )


def _leave_out_smoothing(draft: Draft, method_name: str) -> None:
    """Remove ``label_smoothing`` if TRL's trainer ignores it."""
    loss = draft.given.get("loss_type") or "sigmoid"
    names = list(map(str, loss if isinstance(loss, list | tuple) else [loss]))
    value = draft.given.get("label_smoothing")
    if not value:
        return
    if set(names) & set(_SMOOTHED[method_name]):
        if method_name == "dpo" and "sigmoid" in names:
            draft.used(
                "label_smoothing", "label_smoothing; TRL does not apply it to the part loss_type: sigmoid, ALTO does"
            )
        return
    draft.take("label_smoothing")
    ignored = f"TRL does not use it with loss_type: {quoted(', '.join(names))[1:-1]}"
    smooths = f"; ALTO smooths as cDPO does with --set label_smoothing={value}" if "sigmoid" in names else ""
    draft.not_needed("label_smoothing", ignored + smooths)


def _read_cpo(draft: Draft) -> None:
    if draft.take("alpha"):
        draft.not_supported("alpha", "ALTO does not have AlphaPO's form of the reward")
    if draft.given.get("loss_type") == "simpo" or "loss_type" in draft.replaced:
        return
    if draft.take("simpo_gamma", _SIMPO_GAMMA) != _SIMPO_GAMMA:
        draft.not_needed("simpo_gamma", "TRL reads it only with loss_type: simpo")


def _read_flags(draft: Draft) -> None:
    """Convert keys ``no_…: true``, which disable a default as on the command line, to the key without the prefix."""
    for key in [key for key in draft.given if key.startswith("no_") and key[3:] in NOT_NEEDED_KEYS]:
        name = key.removeprefix("no_")
        draft.given[name] = not draft.take(key)
        draft.spellings[name] = key


def _command(draft: Draft) -> str:
    """Return the method, detected by keys that only one of TRL's commands has."""
    given = {key for key, value in draft.given.items() if value is not None}
    loss = draft.given.get("loss_type")
    names = {loss} if isinstance(loss, str) else set(map(str, checked(loss or [], list, "loss_type")))
    if given.intersection(_KTO_KEYS) or (names and names <= set(KTO_LOSS_TYPES)):
        return "kto"
    if given.intersection(_CPO_KEYS) or names == {"simpo"}:
        return "cpo"
    if names & set(LOSS_TYPES) or (not given.intersection(_SFT_KEYS) and given.intersection(_DPO_KEYS)):
        return "dpo"
    if not given.intersection(_SFT_KEYS):
        draft.used(
            "(TRL's command)",
            "method: sft, because the file does not name the command; for others, use --set method=dpo or kto",
        )
    return "sft"


def _read_dataset(draft: Draft) -> None:
    """Read ``dataset_name`` with its configuration and splits, or ``datasets``, which takes precedence as in TRL."""
    keys = ("dataset_name", "dataset_config", "dataset_train_split", "dataset_test_split")
    if draft.replaces_dataset("datasets", *keys, "test_split_size"):
        return
    listed = draft.take_list("datasets")
    name, config, train, test = (draft.take(key) for key in keys)
    split_size = draft.take("test_split_size")
    if isinstance(split_size, float) and 0 < split_size < 1:
        draft.put("validation_split", split_size)
    elif split_size is not None:
        draft.not_supported("test_split_size", f"{quoted(split_size)} is not a share of the rows; set validation_split")
    if listed:
        if name is not None:
            draft.not_needed("dataset_name", "'datasets' overrides it")
        put_sources(draft, [_entry(draft, item, index) for index, item in enumerate(listed)], "datasets")
        return
    if name is None:
        return
    source = ImportedSource(path=readable_path(draft, name, "dataset_name"), config=config, split=train)
    report_split(draft, source, "dataset_train_split")
    put_sources(draft, [source], "dataset_name")
    if test not in (None, "test"):
        if source.is_file:
            draft.not_supported("dataset_test_split", "a file has no splits; name other rows in validation_dataset")
        else:
            draft.put("dataset_test_split", test)
            draft.used(
                "dataset_test_split", "dataset_test_split, only for 'alto eval': jobs are compared on other rows"
            )


def _entry(draft: Draft, item: Any, index: int) -> ImportedSource:
    where = f"datasets[{index}]"
    if not isinstance(item, Mapping):
        raise SpecError(f"{where}: expected a mapping with a path, found {quoted(item)}. Correct it.")
    files, path = item.get("data_files"), item.get("path")
    if item.get("data_dir") is not None or not isinstance(files, str | None) or (files and path not in BUILDERS):
        raise UnsupportedError(
            f"{where}: expected a hub dataset, or path: json with one file in data_files, found data_dir, "
            "several files or files of a hub dataset. Give one file with --set dataset=FILE."
        )
    if item.get("columns") is not None:
        draft.not_needed(f"{where}.columns", "columns without a role are not read")
    draft.report_unread(item, _KEYS_OF_A_DATASET, where)
    if item.get("fraction") is not None:
        draft.used(
            f"{where}.fraction",
            "weight, the dataset's share of every epoch; an epoch has as many rows as all datasets together, and rows "
            "of small datasets repeat; TRL trains on the first rows of each dataset, so few that no row repeats",
        )
    source = ImportedSource(
        path=readable_path(draft, files or path, where),
        config=item.get("name"),
        split=item.get("split"),
        weight=item.get("fraction"),
    )
    report_split(draft, source, f"{where}.split")
    return source


def _read_length(draft: Draft) -> None:
    """Read ``max_length`` (``max_seq_length`` in older versions); the default is 1024, and null means no truncation."""
    if "max_length" not in draft.given:
        draft.rename("max_seq_length", "max_length")
    if "max_length" in draft.given and draft.given["max_length"] is None:
        draft.put("max_length", _UNLIMITED)
        draft.used("max_length", f"max_length: {_UNLIMITED}; rows are cut where the model's positions end")
    else:
        draft.put("max_length", draft.given.get("max_length", _MAX_LENGTH))
    draft.given.pop("max_length", None)


def _read_masks(draft: Draft) -> None:
    """Read which tokens are trained and how rows become tokens."""
    if draft.given.get("loss_type") in ("nll", "chunked_nll", None):
        draft.take("loss_type")
    elif draft.given.get("loss_type") == "dft":
        draft.take("loss_type")
        draft.not_supported("loss_type", "'dft': the loss of method sft is the cross-entropy")
    completion, assistant = draft.take("completion_only_loss"), draft.take("assistant_only_loss")
    if completion is False and assistant is True:
        draft.used(
            "completion_only_loss",
            "train_on: completion, only the replies, as assistant_only_loss requests; replies inside a prompt, which "
            "TRL would also train, are only shown to the model",
        )
    elif completion is False:
        draft.put("train_on", "all")
        draft.used("completion_only_loss", "train_on: all")
    elif completion is None and assistant is not True and "train_on" not in draft.replaced:
        draft.used(
            "assistant_only_loss",
            "train_on: completion, only the replies; of rows of messages, TRL would train every token: for this, use "
            "--set train_on=all",
        )
    elif assistant is True:
        draft.used("assistant_only_loss", "train_on: completion, only the replies")
    if assistant is not True:  # with assistant_only_loss, TRL accepts only rows of messages
        _report_texts(draft, "sft")
    column = draft.take("dataset_text_field", "text")
    if column != "text":
        draft.put("columns", {"text": column})
    if draft.take("packing"):
        draft.used("packing", trainer.packed_rows("TRL"))


def _report_texts(draft: Draft, method_name: str) -> None:
    """Report how rows without messages are tokenised, unless an override sets their form."""
    if FORM in draft.replaced:
        return
    roles, raw = _RAW_FORMS[method_name]
    remedy = f": --set {FORM}={raw}" if raw else ""
    draft.used(
        FORM,
        f"auto: {roles} that are texts are written by the chat template; TRL joins the texts unchanged{remedy}",
    )


def read_adapter(draft: Draft, *, has_defaults: bool = False) -> None:
    """Read keys of TRL's ``ModelConfig`` or of PEFT's ``LoraConfig``, with the defaults of that class.

    Args:
        has_defaults: Whether TRL's defaults apply even if none of the keys is given, as with ``use_peft: true`` alone.
    """
    defaults: dict[str, Any] = {"lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.05}
    if not has_defaults and draft.given.keys() & _PEFT_KEYS:
        defaults = {"r": 8, "lora_alpha": 8}
    elif not has_defaults and not draft.given.keys() & {*defaults, "lora_target_modules"}:
        defaults = {}
    for key, value in defaults.items():
        if draft.given.get(key) is None and not (key == "lora_r" and "r" in draft.given):
            draft.given[key] = value
    if "target_modules" in draft.replaced:
        draft.given.pop("lora_target_modules", None)
        draft.given.pop("target_modules", None)
        return
    targets = draft.given.get("lora_target_modules", draft.given.get("target_modules"))
    if targets is None:
        draft.used(
            "target_modules" if "target_modules" in draft.given else "lora_target_modules",
            f"target_modules: {PEFT_DEFAULT}, the modules that PEFT chooses for the architecture (q_proj and v_proj "
            "for Llama and Qwen); for all linear layers, use --set target_modules=all-linear",
        )
        draft.given.pop("target_modules", None)
        draft.put("target_modules", PEFT_DEFAULT)
    elif isinstance(targets, list) and len(targets) == 1 and targets[0] == "all-linear":
        draft.given.pop("lora_target_modules", None)
        draft.put("target_modules", "all-linear")


def trl_files(job: ExportedJob) -> ToolFiles | None:
    """Return the configuration of ``trl sft --config``, ``trl dpo`` or ``trl kto``; None for methods without such a
    command."""
    if job.task.method not in _WRITTEN_METHODS:
        return None
    template = job.task.base_model.chat_template
    others = {TEMPLATE_NAME: template} if template is not None and job.task.method == "sft" else {}
    return ToolFiles(keys=KEYS.written(job), command=("trl", job.task.method, "--config"), others=others)
