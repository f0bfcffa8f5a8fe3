"""Conversion of other tools' datasets to the dataset of a task: a single one, or the sources of a mixture."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from alto.base import quoted
from alto.errors import UnsupportedError
from alto.importing.draft import Draft, checked
from alto.spec import default_name

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

_ONLY_SHAREGPT = ("human", "gpt", "chatgpt", "model", "observation", "function_call")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One dataset of a task, or one source of a mixture.

    Attributes:
        path: A hub dataset, or the absolute path of a file.
        form: Form of the rows (a task's ``dataset_format``).
        columns: Column names by role.
        config, split: Configuration and split of a hub dataset.
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


def report_split(draft: Draft, source: Source, key: str) -> None:
    """Report that all rows of a file are used, if the configuration names a split of it.

    Args:
        key: The key that names the split.
    """
    if source.is_file and not source.has_usual_split:
        draft.not_supported(key, "a file has no splits: all of its rows are used; write max_samples for a part of them")


def put_sources(draft: Draft, sources: Sequence[Source], key: str) -> None:
    """Set the dataset of the task: a single source, or a mixture of several.

    Args:
        sources: At least one source.
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
            "a mixture of equal weights, while the tool joins all rows: for the same shares, write the number of rows "
            "of each source as its 'weight'",
        )


def _name(source: Source, others: Sequence[Mapping[str, Any]]) -> str:
    taken = {other["name"] for other in others}
    name = default_name(source.path)[:_MAX_NAME_CHARS]
    number = 2
    while name in taken:
        suffix = f"-{number}"
        name = default_name(source.path)[: _MAX_NAME_CHARS - len(suffix)] + suffix
        number += 1
    return name


def readable_path(draft: Draft, path: object, where: str) -> str:
    """Return the name of the dataset ``path`` in a task: the absolute path of a file, or a hub dataset.

    Raises:
        UnsupportedError: It is a folder, a URL, or not text.
    """
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
        role_key, content_key: Keys of a message.
        roles: Names of speakers in the rows, by role.
        where: Location of the dataset, for error messages.

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
