"""Axolotl's datasets: paths and types of rows, read and written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from alto.base import quoted
from alto.errors import SpecError, UnsupportedError
from alto.importing.draft import Draft, checked
from alto.importing.keys import ExportedJob
from alto.importing.sources import (
    BUILDERS,
    ImportedSource,
    builder_of,
    message_form,
    put_sources,
    readable_path,
    tool_columns,
)
from alto.spec import Method

_OWN_PROMPT = "'### Instruction:'"

_SFT_TYPES: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "alpaca": ("alpaca", {}),
    "alpaca_chat.load_concise": ("alpaca", {}),
    "alpaca_w_system.load": ("alpaca", {}),
    "gpteacher": ("alpaca", {"output": "response"}),
    "alpaca_chat.load_qa": ("prompt_completion", {"prompt": "question", "completion": "answer"}),
    "alpaca_chat.load_camel_ai": ("prompt_completion", {"prompt": "message_1", "completion": "message_2"}),
    "alpaca_w_system.load_open_orca": (
        "prompt_completion",
        {"system": "system_prompt", "prompt": "question", "completion": "response"},
    ),
    "oasst": ("prompt_completion", {"prompt": "INSTRUCTION", "completion": "RESPONSE"}),
}
"""ALTO's form of rows and the names of its columns, by Axolotl's ``type`` of a dataset with instructions."""

_PAIR_TYPES: Mapping[str, Mapping[str, str]] = {
    "intel": {"prompt": "question"},
    "icr": {"prompt": "input"},
    "prompt_pairs": {"prompt": "prompt"},
    "ultra": {"prompt": "prompt"},
    "argilla": {},
    "argilla_chat": {},
}
"""Columns of pairs, by the second part of Axolotl's ``type`` (``template.name``)."""

_PROMPTS = {"argilla": "instruction", "intel": "question", "icr": "input", "prompt_pairs": "prompt", "ultra": "prompt"}
_LABELLED_TYPES: Mapping[str, Mapping[str, str]] = {
    **{name: {"prompt": prompt, "completion": "completion", "label": "label"} for name, prompt in _PROMPTS.items()},
    "argilla_chat": {"messages": "completion", "label": "label"},
}
"""Columns of labelled replies, by the second part of Axolotl's ``type`` (``template.name``)."""

_CUSTOM_FIELDS = {"field_instruction": "prompt", "field_output": "completion", "field_system": "system"}
_FIELDS: Mapping[str, Mapping[str, str]] = {
    "messages": {"field_messages": "messages", "field_tools": "tools"},
    "sharegpt": {"field_messages": "messages"},
    "text": {"field": "text"},
    "prompt_completion": _CUSTOM_FIELDS,
    "raw_prompt_completion": _CUSTOM_FIELDS,
    "alpaca": {
        "field_instruction": "instruction",
        "field_input": "input",
        "field_output": "output",
        "field_system": "system",
    },
    "preference": {f"field_{role}": role for role in ("prompt", "chosen", "rejected", "system")},
    "unpaired_preference": {f"field_{role}": role for role in ("prompt", "completion", "label", "system")},
}
"""For every form of rows: ALTO's names of columns, by Axolotl's keys in a dataset's entry or in its custom type."""

_NAMED_TYPES: Mapping[str, Mapping[str, Any]] = {
    "messages": {"type": "chat_template", "field_messages": "messages"},
    "sharegpt": {
        "type": "chat_template",
        "field_messages": "conversations",
        "message_property_mappings": {"role": "from", "content": "value"},
    },
    "text": {"type": "completion", "field": "text"},
}
"""Keys to write for forms of rows with a named ``type``, if the columns have their usual names."""

NAMED_TYPES = tuple(_NAMED_TYPES)
"""Forms of rows with a named ``type``; the other forms are written as a custom type."""

_LEGACY_KEYS = {"role": "message_field_role", "content": "message_field_content"}

