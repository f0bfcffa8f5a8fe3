"""A base model and its tokenizer that a user gives as Python objects.

They are held beside the keys of a task, which are plain values: ``model`` is then a name that says that there is an
object, and that nothing can be loaded by. Without torch: nothing is asked of the objects but a few attributes.
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
"""The argument of :class:`alto.Task` that no task file has."""

_OBJECT_NAME = re.compile(r"<\w+ object(?: named '[^']*')?>")
_MAX_NAME_CHARS = 200

_LOADED_ALREADY: Mapping[str, Any] = {
    "load_in_4bit": False,
    "load_in_8bit": False,
    "torch_compile": False,
    "trust_remote_code": False,
    "use_safetensors": True,
}
"""Keys that say how a model is loaded, each with the value that asks for nothing."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class BaseObjects:
    """A loaded base model and its tokenizer; equal where both are the same objects.

    Attributes:
        model: A ``transformers.PreTrainedModel``.
        tokenizer: Its tokenizer.
        name: What the task calls the model: an object by :func:`is_object_name`, or what the same weights are loaded
            by.
        fingerprint: Of its weights and configuration, where nothing loads the same; None until it is known.
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
    """What a task was made of beside its keys.

    Attributes:
        objects: Its base model and tokenizer; None where the model is named.
        notes: What became of settings that were not taken over as they are; tasks are equal without it.
    """

    objects: BaseObjects | None = None
    notes: tuple[str, ...] = field(default=(), compare=False)


def is_object_name(model: str) -> bool:
    """Whether ``model`` of a task is the name of an object: no hub id has such characters."""
    return _OBJECT_NAME.fullmatch(model) is not None


def with_base_objects(values: Mapping[str, Any]) -> tuple[dict[str, Any], BaseObjects | None]:
    """The keys of a task as plain values, and the model that is given as an object; None where there is none.

    Args:
        values: As the user wrote them, ``tokenizer`` among them.

    Raises:
        SpecError: A model is given without its tokenizer, or a tokenizer without a model.
    """
    found = dict(values)
    keys = [key for key in found if TASK_ALIASES.get(key, key) == "model" and _is_model(found[key])]
    if not keys:
        if TOKENIZER in found and not isinstance(found[TOKENIZER], str):
            raise SpecError(
                f"tokenizer should come with a model that is an object, found {type(found[TOKENIZER]).__name__} with "
                f"model {quoted(found.get('model'))}. Give the loaded model too, or remove the tokenizer: that of the "
                "model is loaded."
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
    """Check the keys of a task that say how its base model is loaded, where it is loaded already.

    Args:
        task: With these keys as attributes.
        objects: Its base model.

    Raises:
        UnsupportedError: One of them asks for another model than the object.
    """
    if task.dtype not in ("auto", objects.dtype):
        raise UnsupportedError(
            f"dtype: expected {objects.dtype}, the precision of the model that is given as an object, found "
            f"{task.dtype!r}; convert the model (model.to), or remove the key"
        )
    asked = next((key for key, off in _LOADED_ALREADY.items() if getattr(task, key) != off), None)
    if asked is not None:
        raise UnsupportedError(
            f"{asked}: expected no such key with a model that is given as an object, which is loaded already, found "
            f"{getattr(task, asked)!r}; remove the key, or name the model by its id"
        )


def _is_model(value: object) -> bool:
    return isinstance(value, BaseObjects) or (hasattr(value, "state_dict") and hasattr(value, "config"))


def _object_name(model: Any) -> str:
    name = getattr(model, "name_or_path", "")
    found = f"<{type(model).__name__} object>"
    if not isinstance(name, str) or not name or len(name) > _MAX_NAME_CHARS or "'" in name or not name.isprintable():
        return found
    return found.replace(">", f" named '{name}'>")
