"""A row of a dataset before its form is known, the faults of rows, and quoting of their values in messages."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from alto.errors import DataError, DataFormatError

__all__ = ["ConversationError", "FaultKind", "RawRow", "RowError", "RowFault", "listed", "quoted"]

_MAX_NAMES = 12

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = 60
_repr.maxlevel = 3


class FaultKind(StrEnum):
    """Kinds of faults of a row, worded to follow a number of rows: "3 not JSON"."""

    NOT_JSON = "not JSON"
    NOT_UTF8 = "not UTF-8 text"
    NOT_AN_OBJECT = "not an object"
    OTHER_CELLS = "with another number of cells"
    UNREADABLE = "with a value that cannot be read"
    NO_COLUMNS = "without the columns of the others"
    WRONG_VALUE = "with a value of the wrong kind"
    BAD_MESSAGE = "with a message of no known role or shape"
    NO_REPLY = "without a reply"
    EMPTY_REPLY = "with an empty reply or text"
    EQUAL_REPLIES = "with two equal replies"
    UNLIKE_PROMPTS = "with conversations that do not part in a reply"
    NO_LABEL = "without a label"
    UNKNOWN_LABEL = "with a label that is not among the others"
    REFUSED = "refused by the chat template"


@dataclass(frozen=True, slots=True)
class RowFault:
    """The reason why a row cannot be used; ``reason`` is a sentence: "expected …, found …; remedy"."""

    kind: FaultKind
    reason: str


class RowError(DataFormatError):
    """An error about one row, at the place ``where``, that cannot be used."""

    def __init__(self, where: str, fault: RowFault) -> None:
        super().__init__(f"{where}: {fault.reason}")
        self.where = where
        self.fault = fault


class ConversationError(DataError):
    """A conversation that cannot be tokenised with the chat template."""


@dataclass(frozen=True, slots=True)
class RawRow:
    """The values of one row by column.

    Attributes:
        where: Place of the row, for messages: ``train.jsonl:7``.
        values: Values by column; empty if there is a fault.
        fault: The reason why the row could not be read; None if it could.
    """

    where: str
    values: Mapping[str, Any]
    fault: RowFault | None = None


def quoted(value: object) -> str:
    """Return ``value`` shortened, with control characters, terminal escapes and broken letters written out."""
    return _repr.repr(value)


def listed(names: Iterable[str]) -> str:
    """Return names of columns, cleaned as :func:`quoted` does; ``none`` if there are none.

    A name that is empty, or has a comma or surrounding spaces, is in quotes."""
    shown = [
        quoted(name)[1:-1] if name and name == name.strip() and "," not in name else quoted(name) for name in names
    ]
    more = [f"and {len(shown) - _MAX_NAMES} more"] if len(shown) > _MAX_NAMES else []
    return ", ".join([*shown[:_MAX_NAMES], *more]) or "none"