_REPORTED = {
    "revision": "the latest revision is read; download a different revision, and name the file",
    "input_transform": "put the rows in their final form",
    "drop_system_message": "remove the message from the rows",
    "message_field_training": "a message with weight: 0 in the rows is shown and not trained",
    "message_field_training_detail": "a message is trained as a whole or not at all",
    "split_thinking": "every key of a message, such as reasoning_content, reaches the chat template",
    "field_thinking": "every key of a message, such as reasoning_content, reaches the chat template",
    "shards": "set max_samples to use a part of the rows",
    "shards_idx": "set max_samples to use a part of the rows",
    "chat_template_jinja": "set it as the task's chat_template",
    "train_on_eot": "of the tokens that end messages, only those of trained replies are trained",
    "template_thinking_key": "every key of a message, such as reasoning_content, reaches the chat template",
    "logprobs_field": "jobs are trained with the losses of ALTO's methods",
    "temperature": "jobs are trained with the losses of ALTO's methods",
}
"""Keys of a dataset that change its rows or the training on them, and what to do instead."""

_UNNEEDED = {
    "ds_type": "the ending of a file's name says its format",
    "trust_remote_code": "no code of a dataset is run",
    "preprocess_shards": "rows are tokenised once for all jobs",
}
"""Keys of a dataset that do not affect training, and why."""

_KEYS = (
    *("path", "name", "type", "split", "data_files", "field", "chat_template", "roles", "roles_to_train"),
    *("train_on_eos", "field_messages", "field_tools", "field_chosen", "field_rejected", "message_property_mappings"),
    *("message_field_role", "message_field_content", *_REPORTED, *_UNNEEDED),
)
_TYPE_KEYS = (
    *("system_prompt", "system_format", "field_system", "field_instruction", "field_input", "field_output", "format"),
    *("no_input_format", "field_prompt", "field_chosen", "field_rejected", "field_completion", "field_label"),
    *("prompt_format", "chosen_format", "rejected_format", "completion_format"),
)


def read_datasets(draft: Draft, method: Method) -> None:
    """Read ``datasets`` and ``test_datasets``."""
    if draft.replaces_dataset("datasets", "test_datasets"):
        return
    given, held_out = draft.take("datasets"), draft.take("test_datasets")
    sources = [
        _source(draft, entry, f"datasets[{index}]", method) for index, entry in enumerate(_listed(given, "datasets"))
    ]
    if not sources:
        return
    put_sources(draft, sources, "datasets")
    if all(source.form == "text" for source in sources):
        draft.given.pop("train_on_inputs", None)
    tests = [
        _source(draft, entry, f"test_datasets[{index}]", method)
        for index, entry in enumerate(_listed(held_out, "test_datasets"))
    ]
    if len(tests) == 1 and len(sources) == 1 and _are_alike(tests[0], sources[0]):
        draft.put("validation_dataset", tests[0].path)
        draft.used("test_datasets", "validation_dataset, on which jobs are compared")
    elif tests:
        draft.not_supported(
            "test_datasets",
            "validation rows must be one dataset with the form, the columns and the split 'train' of the training "
            "rows: convert them, and set validation_dataset",
        )


def _are_alike(first: ImportedSource, second: ImportedSource) -> bool:
    is_readable = first.is_file or (first.has_usual_split and first.config is None)
    return is_readable and (first.form, first.columns) == (second.form, second.columns)


def _listed(given: object, key: str) -> list[Any]:
    if given is None:
        return []
    if not isinstance(given, list) or not all(isinstance(entry, Mapping) for entry in given):
        raise SpecError(f"{key}: expected a list of mappings with path and type, found {quoted(given)}. Correct it.")
    return given


def _source(draft: Draft, entry: Mapping[str, Any], where: str, method: Method) -> ImportedSource:
    form, columns = _form(draft, entry, where, method)
    for key, text in _REPORTED.items():
        if entry.get(key) not in (None, False):
            draft.not_supported(f"{where}.{key}", text)
    for key, text in _UNNEEDED.items():
        if entry.get(key) not in (None, False):
            draft.not_needed(f"{where}.{key}", text)
    draft.report_unread(entry, _KEYS, where)
    if isinstance(entry.get("type"), Mapping):
        draft.report_unread(entry["type"], _TYPE_KEYS, f"{where}.type")
    template = entry.get("chat_template")
    if template not in (None, "tokenizer_default") and (template != "jinja" or not entry.get("chat_template_jinja")):
        draft.not_supported(
            f"{where}.chat_template",
            "rows are written by the chat template of the model's tokenizer; to use a different template, set the "
            "task's chat_template to its Jinja text",
        )
    split = _split(draft, entry.get("split"), where)
    return ImportedSource(
        path=_path(draft, entry, where), form=form, columns=columns, config=entry.get("name"), split=split
    )


