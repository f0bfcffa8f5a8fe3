"""Converts between typed values and JSON: strict when writing, tolerant when reading.

Strict JSON has no NaN and no infinity: these numbers are written as the strings ``nan``, ``inf`` and ``-inf``, and only
by this module. In place of a number, null and JSON's own ``NaN`` are read as NaN, because version 0.1 could write them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from enum import StrEnum
from types import NoneType, UnionType
from typing import Any, Literal, TypeAlias, Union, get_args, get_origin, get_type_hints

from alto.records import Gpu
from alto.runs.events.facts import ALIASES, ALWAYS, DAMAGED_IS_NONE, IF_ABSENT, KEY_ALIASES, VALUE_ALIASES

Path: TypeAlias = tuple[str | int, ...]
"""Names and positions that lead to a value in an event."""

_Unknown: TypeAlias = dict[Path, Any]
_Reader: TypeAlias = Callable[[Any, Path, _Unknown], Any]

_NON_FINITE = ("nan", "inf", "-inf")


class WrongValueError(Exception):
    """Raised inside this package if the value at ``path`` has the wrong type or is missing."""

    def __init__(self, path: Path, expected: str, found: object, *, is_missing: bool = False) -> None:
        super().__init__(path, expected, found)
        self.is_missing = is_missing
        self.path = path
        self.expected = expected
        self.found = found


def pointer(path: Path) -> str:
    """Return a path as text: the name of a field of the event itself, else a JSON pointer (RFC 6901)."""
    if len(path) == 1 and not str(path[0]).startswith("/"):
        return str(path[0])
    return "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in path)


def to_wire(value: Any) -> Any:
    """Return ``value`` as strict JSON.

    Raises:
        TypeError: The value, or a value inside it, has a type that events do not hold.
    """
    match value:
        case None | bool():
            return value
        case StrEnum():
            return value.value
        case str() | int():
            return value
        case float():
            return value if math.isfinite(value) else str(value)
        case list() | tuple():
            return [to_wire(item) for item in value]
        case Mapping():
            return {_key(key): to_wire(item) for key, item in value.items()}
        case Gpu():
            return [value.node, value.index]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _fields_to_wire(value)
    raise TypeError(f"expected a value that JSON can hold, found {value!r:.100} ({type(value).__name__})")


def _key(key: object) -> str:
    if not isinstance(key, str):
        raise TypeError(f"expected text as a key, found {key!r:.100}")
    return key


def _fields_to_wire(value: Any) -> dict[str, Any]:
    written = {}
    always = getattr(value, "ALWAYS_WRITTEN", ())
    for field in dataclasses.fields(value):
        held = getattr(value, field.name)
        if field.name in always or field.metadata.get(ALWAYS) or not _is_default(field, held):
            written[field.name] = to_wire(held)
    return written


def _is_default(field: dataclasses.Field[Any], held: Any) -> bool:
    if field.default is not dataclasses.MISSING:
        return bool(held == field.default)
    return field.default_factory is not dataclasses.MISSING and bool(held == field.default_factory())


def from_wire(of: type, facts: Mapping[str, Any]) -> tuple[Any, dict[Path, Any]]:
    """Return the dataclass ``of`` built from ``facts``, and by path the values that are not in its fields.

    Raises:
        WrongValueError: A field is missing or has another type.
    """
    unknown: _Unknown = {}
    return _reader(of)(facts, (), unknown), unknown


@functools.cache
def _reader(kind: Any) -> _Reader:
    """Return the reader of values of a type."""
    if kind in _PLAIN:
        return _PLAIN[kind]
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return _union(arguments)
    if origin is Literal:
        return _one_of(arguments)
    if origin is tuple:
        items = arguments[:-1] if arguments[-1] is Ellipsis else arguments
        return _sequence(_reader(items[0]), None if arguments[-1] is Ellipsis else len(items))
    if origin is Mapping:
        return _mapping(_reader(arguments[1]))
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return _enum(kind)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return _record(kind)
    raise TypeError(f"expected a type that events hold, found {kind}")


def _any(value: Any, path: Path, unknown: _Unknown) -> Any:
    return value


def _plain(kind: type, expected: str) -> _Reader:
    def read(value: Any, path: Path, unknown: _Unknown) -> Any:
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise WrongValueError(path, expected, value)
        return value

    return read


_text, _truth, _whole = _plain(str, "text"), _plain(bool, "true or false"), _plain(int, "a whole number")


def _number(value: Any, path: Path, unknown: _Unknown) -> float:
    if value is None:
        return math.nan
    if (isinstance(value, int | float) and not isinstance(value, bool)) or value in _NON_FINITE:
        try:
            return float(value)
        except OverflowError:
            pass
    raise WrongValueError(path, "a number", value)


def _gpu(value: Any, path: Path, unknown: _Unknown) -> Gpu:
    if isinstance(value, Gpu):
        return value
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise WrongValueError(path, "a node and the number of a GPU", value)
    return Gpu(_text(value[0], (*path, 0), unknown), _whole(value[1], (*path, 1), unknown))


_PLAIN: Mapping[Any, _Reader] = {
    Any: _any,
    str: _text,
    bool: _truth,
    int: _whole,
    float: _number,
    Gpu: _gpu,
}


def _union(kinds: tuple[Any, ...]) -> _Reader:
    """Return the reader of ``X | None``, or of ``X | str``: text that is not an ``X`` comes from a later version."""
    if NoneType in kinds:
        (some,) = (_reader(kind) for kind in kinds if kind is not NoneType)
        return lambda value, path, unknown: None if value is None else some(value, path, unknown)
    (inner,) = (_reader(kind) for kind in kinds if kind is not str)

    def read(value: Any, path: Path, unknown: _Unknown) -> Any:
        try:
            return inner(value, path, unknown)
        except WrongValueError:
            return _text(value, path, unknown)

    return read


def _one_of(values: tuple[Any, ...]) -> _Reader:
    def read(value: Any, path: Path, unknown: _Unknown) -> Any:
        if value not in values:
            raise WrongValueError(path, " or ".join(map(str, values)), value)
        return value

    return read


def _enum(kind: type[StrEnum]) -> _Reader:
    def read(value: Any, path: Path, unknown: _Unknown) -> StrEnum:
        try:
            return kind(value)
        except ValueError:
            raise WrongValueError(path, " or ".join(kind), value) from None

    return read


def _sequence(item: _Reader, length: int | None) -> _Reader:
    def read(value: Any, path: Path, unknown: _Unknown) -> tuple[Any, ...]:
        if not isinstance(value, list | tuple) or length not in (None, len(value)):
            raise WrongValueError(path, "a list" if length is None else f"a list of {length}", value)
        if item is _number and all(type(entry) is float for entry in value):  # fast path: losses fill most of a journal
            return tuple(value)
        return tuple(item(entry, (*path, index), unknown) for index, entry in enumerate(value))

    return read


def _mapping(item: _Reader) -> _Reader:
    def read(value: Any, path: Path, unknown: _Unknown) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            raise WrongValueError(path, "an object", value)
        return {key: item(entry, (*path, key), unknown) for key, entry in value.items()}

    return read


def _record(kind: type) -> _Reader:
    hints = get_type_hints(kind)
    fields = [(field, _field_reader(field, hints[field.name])) for field in dataclasses.fields(kind)]

    def read(value: Any, path: Path, unknown: _Unknown) -> Any:
        if isinstance(value, kind):
            return value
        if not isinstance(value, Mapping):
            raise WrongValueError(path, "an object", value)
        left, found = dict(value), {}
        for field, read_field in fields:
            spellings = (field.name, *field.metadata.get(ALIASES, ()))
            spelling = next((name for name in spellings if name in left), None)
            if spelling is not None:
                found[field.name] = read_field(left.pop(spelling), (*path, field.name), unknown)
            elif IF_ABSENT in field.metadata:
                found[field.name] = read_field(field.metadata[IF_ABSENT], (*path, field.name), unknown)
            elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
                raise WrongValueError((*path, field.name), "a value", None, is_missing=True)
        unknown.update({(*path, name): item for name, item in left.items()})
        return kind(**found)

    return read


def _field_reader(field: dataclasses.Field[Any], hint: Any) -> _Reader:
    inner = _reader(hint)
    if renamed := field.metadata.get(KEY_ALIASES):
        return lambda value, path, unknown: {
            renamed.get(key, key): item for key, item in inner(value, path, unknown).items()
        }
    if reworded := field.metadata.get(VALUE_ALIASES):
        return lambda value, path, unknown: reworded.get(text := inner(value, path, unknown), text)
    if field.metadata.get(DAMAGED_IS_NONE):
        return _none_if_damaged(inner)
    return inner


def _none_if_damaged(inner: _Reader) -> _Reader:
    def read(value: Any, path: Path, unknown: _Unknown) -> Any:
        try:
            return inner(value, path, unknown)
        except WrongValueError:
            return None

    return read
