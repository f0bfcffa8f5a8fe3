"""Built-in scorers of generated texts: they extract a value from an answer and compare it with the reference."""

from __future__ import annotations

import difflib
import json
import operator
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from typing import Any, NoReturn, assert_never

from alto.errors import DataError
from alto.evaluation.scorers import Answer, OnTurn, final_number
from alto.spec import Scoring

_NUMBER = re.compile(
    r"((?:(?<![\w.)\]])[-+])?)"  # a sign after a word, a number or a bracket is an operator
    r"[$€£¥]?"
    r"(?<![\w.])(\d{1,3}(?:,\d{3})+(?!,?\d)(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)"
    r"((?:[eE][-+]?\d{1,3}(?!\w))?)"
)
_FENCED = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE)
_OPENING = re.compile(r"[{\[]")
_END_OF_THOUGHT = "</think>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Matching:
    """A scorer that extracts a value from the answer and from the reference, and compares them.

    Attributes:
        needed: The property that a row's reply needs to be a reference; completes the phrase "replies that ...".
        read: Extracts the value from a text; None if there is none, which agrees with nothing.
        agrees: Returns how well the value of the reference agrees with the value of the answer, in this order: a number
            from 0 to 1, or a boolean.
    """

    needed: str
    read: Callable[[str], Any]
    agrees: Callable[[Any, Any], float] = operator.eq

    def __call__(self, answers: Sequence[Answer], on_turn: OnTurn) -> list[float]:
        """Return the score of every answer; ``on_turn`` is not called, because scoring is fast."""
        return [self._score(one) for one in answers]

    def _score(self, answer: Answer) -> float:
        wanted, found = self.read(answer.reference), self.read(answer.answer)
        return 0.0 if wanted is None or found is None else float(self.agrees(wanted, found))

    def extracted(self, text: str) -> str | None:
        """Return the value extracted from ``text``, as text; None if nothing is found."""
        found = self.read(text)
        if isinstance(found, Mapping | list | bool):
            return json.dumps(found, ensure_ascii=False, default=float)
        return None if found is None else str(found)


def matching_of(scoring: Scoring) -> Matching | None:
    """Return the built-in scorer that ``scoring`` names; None if it names no built-in scorer."""
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
        case "format":
            return Matching(needed=some_text, read=str, agrees=lambda _, found: _is_tagged(found, scoring.tags))
        case "json":
            keys = f" with {', '.join(scoring.keys)}" if scoring.keys else ""
            return Matching(
                needed=f"have a JSON value{keys}", read=partial(_json_in, keys=scoring.keys), agrees=_is_equal
            )
        case "tool_call":
            return Matching(needed="call a tool", read=lambda text: tool_calls_in(text) or None, agrees=_are_same_calls)
        case "similarity":
            if scoring.measure == "fuzzy_match":
                return Matching(needed=some_text, read=normalised, agrees=_common_subsequence)
            _, _, length = scoring.measure.partition("_")
            agrees = _common_subsequence if length == "l" else partial(_common_runs, length=int(length))
            return Matching(needed="have words", read=_words, agrees=agrees)
        case "multiple_choice" | "python" | "http":
            return None
        case other:
            assert_never(other)


def check_keys(scoring: Scoring, references: Sequence[str]) -> None:
    """Check that every key to compare is in at least one reference.

    Raises:
        DataError: A key is in no reference, so it would never be compared.
    """
    if not scoring.keys:
        return
    found = {key for reference in references for key in _json_in(reference, keys=scoring.keys) or ()}
    for key in scoring.keys:
        if key not in found:
            present = {name for reference in references for name in _names(_json_in(reference, keys=None))}
            near = difflib.get_close_matches(key, sorted(present), n=1)
            raise DataError(
                f"expected the key {key!r} in the JSON object of at least one reply, found it in none of "
                f"{len(references)}; {f'did you mean {near[0]!r}? Correct' if near else 'correct'} keys"
            )


def tool_calls_in(text: str) -> list[dict[str, Any]]:
    """Return the tool calls in ``text``, each with ``name`` and ``arguments``, in order.

    A call is a JSON object with ``name`` and ``arguments`` (or ``parameters``): alone, in a list, or under the key
    ``function``. The arguments may be JSON text. Text before ``</think>`` is ignored.
    """
    _, _, answer = text.rpartition(_END_OF_THOUGHT)
    values = [each for value in _json_values(answer) for each in (value if isinstance(value, list) else [value])]
    return [call for value in values if (call := _call(value)) is not None]


