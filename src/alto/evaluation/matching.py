"""Built-in scorers of generated texts: what is read of an answer, and when it agrees with the reference."""

from __future__ import annotations

import difflib
import json
import operator
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from typing import Any, NoReturn

from alto.errors import DataError
from alto.evaluation.answers import final_number
from alto.evaluation.scorers import Answer, OnTurn
from alto.spec import Scoring

__all__ = ["Matching", "check_keys", "matching_of", "tool_calls_in"]

_NUMBER = re.compile(
    r"((?:(?<![\w.)\]])[-+])?)"  # a sign behind a word, a number or a bracket is an operator
    r"[$€£¥]?"
    r"(?<![\w.])(\d{1,3}(?:,\d{3})+(?!,?\d)(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)"
    r"((?:[eE][-+]?\d{1,3}(?!\w))?)"
)
_FENCED = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE)
_OPENING = re.compile(r"[{\[]")
_END_OF_THOUGHT = "</think>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Matching:
    """A scorer that gives 1 where what it reads of an answer agrees with what it reads of the reference, else 0.

    Attributes:
        needed: What the reply of a row must have to be a reference, after "replies that".
        read: Reads a text; None where it finds nothing, which agrees with nothing.
        agrees: Whether what was read of the reference and what was read of the answer, in this order, agree.
    """

    needed: str
    read: Callable[[str], Any]
    agrees: Callable[[Any, Any], bool] = operator.eq

    def __call__(self, answers: Sequence[Answer], on_turn: OnTurn) -> list[float]:
        """The score of every answer; ``on_turn`` is not called, as reading takes no time."""
        return [float(self._is_right(one)) for one in answers]

    def _is_right(self, answer: Answer) -> bool:
        wanted, found = self.read(answer.reference), self.read(answer.answer)
        return wanted is not None and found is not None and self.agrees(wanted, found)

    def extracted(self, text: str) -> str | None:
        """What is read of ``text``, written as a text; None where nothing is found."""
        found = self.read(text)
        if isinstance(found, Mapping | list | bool):
            return json.dumps(found, ensure_ascii=False, default=float)
        return None if found is None else str(found)


def matching_of(scoring: Scoring) -> Matching | None:
    """The built-in scorer that ``scoring`` names; None where it names another one."""
    normalised = partial(_normalised, ignore_case=scoring.ignore_case)
    is_near = partial(_is_near, tolerance=Decimal(str(scoring.tolerance)))
    some_text = "are text after a prompt"
    match scoring.scorer:
        case "exact":
            return Matching(needed=some_text, read=normalised)
        case "contains":
            return Matching(needed=some_text, read=normalised, agrees=lambda wanted, found: wanted in found)
        case "regex":
            pattern = re.compile(scoring.pattern or "", re.IGNORECASE if scoring.ignore_case else 0)
            if pattern.groups == 0:
                return Matching(needed=some_text, read=str, agrees=lambda _, found: bool(pattern.search(found)))
            captured = partial(_captured, pattern=pattern, normalised=normalised)
            return Matching(needed="match the pattern", read=captured)
        case "numeric":
            return Matching(needed="have a number", read=_last_number, agrees=is_near)
        case "exact_match":
            return Matching(needed="end in a line '#### N'", read=final_number)
        case "json":
            keys = f" with {', '.join(scoring.keys)}" if scoring.keys else ""
            return Matching(
                needed=f"have a JSON value{keys}", read=partial(_json_in, keys=scoring.keys), agrees=_is_equal
            )
        case "tool_call":
            return Matching(needed="call a tool", read=lambda text: tool_calls_in(text) or None, agrees=_are_same_calls)
    return None


def check_keys(scoring: Scoring, references: Sequence[str]) -> None:
    """Check that every key to compare is in some reference.

    Raises:
        DataError: One is in none, so that it would never be compared.
    """
    if not scoring.keys:
        return
    found = {key for reference in references for key in _json_in(reference, keys=scoring.keys) or ()}
    for key in scoring.keys:
        if key not in found:
            present = {name for reference in references for name in _names(_json_in(reference, keys=None))}
            near = difflib.get_close_matches(key, sorted(present), n=1)
            raise DataError(
                f"expected the key {key!r} in the JSON object of one reply at least, found it in none of "
                f"{len(references)}; {f'did you mean {near[0]!r}? Correct' if near else 'correct'} keys"
            )


