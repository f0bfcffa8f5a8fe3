"""The base class of every part of a task: frozen, strict, with ALTO's errors instead of pydantic's."""

from __future__ import annotations

import math
import os
import re
import sys
import types
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, Self, TypeVar, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from alto.base import quoted
from alto.errors import SpecError
from alto.spec.keys import canonical_keys

MAX_CHARS = 4095
"""Maximum number of characters of a text; no path is longer."""


class SpecModel(BaseModel):
    """A frozen, keyword-only part of a task without type coercion: text is not a number, and true is not 1."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, str_max_length=MAX_CHARS)

    def __init__(self, /, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise _spec_error(error.errors(), type(self)) from None

    @classmethod
    def error_of(cls, key: str, value: object) -> SpecError | None:
        """Return the error of ``value`` for the field ``key``, independent of other fields; None if it is valid."""
        try:
            BaseModel.__init__(cls.__new__(cls), **{key: value})
        except ValidationError as error:
            found = [details for details in error.errors() if details["loc"][:1] == (key,)]
            return _spec_error(found, cls) if found else None
        return None

    def to_dict(self) -> dict[str, Any]:
        """Return all fields under their canonical names, as values that YAML and JSON can hold."""
        return self.model_dump(mode="json")

    def replace(self, **changes: Any) -> Self:
        """Return a new, fully checked object with some fields changed."""
        return type(self)(**(self.to_dict() | changes))

    def model_copy(self, *, update: Any = None, deep: bool = False) -> Self:
        """Copy the model as pydantic does, but validate the changes."""
        return self.replace(**update) if update else super().model_copy(deep=deep)


Part = TypeVar("Part", bound=SpecModel)


def parsed(
    kind: type[Part], value: object, where: str, *, example: str, expected: str = "a mapping of settings"
) -> Part:
    """Build a part of a task from the mapping that the user wrote under the key ``where``.

    Args:
        expected, example: Other allowed values, and a valid one, for messages.

    Raises:
        SpecError: ``value`` is not a mapping with text for keys, or a value in it is not allowed.
        UnknownKeyError, ConflictingKeysError, UnsupportedError: See :func:`alto.spec.keys.canonical_keys`.
    """
    if not isinstance(value, Mapping):
        raise SpecError(f"{where} should be {expected}, found {quoted(value)}. For example: {example}.")
    if not all(isinstance(key, str) for key in value):
        raise SpecError(f"{where} should have text as keys, found {quoted(list(value))}. Put the keys in quotes.")
    given = canonical_keys(value, fields=kind.model_fields, aliases={}, where=where)
    try:
        return kind(**given)
    except SpecError as error:
        if type(error) is not SpecError:  # messages about keys already name the place
            raise
        raise SpecError("\n".join(f"{where}.{line}" for line in str(error).splitlines())) from None


def check_defaults(model: type[SpecModel]) -> None:
    """Check that the defaults of a package's settings are in the domains of their fields; pydantic does not."""
    for key, field in model.model_fields.items():
        if field.is_required() or field.default_factory is not None:
            continue
        error = model.error_of(key, field.default)
        if error is not None:
            raise SpecError(f"{model.__name__}: expected defaults that are valid values, found that {error}")


def _spec_error(found: Iterable[ErrorDetails], model: type[BaseModel]) -> SpecError:
    """Translate pydantic's errors about ``model`` to one line each: place, expected, found, remedy."""
    return SpecError(
        "\n".join(_sentence(details, model) for details in found if details["type"] != "default_factory_not_called")
    )


