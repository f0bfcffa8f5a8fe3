"""Reading of tasks from YAML files, with overrides from the command line."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from alto.base import quoted
from alto.errors import ConflictingKeysError, SpecError, UnsupportedError
from alto.spec.data_keys import is_template_name, is_template_text
from alto.spec.early_exit import EarlyExit
from alto.spec.keys import JOB_ALIASES, TASK_ALIASES
from alto.spec.method import SETTING_ALIASES
from alto.spec.strict_yaml import NotYamlError, read_yaml
from alto.spec.task import TASK_FIELDS, Task

_ALIASES = {**JOB_ALIASES, **TASK_ALIASES, **SETTING_ALIASES}

_DATA_SUFFIXES = (".csv", ".tsv", ".jsonl", ".ndjson", ".json", ".parquet", ".txt")
_MAX_BYTES = 2 * 1024**2
_MAX_OVERRIDE_KEYS = 8


def load_task(path: str | os.PathLike[str], overrides: Iterable[str] = ()) -> Task:
    """Read a task from a YAML file.

    Paths in the file are relative to the file: ``dataset``, ``validation_dataset``, ``test_dataset``,
    ``chat_template`` and ``init_adapter`` if such a file or folder exists, and ``model`` if it begins with ``./`` or
    ``../``. A path that does not exist there is left unchanged. Paths in an override are relative to the current
    directory.

    Args:
        overrides: ``key=value`` texts, applied in order. Dots lead into nested settings
            (``early_exit.policy=paper``, ``search_space.lr=[1e-4, 2e-4]``); the value is YAML. An override replaces
            the field under any of its spellings, and fixes a job's field that the file varies in its search space. If
            several have the same spelling, the last counts; two spellings of one key are an error.

    Raises:
        SpecError: The file does not exist, is not YAML or not a mapping; or an override or the task is invalid.
        UnknownKeyError, ConflictingKeysError, UnsupportedError: See :class:`Task`.
    """
    path = Path(path)
    written = _resolve_paths(read_mapping(path, "task", "model: alto-tiny"), path.parent)
    given = list(overrides)
    values = overridden(written, given)
    try:
        return _task(path, values)
    except (SpecError, UnsupportedError) as error:
        if given and str(error) != _fault_of(path, written):
            what = str(error).removeprefix(f"In {path}: ")
            raise type(error)(f"In {path} with {' '.join(f'--set {quoted(each)}' for each in given)}: {what}") from None
        raise


def _fault_of(path: Path, written: Mapping[Any, Any]) -> str:
    """Return the error message of the file without overrides; empty if it is valid."""
    try:
        _task(path, written)
    except (SpecError, UnsupportedError) as error:
        return str(error)
    return ""


def read_run_task(path: str | os.PathLike[str]) -> Task:
    """Read the ``task.yaml`` in the folder of a run. A run of version 0.1 keeps that version's defaults."""
    path = Path(path)
    values = _resolve_paths(read_mapping(path, "task", "model: alto-tiny"), path.parent)
    early_exit = values.get("early_exit")
    if isinstance(early_exit, dict) and all(isinstance(key, str) for key in early_exit):
        try:
            values["early_exit"] = EarlyExit.of_run(early_exit)
        except SpecError as error:
            raise type(error)(f"In {path}: early_exit.{error}") from None
    return _task(path, values)


def _task(path: Path, values: Mapping[Any, Any]) -> Task:
    for key in values:
        if not isinstance(key, str):
            raise SpecError(f"{path} should have text as keys, found {quoted(key)}. Put the key in quotes.")
    try:
        return Task(**values)
    except (SpecError, UnsupportedError) as error:
        raise type(error)(f"In {path}: {error}") from None


def build_task(values: Mapping[str, Any], overrides: Iterable[str] = ()) -> Task:
    """Build the task of ``values`` with ``overrides`` applied; see :func:`load_task` for overrides and errors."""
    return Task(**overridden(values, overrides))


def read_mapping(path: Path, kind: str, example: str) -> dict[Any, Any]:
    """Read the keys and values of a YAML file.

    Args:
        kind: Kind of the file, for messages.
        example: A line of such a file, for messages.

    Raises:
        SpecError: The file does not exist, is too large, empty, not YAML, or not a mapping.
    """
    looks_like_rows = kind == "task" and path.suffix.lower() in _DATA_SUFFIXES
    try:
        with path.open("rb") as file:  # read a bounded part: the path may be a pipe that never ends
            data = file.read(_MAX_BYTES + 1)
        text = data.decode("utf-8-sig") if len(data) <= _MAX_BYTES else None
    except FileNotFoundError:
        raise SpecError(f"{path} should be a {kind} file, found no such file. Check the path.") from None
    except (OSError, UnicodeDecodeError) as error:
        if looks_like_rows and isinstance(error, UnicodeDecodeError):
            raise _rows_for_a_task(path) from None
        raise SpecError(f"{path} should be a readable YAML file in UTF-8, found: {error}. Check the file.") from None
    if text is None:
        raise SpecError(
            f"{path} should be a {kind} file of at most {_MAX_BYTES} bytes, found more. Check whether it is the right "
            "file: rows belong in a separate dataset, and a search space with many values is sampled: {min, max, num}."
        )
    try:
        values = read_yaml(text)
    except NotYamlError as error:
        if looks_like_rows:
            raise _rows_for_a_task(path) from None
        raise SpecError(f"{path} should be valid YAML, found: {error}. Correct the file at that place.") from None
    if values is None:
        raise SpecError(f"{path} should describe a {kind}, found an empty file. Write lines such as '{example}'.")
    if not isinstance(values, dict):
        if looks_like_rows:
            raise _rows_for_a_task(path)
        raise SpecError(
            f"{path} should map keys to values, found a {type(values).__name__} at the top. "
            f"Write lines such as '{example}'."
        )
    return values


