"""The frozen base model of a task, and how it is loaded."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from alto.base import quoted
from alto.errors import SpecError, UnsupportedError
from alto.spec.keys import TASK_ALIASES

# A base model and its tokenizer that a user gives as Python objects.
#
# The keys of a task are plain values, so the objects are kept separately. ``model`` is then a name for the object,
# which cannot be used to load it. This module needs no torch: it only reads a few attributes of the objects.

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
                f"tokenizer should be the loaded tokenizer of the model, found {quoted(tokenizer)}. Use "
                "alto.Task(model=model, tokenizer=tokenizer, ...)."
            )
        objects = BaseObjects(model=found[key], tokenizer=tokenizer, name=_object_name(found[key]))
    found[key] = objects.name
    return found, objects


def check_object_keys(task: Any, objects: BaseObjects) -> None:
    """Check that the loading keys of a task agree with a base model that is already loaded."""
    if task.dtype not in ("auto", objects.dtype):
        raise UnsupportedError(
            f"dtype: expected {objects.dtype}, the precision of the model that is given as an object, found "
            f"{task.dtype!r}; convert the model (model.to), or remove the key"
        )
    set_key = next((key for key, off in _LOADED_ALREADY.items() if getattr(task, key) != off), None)
    if set_key is not None:
        raise UnsupportedError(
            f"{set_key}: expected no such key with a model that is given as an object and is therefore already loaded, "
            f"found {getattr(task, set_key)!r}; remove the key, or name the model by its id"
        )


def _is_model(value: object) -> bool:
    return isinstance(value, BaseObjects) or (hasattr(value, "state_dict") and hasattr(value, "config"))


def _object_name(model: Any) -> str:
    name = getattr(model, "name_or_path", "")
    found = f"<{type(model).__name__} object>"
    if not isinstance(name, str) or not name or len(name) > _MAX_NAME_CHARS or "'" in name or not name.isprintable():
        return found
    return found.replace(">", f" named '{name}'>")


Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Quantisation = Literal["none", "4bit", "8bit"]

QUANTISATION_KEYS: Mapping[Quantisation, str] = {"4bit": "load_in_4bit", "8bit": "load_in_8bit"}
"""The key of a task that chooses each quantisation. The journal, metrics files and transformers use the same keys."""

LOAD_IN_4BIT = f"{QUANTISATION_KEYS['4bit']}: true"
"""The line of a task file that loads the model in 4 bits; error messages suggest it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseModelSpec:
    """A base model and how it is loaded. Equal specifications load equal models as long as the files do not change.

    Attributes:
        id: A model shipped with ALTO, a hub id, or a local folder.
        dtype: Precision of the weights; ``auto`` is float32 on the CPU and the model's own dtype on CUDA.
        quantisation: How bitsandbytes quantises the linear layers, except the output head: ``4bit`` is NF4 with double
            quantisation, ``8bit`` one byte per weight with one scale per row. ``none`` keeps the model as it is on
            disk, quantised or not.
        torch_compile: Compile the layers with torch.compile: fewer and larger launches, but the first steps also take
            the time of the compilation.
        use_safetensors: Read safetensors weights; False reads pickle files instead, from which transformers loads only
            tensors.
        trust_remote_code: Run Python code that comes with the model if transformers has no code for it.
        chat_template: Text of a chat template that replaces the tokenizer's own; None keeps the tokenizer's.
        objects: A model and a tokenizer that are already loaded; None if they are loaded from ``id``. They are not part
            of :meth:`task_keys`, and :meth:`key` holds only their fingerprint.
    """

    id: str
    dtype: Dtype = "auto"
    quantisation: Quantisation = "none"
    torch_compile: bool = False
    use_safetensors: bool = True
    trust_remote_code: bool = False
    chat_template: str | None = None
    objects: BaseObjects | None = field(default=None, repr=False)

    def key(self) -> dict[str, Any]:
        """Return all fields as plain values, for a cache key: different specifications have different keys.

        A model that cannot be loaded by its ``id`` is represented by its fingerprint.
        """
        values = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "objects"}
        if self.chat_template is None:
            del values["chat_template"]  # keeps the keys from before this field existed
        if self.objects is not None and is_object_name(self.id) and self.objects.fingerprint is not None:
            values["object"] = {name: self.objects.fingerprint[name] for name in ("weights", "config")}
        return values

    @property
    def is_loadable(self) -> bool:
        """Whether any process can load the model by its ``id``."""
        return not is_object_name(self.id)

    def task_keys(self) -> dict[str, Any]:
        """Return the equivalent keys of a task."""
        return {
            "model": self.id,
            "dtype": self.dtype,
            **quantisation_keys(self.quantisation),
            "torch_compile": self.torch_compile,
            "trust_remote_code": self.trust_remote_code,
            "use_safetensors": self.use_safetensors,
            **({} if self.chat_template is None else {"chat_template": self.chat_template}),
        }


def quantisation_keys(quantisation: Quantisation) -> dict[str, bool]:
    """Return both quantisation keys of a task with their values; the journal has the same keys."""
    return {key: name == quantisation for name, key in QUANTISATION_KEYS.items()}


def quantisation_of(keys: Mapping[str, Any]) -> Quantisation:
    """Return the quantisation that ``keys`` of a task or of a quantised model's configuration set; by default none."""
    return next((name for name, key in QUANTISATION_KEYS.items() if keys.get(key)), "none")