def is_finite_number(value: object) -> bool:
    """Return whether ``value`` is a finite number that a float can hold; booleans do not count."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and abs(value) <= sys.float_info.max  # type: ignore[arg-type]


def plain(value: Any) -> Any:
    """Convert ``value`` to Python's own types: lists to tuples, mappings to tuples of pairs, NumPy floats to floats.

    The result can be hashed if all its parts can.
    """
    if isinstance(value, list | tuple):
        return tuple(plain(item) for item in value)
    if isinstance(value, Mapping):
        return tuple((plain(key), plain(item)) for key, item in value.items())
    for kind in (float, str):
        if isinstance(value, kind):
            return kind(value)
    return value


def is_number_text(text: str) -> bool:
    """Return whether YAML would read ``text`` without quotes as a number."""
    return re.fullmatch(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?", text.strip()) is not None


def _sentence(details: ErrorDetails, model: type[BaseModel]) -> str:
    path = ".".join(map(str, details["loc"]))
    if details["type"] == "value_error":
        reason = str(details["ctx"]["error"])
        return f"{path} {reason}" if path else reason
    field = model.model_fields.get(str(details["loc"][0])) if details["loc"] else None
    if field is None:
        return f"{path}: {details['msg']}, found {_shown(details['input'])}."
    if details["type"] == "string_too_long":
        limit = details["ctx"]["max_length"]
        return f"{path} should be text of at most {limit} characters, found {quoted(details['input'])}. Shorten it."
    meaning = f"{path} ({field.description})" if field.description else path
    if details["type"] == "missing":
        return f"{meaning} is missing: expected {_expected(field)}, found nothing. Add the key {path!r}."
    return (
        f"{meaning} should be {_expected(field)}, found {_shown(details['input'])}. {_remedy(details['input'], field)}"
    )


def _types(field: FieldInfo) -> tuple[Any, ...]:
    annotation = field.annotation
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)


def _expected(field: FieldInfo) -> str:
    """Describe a field's domain by its annotation and bounds: ``a whole number >= 1 and <= 1024``."""
    names = {int: "a whole number", float: "a finite number", bool: "true or false", str: "text", type(None): "null"}
    words = []
    for kind in _types(field):
        if get_origin(kind) is Literal:
            words.append(
                " or ".join(str(value).lower() if isinstance(value, bool) else repr(value) for value in get_args(kind))
            )
        else:
            words.append(
                "a list" if get_origin(kind) is tuple else names.get(kind) or str(getattr(kind, "__name__", kind))
            )
    signs = {annotated_types.Gt: ">", annotated_types.Ge: ">=", annotated_types.Lt: "<", annotated_types.Le: "<="}
    bounds = [
        f"{signs[type(bound)]} {getattr(bound, type(bound).__name__.lower())}"
        for bound in field.metadata
        if type(bound) in signs
    ]
    if bounds:
        words[0] += " " + " and ".join(bounds)
    if any(isinstance(bound, annotated_types.MinLen) for bound in field.metadata):
        words[0] = "non-empty " + words[0]
    return " or ".join(words)


def _shown(value: object) -> str:
    names: dict[type, str] = {str: "text", bool: "a truth value", int: "a whole number", float: "a number"}
    return f"{quoted(value)} ({names.get(type(value), type(value).__name__)})" if value is not None else "null"


def _remedy(value: object, field: FieldInfo) -> str:
    kinds = _types(field)
    wants_number = int in kinds or float in kinds
    if isinstance(value, list | tuple | dict):
        return "Give one value; what varies between jobs belongs under 'search_space'."
    if wants_number and isinstance(value, str):
        return f"Write {value.strip()} without quotes." if is_number_text(value) else "Write a number."
    if wants_number and isinstance(value, bool):
        return "Write a number, not true or false."
    if isinstance(value, float) and not math.isfinite(value):
        return "Write a finite number."
    if int in kinds and isinstance(value, float) and value.is_integer():
        return f"Write {int(value)}, without a point."
    if wants_number and isinstance(value, int | float):
        return "Choose a value in that range." if float in kinds or isinstance(value, int) else "Write a whole number."
    if str in kinds and value is not None and not isinstance(value, str):
        return "Put it in quotes if it is meant."
    if value is None and not field.is_required():
        return "Remove the key for the default."
    return "Use one of these values." if any(get_origin(kind) is Literal for kind in kinds) else "Correct the value."


def path_text(value: object) -> object:
    """Return a ``Path`` as text, and any other value unchanged."""
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def check_path(text: Any) -> Any:
    """Return ``text`` unless the operating system cannot look it up as a path: it would be reported as missing."""
    if not isinstance(text, str):
        return text
    reason = "a NUL character" if "\0" in text else None
    try:
        Path(text).expanduser().exists()
    except RuntimeError:
        reason = f"no home folder for {text.split('/')[0]}"
    except OSError as error:  # the path is too long, or a folder may not be entered
        reason = error.strerror
    if reason is not None:
        raise ValueError(
            f"should be a name or a path that can be looked up, found {quoted(text)}: {reason}. Correct it."
        )
    return text