def tool_calls_in(text: str) -> list[dict[str, Any]]:
    """The calls in ``text``, each with ``name`` and ``arguments``, in order.

    A call is a JSON object with these keys, or with ``parameters`` in place of ``arguments``, by itself, in a list or
    under ``function``; arguments may be JSON text. What stands before ``</think>`` is no call.
    """
    _, _, said = text.rpartition(_END_OF_THOUGHT)
    values = [each for value in _json_values(said) for each in (value if isinstance(value, list) else [value])]
    return [call for value in values if (call := _call(value)) is not None]


def _normalised(text: str, *, ignore_case: bool) -> str:
    """``text`` with composed characters and single spaces, none at its ends."""
    words = " ".join(unicodedata.normalize("NFC", text).split())
    return unicodedata.normalize("NFC", words.casefold()) if ignore_case else words


def _captured(text: str, *, pattern: re.Pattern[str], normalised: Callable[[str], str]) -> str | None:
    """What the first group of the first match captures."""
    match = pattern.search(text)
    return None if match is None or match.group(1) is None else normalised(match.group(1))


def _last_number(text: str) -> Decimal | None:
    """The last number of ``text``, without its thousands commas."""
    found = _NUMBER.findall(text.replace("\N{MINUS SIGN}", "-"))
    if not found:
        return None
    sign, digits, power = found[-1]
    return Decimal(f"{sign}{digits.replace(',', '')}{power}")


def _is_near(wanted: Decimal, found: Decimal, *, tolerance: Decimal) -> bool:
    return wanted == found or abs(wanted - found) <= tolerance


def _json_in(text: str, *, keys: Sequence[str] | None) -> Any:
    """The JSON value of ``text``, of an object only ``keys`` where these are given; None where there is none.

    It is the whole text, else its last block between code fences that is JSON, else the last object in it, else the
    last list.
    """
    value = None
    for part in (text, *reversed(_FENCED.findall(text))):
        value = _loaded(part)
        if value is not None:
            break
    else:
        values = list(_json_values(text))
        value = next((found for found in reversed(values) if isinstance(found, dict)), values[-1] if values else None)
    if not keys:
        return value
    return {key: found[0] for key in keys if (found := _at(value, key))} or None


def _at(value: Any, key: str) -> list[Any]:
    """What ``value`` has under ``key``, in a list; empty where it has none. A dot leads into an object."""
    if not isinstance(value, dict):
        return []
    if key in value:
        return [value[key]]
    first, dot, rest = key.partition(".")
    return _at(value.get(first), rest) if dot else []


def _names(value: Any, prefix: str = "") -> Iterator[str]:
    """Every key that :func:`_at` finds in ``value``."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield f"{prefix}{key}"
            yield from _names(inner, f"{prefix}{key}.")


def _json_values(text: str) -> Iterator[Any]:
    """The JSON objects and lists in ``text`` that are in no other, in order."""
    position = 0
    while (opening := _OPENING.search(text, position)) is not None:
        try:
            value, position = _DECODER.raw_decode(text, opening.start())
        except RecursionError:
            return
        except (ValueError, ArithmeticError):
            position = opening.start() + 1
        else:
            yield value


def _loaded(text: str) -> Any:
    try:
        return _DECODER.decode(text)
    except (ValueError, ArithmeticError, RecursionError):
        return None


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


_DECODER = json.JSONDecoder(parse_float=Decimal, parse_constant=_refuse)


def _is_equal(one: Any, other: Any) -> bool:
    """Whether two JSON values are equal: numbers by value (1 is 1.0, but not true), texts by composed characters,
    objects in any order of their keys."""
    if isinstance(one, str) and isinstance(other, str):
        return unicodedata.normalize("NFC", one) == unicodedata.normalize("NFC", other)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_is_equal, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        own, others = (
            {unicodedata.normalize("NFC", key): value for key, value in each.items()} for each in (one, other)
        )
        return own.keys() == others.keys() and all(_is_equal(value, others[key]) for key, value in own.items())
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)


def _call(value: Any) -> dict[str, Any] | None:
    """``value`` as a call; None where it is none."""
    inner = value.get("function", value) if isinstance(value, dict) else None
    if not isinstance(inner, dict):
        return None
    arguments = inner.get("arguments", inner.get("parameters"))
    if isinstance(arguments, str):
        arguments = _loaded(arguments) if arguments.strip() else {}
    if not isinstance(inner.get("name"), str) or not isinstance(arguments, dict):
        return None
    return {"name": inner["name"], "arguments": arguments}


def _are_same_calls(wanted: list[dict[str, Any]], found: list[dict[str, Any]]) -> bool:
    """Whether both have the same calls, in any order."""
    left = list(found)
    for call in wanted:
        place = next((at for at, other in enumerate(left) if _is_equal(call, other)), None)
        if place is None:
            return False
        del left[place]
    return not left
