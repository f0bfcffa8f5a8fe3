"""Tasks from YAML files, with changes from the command line."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from alto.errors import SpecError, UnsupportedError
from alto.spec.keys import JOB_ALIASES, TASK_ALIASES
from alto.spec.task import Task

__all__ = ["load_task"]

_ALIASES = {**JOB_ALIASES, **TASK_ALIASES}

# PyYAML lets Python's own errors through for what looks like a date or a number and is none: 2024-13-45.
_NOT_YAML = (yaml.YAMLError, ValueError)


class _StrictLoader(yaml.SafeLoader):
    """YAML in which a key given twice is an error instead of a loss."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[object] = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode) or key_node.value == "<<":
                continue
            if key_node.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key_node.value!r} is given twice", key_node.start_mark
                )
            seen.add(key_node.value)
        return super().construct_mapping(node, deep)


class _OverrideLoader(_StrictLoader):
    """As above, and ``1e-4`` is a number, as on every other command line."""


_OverrideLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(?:\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def load_task(path: str | os.PathLike[str], overrides: Iterable[str] = ()) -> Task:
    """Read a task from a YAML file.

    A path in the file is taken relative to the file: ``dataset`` and ``validation_dataset`` where such a file or
    folder exists, ``model`` where it is written with a leading ``./`` or ``../``. What does not exist there is left
    as written. A path in an override is taken relative to the current directory, as any on a command line.

    Args:
        path: The file.
        overrides: ``key=value`` each, applied in order. Dots lead into nested settings
            (``early_exit.policy=paper``, ``search_space.lr=[1e-4, 2e-4]``); the value is YAML in which ``1e-4`` is a
            number. An override replaces the field whichever of its spellings the file uses.

    Raises:
        SpecError: No such file, no YAML, not a mapping, an override that is none, or a task that is not valid.
        UnknownKeyError, ConflictingKeysError, UnsupportedError: As :class:`Task` does.
    """
    path = Path(path)
    values = _resolve_paths(_read(path), path.parent)
    for override in overrides:
        values = _override(values, override)
    for key in values:
        if not isinstance(key, str):
            raise SpecError(f"{path} should have text for keys, found {key!r}. Put the key in quotes.")
    try:
        return Task(**values)
    except (SpecError, UnsupportedError) as error:
        raise type(error)(f"In {path}: {error}") from None


def _read(path: Path) -> dict[Any, Any]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise SpecError(f"{path} should be a task file, found no such file. Check the path.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"{path} should be a readable YAML file in UTF-8, found: {error}. Check the file.") from None
    try:
        values = yaml.load(text, Loader=_StrictLoader)
    except _NOT_YAML as error:
        raise SpecError(f"{path} should be valid YAML, found: {error}. Correct the file at that place.") from None
    if values is None:
        raise SpecError(f"{path} should describe a task, found an empty file. Give at least 'model' and 'dataset'.")
    if not isinstance(values, dict):
        raise SpecError(
            f"{path} should map keys to values, found a {type(values).__name__} at the top. "
            f"Write lines such as 'model: alto-tiny'."
        )
    return values


def _resolve_paths(values: Mapping[Any, Any], folder: Path) -> dict[Any, Any]:
    return {key: _resolve_path(_ALIASES.get(key, key), value, folder) for key, value in values.items()}


def _resolve_path(field: object, value: Any, folder: Path) -> Any:
    if field not in ("model", "dataset", "validation_dataset") or not isinstance(value, str) or not value:
        return value
    if field == "model":
        return os.path.abspath(folder / value) if value.startswith(("./", "../")) else value
    candidate = folder / value
    return os.path.abspath(candidate) if candidate.exists() else value


def _override(values: Mapping[Any, Any], override: str) -> dict[Any, Any]:
    dotted, equals, text = override.partition("=")
    keys = [key.strip() for key in dotted.split(".")]
    if not equals or not all(keys):
        raise SpecError(f"An override should be key=value, found {override!r}. Write for example early_exit=false.")
    try:
        value = yaml.load(text, Loader=_OverrideLoader)
    except _NOT_YAML as error:
        raise SpecError(
            f"The value of the override {override!r} should be valid YAML, found: {error}. Put text in quotes."
        ) from None
    return _with_value(values, keys, value, override)


def _with_value(values: Mapping[Any, Any], keys: list[str], value: Any, override: str) -> dict[Any, Any]:
    """A copy of ``values`` with ``value`` at the end of the path ``keys``; the field keeps its place."""
    field = _ALIASES.get(keys[0], keys[0])
    written = next((key for key in values if _ALIASES.get(key, key) == field), field)
    if len(keys) > 1:
        inner = values.get(written, {})
        # `early_exit: true` stands for the settings' defaults.
        inner = {} if inner is True or inner is None else inner
        if not isinstance(inner, Mapping):
            raise SpecError(
                f"The override {override!r} reaches into {keys[0]!r}, expected a mapping there, found {inner!r}. "
                f"Override {keys[0]!r} as a whole."
            )
        value = _with_value(inner, keys[1:], value, override)
    return {**values, written: value}
