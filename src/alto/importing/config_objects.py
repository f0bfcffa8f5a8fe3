"""Import of configuration objects: PEFT's ``LoraConfig``, transformers' ``TrainingArguments``, and TRL's subclasses.

Objects are recognised by the names of package and class, so that these packages need not be installed, and are then
read like TRL's files.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

from alto.base import quoted
from alto.errors import ConflictingKeysError, SpecError, UnsupportedError
from alto.importing.draft import Draft, Note, NoteKind
from alto.importing.imported import searched_fields
from alto.importing.keys import KeyTable
from alto.importing.trl import FORM, read_adapter, read_trl
from alto.spec import (
    AUTO,
    JOB_ALIASES,
    SETTING_ALIASES,
    TASK_ALIASES,
    SearchSpace,
    auto_space,
    find_method,
    first_row,
    is_object_name,
)

_METHODS: Mapping[str, str] = {
    "SFTConfig": "sft",
    "DPOConfig": "dpo",
    "KTOConfig": "kto",
    "ORPOConfig": "orpo",
    "CPOConfig": "cpo",
}
"""Methods by TRL's configuration classes."""

_ADAPTER, _ARGUMENTS = "LoraConfig", "TrainingArguments"
_ALIASES = {**TASK_ALIASES, **JOB_ALIASES, **SETTING_ALIASES}
_TOKENS = "_token"
"""Suffix of the keys whose values ``to_dict`` of transformers hides."""

_NOTHING = KeyTable(keys=())

_BELONGING: Mapping[str, tuple[str, ...]] = {
    "warmup_ratio": ("warmup_steps",),
    "warmup_steps": ("warmup_ratio",),
    "num_train_epochs": ("max_steps",),
    "lr_scheduler_type": ("lr_scheduler_kwargs",),
    "optim": ("optim_args",),
    "loss_type": ("loss_weights",),
}
"""For each field, other fields that are ignored if the user overrides it."""

_PRECISIONS = ("bf16", "fp16")
_HARMLESS = ("report_to",)
"""Settings that do not affect training, even if ALTO does not support all of their values."""

_TEXT_COLUMNS = ("prompt", "completion", "chosen", "rejected")