def _split(draft: Draft, given: object, where: str) -> str | None:
    """Return the name of a split; a slice of it (``train[:10%]``) is reported as not supported."""
    if given is None:
        return None
    if not isinstance(given, str) or "+" in given:
        raise UnsupportedError(
            f"{where}.split: expected the name of a split, found {quoted(given)}. Use one entry of datasets per split."
        )
    name, is_part, part = given.partition("[")
    if is_part:
        draft.not_supported(
            f"{where}.split",
            f"{quoted('[' + part)} is a part of the split: all rows of the split are used; max_samples draws fewer",
        )
    return name


def _path(draft: Draft, entry: Mapping[str, Any], where: str) -> str:
    path, files = entry.get("path"), entry.get("data_files")
    if files is None:
        return readable_path(draft, path, where)
    files = [files] if isinstance(files, str) else files
    if not isinstance(files, list) or len(files) != 1:
        raise UnsupportedError(
            f"{where}.data_files: expected one file, found {quoted(files)}. Use one entry of datasets per file."
        )
    if path in BUILDERS:
        return readable_path(draft, files[0], f"{where}.data_files")
    inside = draft.locate(f"{path}/{files[0]}")
    if inside == f"{path}/{files[0]}":
        raise UnsupportedError(
            f"{where}: expected a local file, found {quoted(files[0])} of {quoted(path)}. Download it, and "
            "set path to its path."
        )
    return inside


def _form(draft: Draft, entry: Mapping[str, Any], where: str, method: Method) -> tuple[str, dict[str, str]]:
    kind = entry.get("type")
    if method.entry.is_paired:
        return "preference", _reply_columns(draft, entry, "preference", _PAIR_TYPES, where)
    if method.entry.is_labelled:
        return "unpaired_preference", _reply_columns(draft, entry, "unpaired_preference", _LABELLED_TYPES, where)
    if isinstance(kind, Mapping):
        return _custom(draft, kind, where)
    name = str(kind or "").partition(":")[0]
    if name in ("chat_template", "sharegpt"):
        return _conversation(draft, entry, name, where)
    if name in ("completion", "pretrain"):
        field = entry.get("field", "text")
        draft.used(
            f"{where}.type",
            "dataset_format: text; a text is cut at max_length, while Axolotl splits it into several rows",
        )
        return "text", ({} if field == "text" else {"text": field})
    if name not in _SFT_TYPES:
        raise _unreadable(kind, where, [*_SFT_TYPES, "chat_template", "completion"])
    form, columns = _SFT_TYPES[name]
    draft.used(
        f"{where}.type",
        f"dataset_format: {form}, written by the model's chat template; Axolotl writes its own prompt "
        f"({_OWN_PROMPT}) here",
    )
    return form, dict(columns)


_AS_MESSAGES = "Convert the rows into messages ({role, content}), and set type: chat_template."


def _unreadable(kind: object, where: str, known: list[str], remedy: str = _AS_MESSAGES) -> UnsupportedError:
    return UnsupportedError(
        f"{where}.type: expected one of {', '.join(known)}, found {quoted(kind)}, which ALTO cannot read. {remedy}"
    )


def _conversation(draft: Draft, entry: Mapping[str, Any], kind: str, where: str) -> tuple[str, dict[str, str]]:
    """Return form and columns of rows of messages, and report settings of messages and roles that are not supported."""
    usual = {"role": "from", "content": "value"} if kind == "sharegpt" else {"role": "role", "content": "content"}
    column = entry.get("field_messages") or ("conversations" if kind == "sharegpt" else "messages")
    form = _message_form(entry, usual, where)
    _report_mapped(draft, entry, where)
    trained = checked(entry.get("roles_to_train") or [], list, f"{where}.roles_to_train")
    if not all(role in ("assistant", "gpt", "model") for role in trained):
        draft.not_supported(f"{where}.roles_to_train", "replies are trained; train_on: all trains every token")
    if entry.get("train_on_eos") not in (None, "turn"):
        draft.not_supported(
            f"{where}.train_on_eos", "of the tokens that end messages, only those of trained replies are trained"
        )
    columns = {"messages": column}
    if entry.get("field_tools"):
        columns["tools"] = entry["field_tools"]
    return form, columns