def _rows_for_a_task(path: Path) -> SpecError:
    return SpecError(
        f"{path} should be a task file, found what looks like a dataset. Write a task file with the lines "
        f"'model: alto-tiny' and 'dataset: {path.name}', and give that."
    )


def _resolve_paths(values: Mapping[Any, Any], folder: Path) -> dict[Any, Any]:
    return {key: _resolve_path(_ALIASES.get(key, key), value, folder) for key, value in values.items()}


def _resolve_path(field: object, value: Any, folder: Path) -> Any:
    if field == "dataset" and isinstance(value, list):
        return [_resolve_source(item, folder) for item in value]
    if (
        field not in ("model", "dataset", "validation_dataset", "test_dataset", "chat_template", "init_adapter")
        or not isinstance(value, str)
        or not value
    ):
        return value
    if field == "model":
        return os.path.abspath(folder / value) if value.startswith(("./", "../")) else value
    if field == "chat_template" and (is_template_text(value) or is_template_name(value)):
        return value
    candidate = folder / value
    try:
        return os.path.abspath(candidate) if candidate.exists() else value
    except OSError:  # the name is too long, or the folder may not be read
        return value


def _resolve_source(item: Any, folder: Path) -> Any:
    if not isinstance(item, Mapping):
        return item
    paths = ("path", "dataset", "validation_dataset")
    return {key: _resolve_path("dataset", value, folder) if key in paths else value for key, value in item.items()}


def overridden(values: Mapping[Any, Any], overrides: Iterable[str]) -> Mapping[Any, Any]:
    """Apply ``key=value`` overrides to ``values`` in order; see :func:`load_task`.

    Raises:
        ConflictingKeysError: Two overrides name one key by different spellings.
        SpecError: An override is invalid.
    """
    spelled: dict[tuple[str, ...], str] = {}
    for override in overrides:
        values = _override(values, override)
        keys = [key.strip() for key in override.partition("=")[0].split(".")]
        written = ".".join(keys)
        earlier = spelled.setdefault(tuple(_ALIASES.get(key, key) for key in keys), written)
        if earlier != written:
            raise ConflictingKeysError(
                f"The overrides should use one spelling of a key, found both {quoted(earlier)} and {quoted(written)}. "
                "Remove one."
            )
    return values


def parse_override(override: str) -> tuple[str, Any]:
    """Split ``key=value`` into the key and its value, which is parsed as YAML.

    Raises:
        SpecError: ``override`` is not of that form, or the value is not YAML.
    """
    dotted, equals, text = override.partition("=")
    if not equals or not all(key.strip() for key in dotted.split(".")):
        raise SpecError(f"An override should be key=value, found {quoted(override)}. For example: early_exit=false.")
    try:
        return dotted.strip(), read_yaml(text)
    except NotYamlError as error:
        raise SpecError(
            f"The value of the override {quoted(override)} should be valid YAML, found: {error}. Put text in quotes."
        ) from None


def _override(values: Mapping[Any, Any], override: str) -> dict[Any, Any]:
    dotted, value = parse_override(override)
    keys = [key.strip() for key in dotted.split(".")]
    if len(keys) > _MAX_OVERRIDE_KEYS:
        raise SpecError(
            f"The override {quoted(override)} should name a key, found {len(keys)} nested keys. No setting is nested "
            "so deeply; correct it."
        )
    if len(keys) == 1:
        values = _without_search(values, _ALIASES.get(keys[0], keys[0]))
    return _with_value(values, keys, value, override)


def _without_search(values: Mapping[Any, Any], field: str) -> dict[Any, Any]:
    """Remove ``field``, which an override fixes, from the search space."""
    space = values.get("search_space")
    if field in TASK_FIELDS or not isinstance(space, Mapping):
        return dict(values)
    return {**values, "search_space": {key: v for key, v in space.items() if _ALIASES.get(key, key) != field}}


def _with_value(values: Mapping[Any, Any], keys: list[str], value: Any, override: str) -> dict[Any, Any]:
    """Return a copy of ``values`` with ``value`` at the end of the path ``keys``; the field keeps its place."""
    field = _ALIASES.get(keys[0], keys[0])
    spelling = keys[0] if keys[0] in JOB_ALIASES or keys[0] in TASK_ALIASES else field
    written = next((key for key in values if _ALIASES.get(key, key) == field), spelling)
    if len(keys) > 1:
        inner = values.get(written, {})
        # `early_exit: true` means the default settings.
        inner = {} if inner is True or inner is None else inner
        if not isinstance(inner, Mapping):
            raise SpecError(
                f"The override {quoted(override)} reaches into {keys[0]!r}, expected a mapping there, found "
                f"{quoted(inner)}. Override {keys[0]!r} as a whole."
            )
        value = _with_value(inner, keys[1:], value, override)
    return {**values, written: value}
