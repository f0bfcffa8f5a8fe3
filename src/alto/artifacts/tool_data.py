"""Converts a task's dataset keys to those of TRL, Axolotl and LLaMA-Factory; the reverse is
:mod:`alto.importing.sources`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from alto.errors import UnsupportedError
from alto.spec import Task

_BUILDERS: Mapping[str, str] = {
    ".json": "json",
    ".jsonl": "json",
    ".csv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
_FORMS_OF_TEXTS = ("prompt_completion", "preference", "unpaired_preference")
NAMED_TYPES = ("messages", "sharegpt", "text")
"""Forms of rows that have a named ``type`` in Axolotl; other forms are written as a custom type."""

_TAGS = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The layout of a task's rows.

    Attributes:
        name: A name for the dataset.
        form: Form of the rows (a task's ``dataset_format``).
        columns: Column names by role.
        of_messages: Whether replies are lists of messages instead of texts; None if unknown.
    """

    name: str
    form: str
    columns: Mapping[str, str] = field(default_factory=dict)
    of_messages: bool | None = None


def check_dataset(task: Task) -> None:
    """Check that other tools can read the dataset of ``task``.

    Raises:
        UnsupportedError: It is a mixture, a preset, or a file in a format that the package ``datasets`` cannot read.
    """
    if task.sources:
        raise UnsupportedError(
            f"config: expected a task with one dataset, found a mixture of {len(task.sources)} sources, whose weights "
            "other tools read differently; export the configuration of a run on one source, or write the file by hand"
        )
    dataset = str(task.dataset)
    if not os.path.isabs(dataset) and "/" not in dataset:
        raise UnsupportedError(
            f"config: expected a dataset in a file or on the hub (owner/name), found {dataset!r}, a name that "
            "other tools do not know; tune with dataset: owner/name"
        )
    if os.path.isabs(dataset) and PurePath(dataset).suffix not in _BUILDERS:
        raise UnsupportedError(
            f"config: expected a dataset in a file of the kinds {', '.join(_BUILDERS)}, found {dataset}; convert it, "
            "and tune with that file"
        )


def trl_dataset(task: Task) -> dict[str, Any]:
    """Return the keys of TRL that name the dataset."""
    path = str(task.dataset)
    if os.path.isabs(path):
        source = [{"path": _builder(path), "data_files": path, "split": "train"}]
        return {"datasets": source, "test_split_size": task.validation_split}
    return {
        "dataset_name": path,
        "dataset_config": task.dataset_config,
        "dataset_train_split": task.dataset_train_split,
        "dataset_test_split": task.dataset_test_split,
    }


def axolotl_dataset(task: Task, rows: Rows) -> dict[str, Any]:
    """Return the entry of Axolotl's ``datasets``."""
    path = str(task.dataset)
    if os.path.isabs(path):
        source: dict[str, Any] = {"path": path, "ds_type": _builder(path)}
    else:
        source = {"path": path, "name": task.dataset_config, "split": task.dataset_train_split or "train"}
    kind = _axolotl_type(rows)
    return {key: value for key, value in (source | kind).items() if value is not None}


def _axolotl_type(rows: Rows) -> dict[str, Any]:
    column = dict(rows.columns)
    _check_texts("Axolotl", rows)
    match rows.form:
        case "messages":
            tools = {"field_tools": column["tools"]} if "tools" in column else {}
            return {"type": "chat_template", "field_messages": column.get("messages", "messages"), **tools}
        case "sharegpt":
            mapping = {"role": "from", "content": "value"}
            messages = column.get("messages", "conversations")
            return {"type": "chat_template", "field_messages": messages, "message_property_mappings": mapping}
        case "text":
            return {"type": "completion", "field": column.get("text", "text")}
        case "prompt_completion" | "raw_prompt_completion":
            return {"type": _fields(column, {"prompt": "instruction", "completion": "output", "system": "system"})}
        case "alpaca":
            roles = {"instruction": "instruction", "input": "input", "output": "output", "system": "system"}
            return {"type": _fields(column, roles)}
        case "preference":
            return {"type": _fields(column, {role: role for role in ("prompt", "chosen", "rejected", "system")})}
        case "unpaired_preference":
            return {"type": _fields(column, {role: role for role in ("prompt", "completion", "label", "system")})}
    raise _unreadable("Axolotl", rows)


def _fields(columns: Mapping[str, str], names: Mapping[str, str]) -> dict[str, str]:
    return {f"field_{name}": columns[role] for role, name in names.items() if role in columns}


def llamafactory_info(task: Task, rows: Rows) -> dict[str, Any]:
    """Return the entry of LLaMA-Factory's ``dataset_info.json``."""
    path = str(task.dataset)
    if os.path.isabs(path):
        source: dict[str, Any] = {"file_name": path}
    else:
        source = {"hf_hub_url": path, "subset": task.dataset_config, "split": task.dataset_train_split}
    found = source | _llamafactory_form(rows)
    return {key: value for key, value in found.items() if value is not None}


def _llamafactory_form(rows: Rows) -> dict[str, Any]:
    column, extras = dict(rows.columns), ("system", "tools")
    kept = {role: column[role] for role in extras if role in column}
    _check_texts("LLaMA-Factory", rows)
    match rows.form:
        case "messages":
            messages = {"messages": column.get("messages", "messages"), **kept}
            return {"formatting": "sharegpt", "columns": messages, "tags": {**_TAGS, "system_tag": "system"}}
        case "sharegpt":
            return {"formatting": "sharegpt", "columns": {"messages": column.get("messages", "conversations"), **kept}}
        case "preference":
            names = {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"}
            return {"ranking": True, "columns": _roles(column, names) | kept}
        case "unpaired_preference":
            names = {"prompt": "prompt", "response": "completion", "kto_tag": "label"}
            return {"columns": _roles(column, names) | kept}
        case "alpaca":
            names = {"prompt": "instruction", "query": "input", "response": "output", "history": "history"}
            return {"formatting": "alpaca", "columns": _roles(column, names) | kept}
        case "prompt_completion" | "raw_prompt_completion":
            names = {"prompt": "prompt", "response": "completion"}
            return {"formatting": "alpaca", "columns": _roles(column, names) | kept}
    raise _unreadable("LLaMA-Factory", rows)


def _check_texts(title: str, rows: Rows) -> None:
    """Check that columns hold texts if the form of the rows needs texts.

    Raises:
        UnsupportedError: The columns hold lists of messages, which the tool would treat as text or fail on.
    """
    if rows.form in _FORMS_OF_TEXTS and rows.of_messages:
        raise UnsupportedError(
            f"config: expected texts in the columns of {rows.form}, because {title} reads no other form, found lists "
            "of messages; write each conversation as texts, or as one list in a column messages, and tune with that "
            "file"
        )


def _unreadable(title: str, rows: Rows) -> UnsupportedError:
    return UnsupportedError(
        f"config: expected rows in a form that {title} reads, found {rows.form}; convert them into messages, and tune "
        "with that file"
    )


def _roles(columns: Mapping[str, str], names: Mapping[str, str]) -> dict[str, str]:
    return {name: columns[role] for name, role in names.items() if role in columns}


def _builder(path: str) -> str:
    return _BUILDERS[PurePath(path).suffix]
