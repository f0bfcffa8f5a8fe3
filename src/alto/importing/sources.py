"""Datasets of a task and of other tools: conversion of theirs to one source or a mixture, and checks before ours are
written for them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from alto.base import quoted
from alto.errors import UnsupportedError
from alto.importing.draft import Draft, checked
from alto.importing.keys import Rows
from alto.spec import Task, default_name

_BUILDERS: Mapping[str, str] = {
    ".json": "json",
    ".jsonl": "json",
    ".csv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
"""Names of the formats of files in the package ``datasets``, by their suffix."""

BUILDERS = (*dict.fromkeys(_BUILDERS.values()), "text")
"""Names of the formats of files in the package ``datasets``."""

_MAX_NAME_CHARS = 40

_MESSAGE_FORMS = {("role", "content"): "messages", ("from", "value"): "sharegpt"}
_ROLES: Mapping[str, tuple[str, ...]] = {
    "system": ("system", "developer"),
    "user": ("user", "human"),
    "assistant": ("assistant", "gpt", "chatgpt", "model"),
    "tool": ("tool", "function", "observation"),
    "function": ("function_call",),
}
"""Names of speakers in rows, by the role that ALTO gives them."""

_FORMS_OF_TEXTS = ("prompt_completion", "preference", "unpaired_preference")

_ONLY_SHAREGPT = ("human", "gpt", "chatgpt", "model", "observation", "function_call")


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedSource:
    """One dataset of a task, or one source of a mixture.

    Attributes:
        path: A hub dataset, or the absolute path of a file.
        form: Form of the rows (a task's ``dataset_format``).
        weight: Share in a mixture, if the tool sets one.
    """

    path: str
    form: str = "auto"
    columns: Mapping[str, str] = field(default_factory=dict)
    config: str | None = None
    split: str | None = None
    weight: float | None = None

    @property
    def is_file(self) -> bool:
        """Whether the rows are in a local file."""
        return os.path.isabs(self.path)

    @property
    def has_usual_split(self) -> bool:
        """Whether the split is a task's default."""
        return self.split in (None, "train")

    def keys(self) -> dict[str, Any]:
        """Return the task keys of this source that have a value, except the path."""
        # A file has no splits.
        split = None if self.is_file or self.has_usual_split else self.split
        config = None if self.is_file else self.config
        given = {"dataset_config": config, "dataset_train_split": split, "columns": dict(self.columns) or None}
        form = {} if self.form == "auto" else {"dataset_format": self.form}
        return {**form, **{key: value for key, value in given.items() if value is not None}}


def report_split(draft: Draft, source: ImportedSource, key: str) -> None:
    """Report that all rows of a file are used, if the configuration names a split of it."""
    if source.is_file and not source.has_usual_split:
        draft.not_supported(key, "a file has no splits: all of its rows are used; set max_samples for a part of them")


def put_sources(draft: Draft, sources: Sequence[ImportedSource], key: str) -> None:
    """Set the dataset of the task: a single source, or a mixture of several.

    Args:
        key: The tool's key that lists the sources, for the report.
    """
    if len(sources) == 1:
        draft.values.update({"dataset": sources[0].path, **sources[0].keys()})
        return
    entries: list[dict[str, Any]] = []
    for source in sources:
        weight = {} if source.weight is None else {"weight": source.weight}
        entries.append({"path": source.path, "name": _name(source, entries), **weight, **source.keys()})
    draft.put("dataset", entries)
    if all(source.weight is None for source in sources):
        draft.used(
            key,
            "a mixture of equal weights, while the tool joins all rows: for the same shares, set the 'weight' of each "
            "source to its number of rows",
        )


def _name(source: ImportedSource, others: Sequence[Mapping[str, Any]]) -> str:
    taken = {other["name"] for other in others}
    name = default_name(source.path)[:_MAX_NAME_CHARS]
    number = 2
    while name in taken:
        suffix = f"-{number}"
        name = default_name(source.path)[: _MAX_NAME_CHARS - len(suffix)] + suffix
        number += 1
    return name


def readable_path(draft: Draft, path: object, where: str) -> str:
    """Return the name of the dataset ``path`` in a task: the absolute path of a file, or a hub dataset."""
    if not isinstance(path, str) or not path:
        raise UnsupportedError(
            f"{where}: expected the name of a file or of a hub dataset, found {quoted(path)}. Give it with --set "
            "dataset=FILE."
        )
    if re.match(r"[a-z][a-z0-9+.-]*://", path):
        raise UnsupportedError(
            f"{where}: expected a file or a hub dataset, found the address {quoted(path)}. Download the file, and give "
            "it with --set dataset=FILE."
        )
    found = draft.locate(path)
    if os.path.isdir(found):
        raise UnsupportedError(
            f"{where}: expected a file or a hub dataset, found the folder {found}. Give one of its files with --set "
            "dataset=FILE."
        )
    return found


def message_form(role_key: object, content_key: object, roles: Mapping[str, object], where: str) -> str:
    """Return the form of rows whose messages have these keys and speakers.

    Args:
        roles: Names of speakers in the rows, by role.

    Raises:
        SpecError: A key is not text, or the names of speakers are not lists.
        UnsupportedError: ALTO cannot read messages with these keys, or gives a speaker another role.
    """
    keys = (checked(role_key, str, where), checked(content_key, str, where))
    form = _MESSAGE_FORMS.get(keys)
    if form is None:
        raise UnsupportedError(
            f"{where}: expected messages with the keys role and content, or from and value, found {quoted(role_key)} "
            f"and {quoted(content_key)}. Rename them in the rows."
        )
    for role, names in roles.items():
        for name in checked(names, list, f"speakers of {where}"):
            known = _ROLES.get(role, ())
            if name not in known or (form == "messages" and name in _ONLY_SHAREGPT):
                readable = [each for each in known if form == "sharegpt" or each not in _ONLY_SHAREGPT]
                expected = ", ".join(readable) or "none in messages with role and content"
                raise UnsupportedError(
                    f"{where}: expected a known name of the speaker {role} ({expected}), found {quoted(name)}. Rename "
                    "the speaker in the rows."
                )
    return form


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


def builder_of(task: Task) -> str | None:
    """Return the name of the format of the task's file in the package ``datasets``; None for a hub dataset."""
    path = str(task.dataset)
    return _BUILDERS[PurePath(path).suffix] if os.path.isabs(path) else None


def tool_columns(title: str, rows: Rows, forms: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """Return the columns of ``rows`` by the tool's names.

    Args:
        forms: Our names of columns by those of the tool, for every form of rows that the tool reads.

    Raises:
        UnsupportedError: The tool reads no rows of this form, or the columns hold lists of messages, which it would
            treat as text or fail on.
    """
    if rows.form in _FORMS_OF_TEXTS and rows.of_messages:
        raise UnsupportedError(
            f"config: expected texts in the columns of {rows.form}, because {title} reads no other form, found lists "
            "of messages; store each conversation as texts, or as one list in a column messages, and tune with that "
            "file"
        )
    if rows.form not in forms:
        raise UnsupportedError(
            f"config: expected rows in a form that {title} reads, found {rows.form}; convert them into messages, and "
            "tune with that file"
        )
    return {name: rows.columns[role] for name, role in forms[rows.form].items() if role in rows.columns}
