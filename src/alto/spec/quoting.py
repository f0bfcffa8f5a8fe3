"""Quoting of user input in messages: short and on one line."""

from __future__ import annotations

import reprlib

__all__ = ["quoted"]

_MAX_CHARS = 80
_MAX_ITEMS = 12
_MAX_DIGITS = 40


class _Quoting(reprlib.Repr):
    """A ``repr`` bounded in depth and width, so that even a list that contains itself is quoted quickly."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 3
        self.maxlist = self.maxtuple = self.maxset = self.maxdict = _MAX_ITEMS
        self.maxstring = self.maxother = _MAX_CHARS

    def repr_int(self, x: int, level: int) -> str:
        # Python cannot write an integer of more than 4300 digits, but YAML can read one in hexadecimal.
        if abs(x) < 10**_MAX_DIGITS:
            return repr(x)
        return f"a number of {x.bit_length()} bits"


def quoted(value: object) -> str:
    """Return the ``repr`` of ``value``, shortened; control characters and terminal escapes are escaped."""
    text = _Quoting().repr(value)
    return text if len(text) <= _MAX_CHARS else text[: _MAX_CHARS - 3] + "..."
