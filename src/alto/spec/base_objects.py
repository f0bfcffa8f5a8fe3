"""A base model and its tokenizer that a user gives as Python objects.

The keys of a task are plain values, so the objects are kept separately. ``model`` is then a name for the object, which
cannot be used to load it. This module needs no torch: it only reads a few attributes of the objects.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from alto.errors import SpecError, UnsupportedError
from alto.spec.keys import TASK_ALIASES
from alto.spec.quoting import quoted

__all__ = ["BaseObjects", "Origin", "check_object_keys", "is_object_name", "with_base_objects"]

TOKENIZER = "tokenizer"
"""An argument of :class:`alto.Task` that task files cannot have."""

_OBJECT_NAME = re.compile(r"<\w+ object(?: named '[^']*')?>")
_MAX_NAME_CHARS = 200

_LOADED_ALREADY: Mapping[str, Any] = {
    "load_in_4bit": False,
    "load_in_8bit": False,
    "torch_compile": False,
    "trust_remote_code": False,
    "use_safetensors": True,
}
"""Keys that say how a model is loaded, each with the value that has no effect."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class BaseObjects:
    """A loaded base model and its tokenizer. Two are equal if both hold the same objects.

    Attributes:
        model: A ``transformers.PreTrainedModel``.
        name: The task's ``model``: either the name of an object (:func:`is_object_name`), or an id or folder from which
            the same weights can be loaded.
        fingerprint: Fingerprint of the weights and the configuration, for a model that cannot be loaded by name; None
            until it is known.
    """

    model: Any
    tokenizer: Any
    name: str
    fingerprint: Mapping[str, Any] | None = None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BaseObjects):
            return NotImplemented
        return self.model is other.model and self.tokenizer is other.tokenizer

    def __hash__(self) -> int:
        return hash((id(self.model), id(self.tokenizer)))

    def __repr__(self) -> str:
        return self.name

    @property
    def dtype(self) -> str:
        """Precision of the weights, such as ``float32``."""
        return str(getattr(self.model, "dtype", None)).removeprefix("torch.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The inputs of a task that are not keys.

    Attributes:
        objects: The base model and tokenizer given as objects; None if the model is given by name.
        notes: Notes on settings that were not adopted unchanged. Comparisons of tasks ignore them.
    """

    objects: BaseObjects | None = None
    notes: tuple[str, ...] = field(default=(), compare=False)


def is_object_name(model: str) -> bool:
    """Return whether ``model`` of a task is the name of an object; it contains characters that no hub id has."""
    return _OBJECT_NAME.fullmatch(model) is not None


def with_base_objects(values: Mapping[str, Any]) -> tuple[dict[str, Any], BaseObjects | None]:
    """Return the keys of a task as plain values, and the model that is given as an object or None.

    Args:
        values: Keys as the user wrote them, including ``tokenizer``.

    Raises:
        SpecError: A model is given without its tokenizer, or a tokenizer without a model.
    """
    found = dict(values)
    keys = [key for key in found if TASK_ALIASES.get(key, key) == "model" and _is_model(found[key])]
    if not keys:
        if TOKENIZER in found and not isinstance(found[TOKENIZER], str):
            raise SpecError(
                f"tokenizer should come with a model that is an object, found {type(found[TOKENIZER]).__name__} with "
                f"model {quoted(found.get('model'))}. Give the loaded model too, or remove the tokenizer: the model's "
                "own is then loaded."
            )
        return found, None
    key = keys[-1]
    if isinstance(found[key], BaseObjects):
        objects: BaseObjects = found[key]
    else:
        tokenizer = found.pop(TOKENIZER, None)
        if tokenizer is None or isinstance(tokenizer, str):
            raise SpecError(
                f"tokenizer should be the loaded tokenizer of the model, found {quoted(tokenizer)}. Write "
                "alto.Task(model=model, tokenizer=tokenizer, ...)."
            )
        objects = BaseObjects(model=found[key], tokenizer=tokenizer, name=_object_name(found[key]))
    found[key] = objects.name
    return found, objects


def check_object_keys(task: Any, objects: BaseObjects) -> None:
    """Check that the loading keys of a task agree with a base model that is already loaded.

    Args:
        task: The task; it has the keys as attributes.
        objects: Its base model.

    Raises:
        UnsupportedError: A key asks for a model that differs from the object.
    """
    if task.dtype not in ("auto", objects.dtype):
        raise UnsupportedError(
            f"dtype: expected {objects.dtype}, the precision of the model that is given as an object, found "
            f"{task.dtype!r}; convert the model (model.to), or remove the key"
        )
    asked = next((key for key, off in _LOADED_ALREADY.items() if getattr(task, key) != off), None)
    if asked is not None:
        raise UnsupportedError(
            f"{asked}: expected no such key with a model that is given as an object and is therefore already loaded, "
            f"found {getattr(task, asked)!r}; remove the key, or name the model by its id"
        )


def _is_model(value: object) -> bool:
    return isinstance(value, BaseObjects) or (hasattr(value, "state_dict") and hasattr(value, "config"))


def _object_name(model: Any) -> str:
    name = getattr(model, "name_or_path", "")
    found = f"<{type(model).__name__} object>"
    if not isinstance(name, str) or not name or len(name) > _MAX_NAME_CHARS or "'" in name or not name.isprintable():
        return found
    return found.replace(">", f" named '{name}'>")