def _message_form(entry: Mapping[str, Any], usual: Mapping[str, str], where: str) -> str:
    where_mapping = f"{where}.message_property_mappings"
    mapping = checked(entry.get("message_property_mappings") or {}, dict, where_mapping)
    keys = {part: mapping.get(part) or entry.get(_LEGACY_KEYS[part]) or usual[part] for part in ("role", "content")}
    roles = entry.get("roles")
    if roles is not None and not isinstance(roles, Mapping):
        raise SpecError(f"{where}.roles: expected a mapping of roles to names, found {quoted(roles)}. Correct it.")
    return message_form(keys["role"], keys["content"], roles or {}, where)


def _report_mapped(draft: Draft, entry: Mapping[str, Any], where: str) -> None:
    """Report other keys of messages that have a different name in the rows."""
    for key, name in (entry.get("message_property_mappings") or {}).items():
        if key not in ("role", "content") and name not in (None, key):
            draft.not_supported(
                f"{where}.message_property_mappings.{key}",
                f"keys of a message reach the chat template under their own names: rename {quoted(name)} in the rows",
            )


def _custom(draft: Draft, kind: Mapping[str, Any], where: str) -> tuple[str, dict[str, str]]:
    """Return form and columns of a custom type, which names its columns and prompt format."""
    if kind.get("system_prompt"):
        draft.not_supported(f"{where}.type.system_prompt", "put the message into the rows, as a column system")
    _report_formats(draft, kind, ("format", "no_input_format", "system_format"), where)
    form = "alpaca" if kind.get("field_input") else "prompt_completion"
    return form, _named_columns(kind, form)


def _reply_columns(
    draft: Draft, entry: Mapping[str, Any], form: str, types: Mapping[str, Mapping[str, str]], where: str
) -> dict[str, str]:
    """Return the columns of pairs or labelled replies.

    Args:
        types: Columns by the second part of Axolotl's ``type`` (``template.name``).
    """
    kind = entry.get("type")
    if isinstance(kind, Mapping):
        return _custom_columns(draft, kind, form, where)
    template, _, name = str(kind or "").partition(".")
    if form == "preference" and template == "chat_template" and name in ("", "default"):
        _message_form(entry, {"role": "role", "content": "content"}, where)
        _report_mapped(draft, entry, where)
        sides = {side: entry.get(f"field_{side}") or side for side in ("chosen", "rejected")}
        return {"prompt": entry.get("field_messages") or "messages", **sides}
    if name not in types:
        known = [f"<template>.{each}" for each in types]
        if form == "preference":
            raise _unreadable(kind, where, ["chat_template.default", *known])
        raise _unreadable(kind, where, known, "Use rows with the columns prompt, completion and label.")
    if template != "chat_template":
        draft.used(
            f"{where}.type",
            f"names of columns; rows are written by the model's chat template, not Axolotl's {quoted(template)}",
        )
    return dict(types[name])


def _custom_columns(draft: Draft, kind: Mapping[str, Any], form: str, where: str) -> dict[str, str]:
    _report_formats(draft, kind, ("prompt_format", "chosen_format", "rejected_format", "completion_format"), where)
    return _named_columns(kind, form)


def _report_formats(draft: Draft, kind: Mapping[str, Any], keys: Iterable[str], where: str) -> None:
    for key in keys:
        if kind.get(key) and kind[key] != "{" + key.removesuffix("_format") + "}":
            draft.not_supported(
                f"{where}.type.{key}",
                "texts are written by the model's chat template; set chat_template to use a different one",
            )


def _named_columns(kind: Mapping[str, Any], form: str) -> dict[str, str]:
    """Return the columns of a custom type by our names; all but the system message have usual names."""
    found = {role: kind.get(key) or key.removeprefix("field_") for key, role in _FIELDS[form].items()}
    system = found.pop("system")
    return {"system": system, **found} if kind.get("field_system") else found


def written_dataset(job: ExportedJob) -> dict[str, Any]:
    """Return the entry of ``datasets`` for the rows of ``job``."""
    task, form = job.task, job.rows.form
    builder = builder_of(task)
    source = {
        "path": str(task.dataset),
        "ds_type": builder,
        "name": None if builder else task.dataset_config,
        "split": None if builder else task.dataset_train_split or "train",
    }
    named = tool_columns("Axolotl", job.rows, _FIELDS)
    kind = {**_NAMED_TYPES[form], **named} if form in NAMED_TYPES else {"type": named}
    return {key: value for key, value in (source | kind).items() if value is not None}
