"""Reads configurations of other tools, and creates a task from them."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alto.base import quoted, read_json
from alto.errors import SpecError, UnsupportedError
from alto.importing import axolotl, llamafactory, trl
from alto.importing.draft import Draft, Note
from alto.importing.keys import ExportedJob, ToolFiles
from alto.spec import (
    JOB_ALIASES,
    SETTING_ALIASES,
    TASK_ALIASES,
    TASK_FIELDS,
    JobConfig,
    Method,
    Task,
    find_method,
    overridden,
    read_mapping,
    write_yaml,
    written,
)

# Combination of several configurations into one task: equal values are fixed, different ones form a paired search
# space.


def combined(configurations: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the keys of one task that has a job for each of ``configurations``.

    Args:
        configurations: Task keys of each file, by the file's name.

    Raises:
        SpecError: They differ in a key that must be the same for all jobs of a task, or do not differ at all.
    """
    names, given = list(configurations), list(configurations.values())
    if len(given) == 1:
        return dict(given[0])
    keys = list(dict.fromkeys(key for values in given for key in values))
    apart = [key for key in keys if key in TASK_FIELDS and not _is_same([values.get(key) for values in given])]
    if apart:
        found = "; ".join(f"{key} {', '.join(quoted(values.get(key)) for values in given)}" for key in apart)
        raise SpecError(
            f"{', '.join(names)}: expected configurations of one task, with the same model, dataset and "
            f"other keys that apply to all jobs, found {found}. Import them one by one."
        )
    method = find_method(given[0].get("method", "sft"))
    varied = {}
    for key in keys:
        if key in TASK_FIELDS:
            continue
        column = [values[key] if key in values else _default(key, method) for values in given]
        if not _is_same(column):
            varied[key] = column
    if not varied:
        raise SpecError(f"{', '.join(names)}: expected different configurations, found equal ones. Import one of them.")
    fixed = {key: value for key, value in given[0].items() if key not in varied}
    shared = {key: values[key] for values in given for key in values if key not in varied and key not in fixed}
    space: dict[str, Any] = dict(varied) if len(varied) == 1 else {"paired": varied}
    return {**fixed, **shared, "search_space": space}


def _is_same(values: Sequence[Any]) -> bool:
    return all(value == values[0] for value in values)