def _normalised(text: str, *, ignore_case: bool) -> str:
    """Return ``text`` in Unicode form NFC with single spaces, and no spaces at its ends."""
    words = " ".join(unicodedata.normalize("NFC", text).split())
    return unicodedata.normalize("NFC", words.casefold()) if ignore_case else words


def _captured(text: str, *, pattern: re.Pattern[str], normalised: Callable[[str], str]) -> str | None:
    """Return the first group of the first match, normalised; None if there is none."""
    match = pattern.search(text)
    return None if match is None or match.group(1) is None else normalised(match.group(1))


def _is_tagged(text: str, tags: Sequence[str]) -> bool:
    """Return whether ``text`` consists of ``tags`` in this order, each once, with only white space around them."""
    if any(text.count(mark) != 1 for tag in tags for mark in (f"<{tag}>", f"</{tag}>")):
        return False  # so each part of the pattern can match in one way only
    return re.fullmatch(r"\s*".join(["", *(f"<{tag}>.*</{tag}>" for tag in tags), ""]), text, re.DOTALL) is not None


def _words(text: str) -> list[str] | None:
    """Return the words of ``text`` in lower case; None if there are none. As in ROUGE, a word consists of letters and
    digits, and all other characters separate words."""
    return re.findall(r"[^\W_]+", text.lower()) or None


def _common_subsequence(one: Sequence[str], other: Sequence[str]) -> float:
    """Return twice the length of the longest common subsequence, divided by the sum of both lengths.

    Bit-parallel algorithm of Hyyrö (2004): bit ``i`` of ``unmatched`` is 0 where item ``i`` of ``one`` makes the
    subsequence longer.
    """
    places: dict[str, int] = {}
    for place, item in enumerate(one):
        places[item] = places.get(item, 0) | 1 << place
    everything = unmatched = (1 << len(one)) - 1
    for item in other:
        found = unmatched & places.get(item, 0)
        unmatched = ((unmatched + found) | (unmatched - found)) & everything
    return _share(len(one) - unmatched.bit_count(), len(one), len(other))


def _common_runs(one: Sequence[str], other: Sequence[str], *, length: int) -> float:
    """Return twice the number of common runs of ``length`` items, divided by the number of runs of both."""
    runs, others = (Counter(zip(*(items[at:] for at in range(length)), strict=False)) for items in (one, other))
    return _share((runs & others).total(), runs.total(), others.total())


def _share(common: int, size: int, other: int) -> float:
    return 2 * common / (size + other) if size + other else 0.0


def _last_number(text: str) -> Decimal | None:
    """Return the last number in ``text``, without thousands separators; None if there is none."""
    found = _NUMBER.findall(text.replace("\N{MINUS SIGN}", "-"))
    if not found:
        return None
    sign, digits, power = found[-1]
    return Decimal(f"{sign}{digits.replace(',', '')}{power}")


def _is_near(wanted: Decimal, found: Decimal, *, tolerance: Decimal) -> bool:
    return wanted == found or abs(wanted - found) <= tolerance


def _json_in(text: str, *, keys: Sequence[str] | None) -> Any:
    """Return the JSON value in ``text``, reduced to ``keys`` if these are given; None if there is none.

    The value is the whole text; else the last fenced code block that is JSON; else the last object in the text; else
    the last list.
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
    """Return a list with the value under ``key`` (``a.b`` is ``b`` in the object ``a``); empty if there is none."""
    if not isinstance(value, dict):
        return []
    if key in value:
        return [value[key]]
    first, dot, rest = key.partition(".")
    return _at(value.get(first), rest) if dot else []


def _names(value: Any, prefix: str = "") -> Iterator[str]:
    """Yield every key that :func:`_at` finds in ``value``."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield f"{prefix}{key}"
            yield from _names(inner, f"{prefix}{key}.")


def _json_values(text: str) -> Iterator[Any]:
    """Yield the outermost JSON objects and lists in ``text``, in order."""
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
    """Return whether two JSON values are equal.

    Numbers are compared by value (1 equals 1.0, but not true), texts in Unicode form NFC, and objects regardless of the
    order of their keys.
    """
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
    """Return ``value`` as a tool call with ``name`` and ``arguments``; None if it is not a tool call."""
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
    """Return whether both lists hold the same calls, in any order."""
    left = list(found)
    for call in wanted:
        place = next((at for at, other in enumerate(left) if _is_equal(call, other)), None)
        if place is None:
            return False
        del left[place]
    return not left