def read_config_objects(configs: Sequence[object], values: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the keys of a task, including those that ``configs`` set, and notes on settings that are not imported
    unchanged.

    The task trains as the trainer would: every setting has the object's value, even if this is a default.

    Args:
        configs: At most one configuration of an adapter, and one of a trainer.
        values: Keys that the user sets, in any spelling; they and the search space take precedence over ``configs``.

    Raises:
        SpecError: An object is not a known configuration, or there are two of one kind.
        ConflictingKeysError: The user names a method that the trainer does not train.
        UnsupportedError: Settings with non-default values would affect training, and ALTO does not have them (the
            message lists all); or a configuration is for an unsupported trainer or adapter.
    """
    adapter, arguments = _sorted(configs)
    overruled = _overruled(values)
    given, defaults = _given(adapter, arguments)
    changed = {key for key, value in given.items() if key not in defaults or value != defaults[key]}
    replaced = frozenset({"dataset", *overruled, *(() if adapter else ("target_modules",))})
    draft = Draft(given=dict(given), folders=(Path.cwd(),), replaced=replaced, is_of_a_class=True)
    method = _method_of(arguments, given.get("task_type"), values)
    if given.get("task_type") == "SEQ_CLS":
        draft.put("task_type", draft.take("task_type"))
    if arguments is None:
        read_adapter(draft)
        draft.pass_on(_NOTHING, find_method(method))
    else:
        read_trl(draft, method)
    keys = {key: value for key, value in draft.values.items() if key not in overruled}
    if "max_length" not in given:
        keys.pop("max_length", None)  # transformers' trainer does not truncate
    if keys.get("init_lora_weights") is True:
        keys.pop("init_lora_weights")  # the default in PEFT and in ALTO, which init_adapter replaces
    if arguments is not None and not arguments.report_to:
        keys.setdefault("report_to", "none")
    if "gradient_checkpointing" not in changed:
        keys.pop("gradient_checkpointing", None)  # results do not depend on it; ALTO decides by the available memory
    known = set(given)
    if arguments is not None and _method_by_class(arguments) is not None and not _are_conversations(values):
        known.add(FORM)
    notes = [note for note in draft.notes if note.key in known and _ALIASES.get(note.key, note.key) not in overruled]
    is_object = is_object_name(str(values.get("model")))
    if is_object or "dtype" in overruled:
        notes = [note for note in notes if note.key not in _PRECISIONS]
    if is_object and keys.pop("dtype", None) not in (None, "float32"):
        notes.append(
            Note(kind=NoteKind.NOT_NEEDED, key="dtype", text="a model that is given as an object keeps its dtype")
        )
        changed.add("dtype")
    return {**keys, **values}, _reported(notes, changed)


def _overruled(values: Mapping[str, Any]) -> set[str]:
    """Return the fields that the task sets itself, and the fields that lose their meaning because of these."""
    space = values.get("search_space")
    found = {_ALIASES.get(key, key) for key in values}
    if isinstance(values.get("dataset"), Mapping) and "validation" in values["dataset"]:
        found.add("validation_dataset")
    if space == AUTO:
        found |= set(auto_space().keys)
    elif space is not None:
        found |= set(space.keys) if isinstance(space, SearchSpace) else set(searched_fields(space))
    return found | {key for name in found for key in _BELONGING.get(name, ())}


def _are_conversations(values: Mapping[str, Any]) -> bool:
    """Return whether the first row is available and consists of messages."""
    row = first_row({TASK_ALIASES.get(key, key): value for key, value in values.items()})
    if row is None or any(isinstance(row.get(column), str) for column in _TEXT_COLUMNS):
        return False
    return any(isinstance(cell, list) and cell and isinstance(cell[0], Mapping) for cell in row.values())


def _reported(notes: Sequence[Note], changed: Collection[str]) -> tuple[str, ...]:
    """Return the notes about settings that the user changed, and about defaults that ALTO handles differently."""
    changing = (NoteKind.NOT_SUPPORTED, NoteKind.UNKNOWN)
    refused = [note for note in notes if note.kind in changing and note.key in changed and note.key not in _HARMLESS]
    if refused:
        lines = "\n".join(f"  {_message(note)}" for note in refused)
        raise UnsupportedError(
            f"config: expected settings that ALTO supports, found {len(refused)} that it does not support:\n{lines}\n"
            "Remove them from the configuration, or set the key that a line names in the task, which overrides the "
            "configuration."
        )
    kept = [note for note in notes if note.key in changed or note.kind in (NoteKind.USED, NoteKind.NOT_SUPPORTED)]
    return tuple(_message(note) for note in kept)


def _message(note: Note) -> str:
    return str(note).replace("--set ", "")  # an option of the command line, which does not exist here


def _sorted(configs: Iterable[object]) -> tuple[Any, Any]:
    """Return the adapter's configuration and the trainer's arguments; None for a missing one."""
    found: dict[str, Any] = {_ADAPTER: None, _ARGUMENTS: None}
    for config in configs:
        kind = _kind(config)
        if kind is None:
            raise SpecError(
                "config should be a peft.LoraConfig, a transformers.TrainingArguments, one of TRL's "
                f"({', '.join(_METHODS)}), or a list of these, found {quoted(config)} ({type(config).__name__}). Set "
                "its settings as keys of the task."
            )
        if found[kind] is not None:
            raise SpecError(
                f"config should have one {kind}, found {type(found[kind]).__name__} and {type(config).__name__}."
                " Remove one; what differs between jobs belongs under 'search_space'."
            )
        found[kind] = config
    return found[_ADAPTER], found[_ARGUMENTS]


def _kind(config: object) -> str | None:
    """Return the kind of ``config``, adapter or trainer; None if it is neither."""
    classes = [(kind.__module__.partition(".")[0], kind.__name__) for kind in type(config).__mro__]
    if ("transformers", _ARGUMENTS) in classes:
        if any(package == "trl" for package, _ in classes) and _method_by_class(config) is None:
            raise UnsupportedError(
                f"config: expected one of TRL's {', '.join(_METHODS)}, found {type(config).__name__}, whose "
                "trainer ALTO does not support; remove it"
            )
        return _ARGUMENTS
    if ("peft", "PeftConfig") in classes:
        if classes[0] != ("peft", _ADAPTER):
            raise UnsupportedError(
                f"config: expected a peft.LoraConfig, found {type(config).__name__}: every job trains a LoRA adapter "
                "(DoRA is use_dora); give a LoraConfig"
            )
        return _ADAPTER
    return None


def _method_by_class(arguments: object) -> str | None:
    names = [kind.__name__ for kind in type(arguments).__mro__ if kind.__module__.partition(".")[0] == "trl"]
    return next((_METHODS[name] for name in names if name in _METHODS), None)


def _method_of(arguments: object, task_type: object, values: Mapping[str, Any]) -> str:
    """Return the method: the user's choice, or the trainer's method, or one for a classification head."""
    named = [value for key, value in values.items() if _ALIASES.get(key, key) == "method"]
    of_class = None if arguments is None else _method_by_class(arguments)
    if named and isinstance(named[-1], str):
        if of_class is not None and named[-1] != of_class:
            raise ConflictingKeysError(
                f"method should be {of_class!r}, the method of {type(arguments).__name__}, found {named[-1]!r}. "
                "Remove the key, or give the configuration of the trainer for that method."
            )
        return named[-1]
    if of_class is not None:
        return of_class
    if task_type == "SEQ_CLS":
        return "regression" if values.get("problem_type") == "regression" else "classification"
    return "sft"


def _given(adapter: Any, arguments: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return all settings of both objects by name, and their defaults."""
    given: dict[str, Any] = {}
    defaults: dict[str, Any] = {}
    for config in (arguments, adapter):
        if config is not None:
            given |= _values_of(config)
            defaults |= _defaults_of(config)
    given.pop("base_model_name_or_path", None)  # PEFT sets it when it uses the configuration
    if not given.get("fsdp"):
        given.pop("fsdp_config", None)  # transformers always sets it
    return given, defaults


def _values_of(config: Any) -> dict[str, Any]:
    """Return the settings as plain values, as in YAML."""
    values = {key: _plain(value) for key, value in config.to_dict().items()}
    return values | {key: getattr(config, key) for key in values if key.endswith(_TOKENS)}


def _defaults_of(config: Any) -> dict[str, Any]:
    """Return the defaults, read from the class: creating new arguments clears state that a trainer may be using."""
    found = {}
    for field in dataclasses.fields(config):
        if field.default is not dataclasses.MISSING:
            found[field.name] = _plain(field.default)
        elif field.default_factory is not dataclasses.MISSING:
            found[field.name] = _plain(field.default_factory())
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, set | frozenset):
        return sorted(map(_plain, value))
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _plain(dataclasses.asdict(value))
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return value