def _default(key: str, method: Method) -> Any:
    """Return the default of a job's field, as it is written in a task file."""
    if key == "lora_alpha":
        return "2*r"
    field = method.fields[key] if key in method.fields else JobConfig.model_fields[key]
    return written(key, field.default)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A tool whose configurations are imported and exported.

    Attributes:
        marks: Keys that identify its configurations.
        read: Converts a draft to a task; its second argument is the method that the user named, or None.
        files: Returns the files that make the tool train a job; None if it has no such method.
    """

    title: str
    marks: frozenset[str]
    read: Callable[[Draft, str | None], None]
    files: Callable[[ExportedJob], ToolFiles | None]


TOOLS: Mapping[str, Tool] = {
    "llamafactory": Tool(
        title="LLaMA-Factory",
        marks=llamafactory.MARKS,
        read=llamafactory.read_llamafactory,
        files=llamafactory.llamafactory_files,
    ),
    "axolotl": Tool(title="Axolotl", marks=axolotl.MARKS, read=axolotl.read_axolotl, files=axolotl.axolotl_files),
    "trl": Tool(title="TRL", marks=trl.MARKS, read=trl.read_trl, files=trl.trl_files),
}
"""All tools by their names in the option ``--from``."""


def recognise(keys: Collection[str], where: str) -> Tool:
    """Return the tool that has the most of ``keys`` among its marks; without marks, TRL for keys of a trainer.

    Raises:
        SpecError: No tool has any of the keys, two tools have the same number of them, or the configuration is a W&B
            sweep.
    """
    if {"parameters", "method"} <= set(keys):
        raise SpecError(
            f"{where}: expected a configuration of {', '.join(tool.title for tool in TOOLS.values())}, found a sweep "
            "of W&B. Import the configuration that it varies, and give the sweep's parameters unchanged: --set "
            "'search_space={learning_rate: {distribution: log_uniform_values, min: 1e-5, max: 1e-3}}'."
        )
    counts = {name: len(tool.marks.intersection(keys)) for name, tool in TOOLS.items()}
    most = max(counts.values())
    if most == 0 and trl.TRAINER_MARKS.intersection(keys):
        return TOOLS["trl"]
    best = [name for name, count in counts.items() if count == most]
    if most == 0 or len(best) > 1:
        found = "none of their keys" if most == 0 else f"as many keys of {' as of '.join(best)}"
        raise SpecError(
            f"{where}: expected a configuration of {', '.join(tool.title for tool in TOOLS.values())}, found "
            f"{found}. Name the tool with --from {' or '.join(best)}."
        )
    return TOOLS[best[0]]


_PATHS = ("model", "dataset", "validation_dataset", "test_dataset", "chat_template")
_MAX_BYTES = 2 * 1024**2
_FIELD_ALIASES = {**TASK_ALIASES, **JOB_ALIASES, **SETTING_ALIASES}


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedFile:
    """A configuration file that was read.

    Attributes:
        values: Keys of a task: canonical names, absolute paths of local files.
    """

    path: Path
    tool: Tool
    values: Mapping[str, Any]
    notes: Sequence[Note]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedTask:
    """A task created from configurations.

    Attributes:
        values: Its keys, without keys of the task itself that have default values.
    """

    task: Task
    values: Mapping[str, Any]
    files: Sequence[ImportedFile]

    def to_yaml(self, folder: Path) -> str:
        """Return the text of a task file in ``folder``; paths of local files below ``folder`` are relative to it."""
        sources = ", ".join(f"{quoted(file.path.name)[1:-1]} ({file.tool.title})" for file in self.files)
        values = {key: _relative(key, value, folder.resolve()) for key, value in self.values.items()}
        return f"# Imported by alto from {sources}\n{write_yaml(values)}"


def import_file(path: Path, tool: str | None = None, overrides: Iterable[str] = ()) -> ImportedFile:
    """Read a configuration of another tool.

    Args:
        path: A YAML file, or a JSON file if the name ends in ``.json``.
        tool: Name of the tool; None detects it by the keys.
        overrides: Strings ``key=value``. They are not applied here, but the file's dataset is not read if an override
            names one, and a method among the overrides is used.

    Raises:
        SpecError: The file cannot be read, or is not a configuration of the tool.
        UnsupportedError: It trains something that ALTO cannot train, or has a dataset that ALTO cannot read.
    """
    given = _read(path)
    if tool is not None and tool not in TOOLS:
        raise SpecError(f"--from: expected one of {', '.join(TOOLS)}, found {quoted(tool)}. Use one of these.")
    found = recognise(given, str(path)) if tool is None else TOOLS[tool]
    changes = {_FIELD_ALIASES.get(key, key): value for key, value in overridden({}, overrides).items()}
    replaced = frozenset({*changes, *searched_fields(changes.get("search_space"))})
    method = changes.get("method")
    folders = tuple(dict.fromkeys((path.resolve().parent, Path.cwd())))
    is_json = path.suffix.lower() == ".json"
    draft = Draft(given=given, folders=folders, replaced=replaced, is_of_a_class=is_json)
    try:
        found.read(draft, None if method is None else str(method))
    except (SpecError, UnsupportedError) as error:
        raise type(error)(f"In {path}: {error}") from None
    return ImportedFile(path=path, tool=found, values=draft.values, notes=tuple(draft.notes))


def imported_task(files: Sequence[ImportedFile], overrides: Iterable[str] = ()) -> ImportedTask:
    """Create one task from ``files``; the differences between several files become a search space.

    Args:
        overrides: Strings ``key=value``, as for :func:`alto.spec.load_task`; paths are relative to the current folder.

    Raises:
        SpecError: The configurations cannot be jobs of one task, model or dataset is missing, or :class:`Task` raises
            it.
        UnknownKeyError, ConflictingKeysError, UnsupportedError: See :class:`Task`.
    """
    names = [str(file.path.resolve()) for file in files]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise SpecError(f"{twice}: expected each configuration once, found it twice. Remove one.")
    changes = list(overrides)
    of_space = [change for change in changes if change.strip().startswith("search_space")]
    of_files = [change for change in changes if change not in of_space]
    configurations = {str(file.path): overridden(file.values, of_files) for file in files}
    values = dict(overridden(combined(configurations), of_space))
    searched = set(searched_fields(values.get("search_space", {})))
    values = {key: _absolute_path(key, value) for key, value in values.items() if key not in searched}
    for key in ("model", "dataset"):
        if values.get(key) is None:
            raise SpecError(
                f"{', '.join(configurations)}: expected a {key}, found none. Give it with --set {key}=NAME."
            )
    ordered = {key: values[key] for key in _order(values)}
    return ImportedTask(task=Task(**_without_defaults(ordered)), values=_without_defaults(ordered), files=tuple(files))


def _read(path: Path) -> dict[str, Any]:
    if path.suffix.lower() == ".json":
        try:
            given = read_json(path, _MAX_BYTES)
        except (OSError, ValueError) as error:
            raise SpecError(f"{path}: expected a JSON object in UTF-8, found: {error}. Check the file.") from None
        if not isinstance(given, dict):
            raise SpecError(f"{path}: expected a JSON object, found {quoted(given)}. Name a configuration.")
        return given
    found = read_mapping(path, "configuration", "learning_rate: 1e-4")
    for key in found:
        if not isinstance(key, str):
            raise SpecError(f"{path} should have text for keys, found {quoted(key)}. Put the key in quotes.")
    return found


def searched_fields(space: object) -> Iterator[str]:
    """Yield the canonical names of the fields in a search space, as it is written in a task file."""
    if isinstance(space, list):
        for pairing in space:
            yield from searched_fields(pairing)
    elif isinstance(space, Mapping):
        for key, value in space.items():
            if key == "paired":
                yield from searched_fields(value)
            else:
                yield _FIELD_ALIASES.get(str(key), str(key))


def _order(values: Mapping[str, Any]) -> list[str]:
    """Return the keys in the order of a task file: those of the task itself, those of jobs, then the search space."""
    last = ("early_exit", "search", "search_space")
    own = [key for key in TASK_FIELDS if key in values and key not in last]
    rest = [key for key in values if key not in own and key not in last]
    return [*own, *rest, *(key for key in last if key in values)]


def _without_defaults(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``values`` without keys of the task itself that have default values."""
    kept = {}
    for key, value in values.items():
        field = Task.model_fields.get(key)
        if field is None or field.is_required() or key == "method" or value != field.default:
            kept[key] = value
    return kept


def _absolute_path(key: str, value: Any) -> Any:
    """Return the absolute path if ``value`` is a path in an override, which is relative to the current folder."""
    if key not in _PATHS or not isinstance(value, str) or (key == "model" and not value.startswith(("./", "../"))):
        return value
    try:
        return str(Path(value).resolve()) if Path(value).exists() else value
    except OSError:  # not a valid file name, for example the text of a chat template
        return value


def _relative(key: str, value: Any, folder: Path) -> Any:
    if key == "dataset" and isinstance(value, list):
        return [
            {name: _relative("dataset" if name == "path" else name, item, folder) for name, item in entry.items()}
            for entry in value
        ]
    if key not in _PATHS or not isinstance(value, str) or not os.path.isabs(value):
        return value
    if not Path(value).is_relative_to(folder):
        return value
    inside = Path(value).relative_to(folder).as_posix()
    return f"./{inside}" if key == "model" else inside
