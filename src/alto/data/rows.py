"""A row of a dataset before its form is known, and quoting of its values in messages."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["RawRow", "listed", "quoted"]

_MAX_NAMES = 12

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = 60
_repr.maxlevel = 3


@dataclass(frozen=True, slots=True)
class RawRow:
    """Values by column; ``where`` is the place a message names: ``train.jsonl:7``."""

    where: str
    values: Mapping[str, Any]


def quoted(value: object) -> str:
    """``value`` shortened, with control characters, terminal escapes and broken letters written out."""
    return _repr.repr(value)


def listed(names: Iterable[str]) -> str:
    """Names of columns, cleaned as :func:`quoted` does; ``none`` where there are none."""
    shown = [quoted(name)[1:-1] for name in names]
    more = [f"and {len(shown) - _MAX_NAMES} more"] if len(shown) > _MAX_NAMES else []
    return ", ".join([*shown[:_MAX_NAMES], *more]) or "none"
