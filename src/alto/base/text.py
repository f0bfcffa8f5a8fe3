"""Text in messages: quoted values, first lines of errors, and suggestions for misspelled keys."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterable

_MAX_CHARS = 80
_MAX_ITEMS = 12
_MAX_DIGITS = 40
_MAX_LINE_CHARS = 300


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


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, shortened; the error's class if it has no message."""
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return line[:_MAX_LINE_CHARS]


_MAX_KEY_CHARS = 64
_MAX_COST = 2
_MIN_PREFIX = 3
"""Minimum number of letters of an abbreviation of a longer word."""


def nearest_key(key: str, names: Iterable[str]) -> str | None:
    """Return the name in ``names`` that ``key`` is a misspelling of, or None.

    A misspelling has the same letters except for ``_`` and ``-`` between words; or it has the same number of words, and
    at most two of them are shortened, or have one letter wrong, missing, added or exchanged with its neighbor. So
    ``save_steps`` is not a misspelling of ``max_steps``, nor ``deepspeed`` of ``seed``.
    """
    if len(key) > _MAX_KEY_CHARS:
        return None
    costs = {name: cost for name in names if (cost := _cost(key.lower(), name)) is not None}
    return min(costs, key=lambda name: costs[name]) if costs else None


def _cost(key: str, name: str) -> int | None:
    """Return the number of misspelled words in ``key``; None if ``key`` is not a misspelling of ``name``."""
    words, meant = re.split("[_-]", key), name.split("_")
    if "".join(words) == "".join(meant):
        return 0
    if len(words) != len(meant):
        return None
    total = 0
    for word, other in zip(words, meant, strict=True):
        if word == other:
            continue
        if not _is_misspelt(word, other):
            return None
        total += 1
    return total if total <= _MAX_COST else None


def _is_misspelt(word: str, meant: str) -> bool:
    if not word or not meant or word[0] != meant[0] or re.findall(r"\d", word) != re.findall(r"\d", meant):
        return False
    shorter, longer = sorted((word, meant), key=len)
    if len(shorter) >= _MIN_PREFIX and longer.startswith(shorter):
        return True
    return len(longer) > _MIN_PREFIX and _differ_by_one(shorter, longer)


def _differ_by_one(shorter: str, longer: str) -> bool:
    """Return whether exactly one letter is wrong, missing, or exchanged with its neighbor."""
    if len(longer) - len(shorter) > 1:
        return False
    start = next((i for i, pair in enumerate(zip(shorter, longer, strict=False)) if pair[0] != pair[1]), len(shorter))
    if len(shorter) < len(longer):
        return shorter[start:] == longer[start + 1 :]
    exchanged = longer[start : start + 2][::-1] + longer[start + 2 :]
    return shorter[start + 1 :] == longer[start + 1 :] or shorter[start:] == exchanged
