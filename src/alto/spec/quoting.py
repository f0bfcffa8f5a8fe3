"""Quotes user input in messages: short and on one line."""

from __future__ import annotations

import reprlib

__all__ = ["quoted"]

_MAX_CHARS = 80
_MAX_ITEMS = 12
_MAX_DIGITS = 40


class _Quoting(reprlib.Repr):
    """Bounded in depth and width, so that a list that contains itself or a million others is quoted quickly."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 3
        self.maxlist = self.maxtuple = self.maxset = self.maxdict = _MAX_ITEMS
        self.maxstring = self.maxother = _MAX_CHARS

    def repr_int(self, x: int, level: int) -> str:
        # Python writes no number of more than 4300 digits, but YAML reads one in hexadecimal.
        if abs(x) < 10**_MAX_DIGITS:
            return repr(x)
        return f"a number of {x.bit_length()} bits"


def quoted(value: object) -> str:
    """``value`` as Python writes it, shortened, with control characters and terminal escapes written out."""
    text = _Quoting().repr(value)
    return text if len(text) <= _MAX_CHARS else text[: _MAX_CHARS - 3] + "..."
