"""Names of a base model's modules in a job: lists of names, and regular expressions over full names.

The functions that read a value of the user raise ``ValueError`` if it is not allowed.
"""

from __future__ import annotations

import re
import textwrap
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from alto.base import quoted

ALL_LINEAR = "all-linear"
"""Every linear layer of the model except its output head, as in PEFT."""

PEFT_DEFAULT = "peft-default"
"""The modules that PEFT chooses for an architecture by default; their names replace this word before training."""

Pairs = tuple[tuple[str, Any], ...]
"""A mapping as pairs, in the order in which it was written; unlike a mapping, it can be hashed."""

_Number = TypeVar("_Number", int, float)
_WORDS = (ALL_LINEAR, PEFT_DEFAULT)
_MODULE_NAME = r"[A-Za-z0-9_.-]+"
_MAX_LAYERS = 10_000


def targeted_modules(value: object) -> str | tuple[str, ...]:
    """Return ``target_modules`` as ``"all-linear"``, ``"peft-default"``, a sorted tuple of names, or a pattern."""
    if isinstance(value, str) and value.lower() in _WORDS:
        return value.lower()
    found = _names_or_pattern(value, f"{ALL_LINEAR!r}, ")
    word = None if isinstance(found, str) else next((word for word in _WORDS if word in found), None)
    if word is None:
        return found
    if len(found) > 1:
        raise ValueError(f"should be either {word!r} or names, found both in {quoted(value)}. Choose one.")
    return word


def chosen_modules(value: object) -> str | tuple[str, ...] | None:
    """Return ``exclude_modules`` as a sorted tuple of names or a regular expression; None if it names nothing."""
    return None if value in (None, [], (), "") else _names_or_pattern(value, "")


def saved_modules(value: object) -> tuple[str, ...] | None:
    """Return ``modules_to_save`` as a sorted tuple of names; None if it names nothing."""
    names = chosen_modules(value)
    if isinstance(names, str):
        raise ValueError(f"should be names of modules, found the pattern {quoted(value)}. For example: [lm_head].")
    return names


def layer_indices(value: object) -> tuple[int, ...] | None:
    """Return ``layers_to_transform``, an index or a list of indices, as a sorted tuple; None if it names none."""
    if value is None or value in ([], ()):
        return None
    indices: list[Any] = list(value) if isinstance(value, list | tuple) else [value]
    for index in indices:
        if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < _MAX_LAYERS:
            raise ValueError(
                f"should be the index of a layer, 0 for the first, or a list of them, found {quoted(value)}. For "
                "example: [0, 1]."
            )
    if len(set(indices)) < len(indices):
        raise ValueError(f"should name each layer once, found {quoted(value)}. Remove the repeated index.")
    return tuple(sorted(indices))


def layer_parents(value: object) -> tuple[str, ...] | None:
    """Return ``layers_pattern`` as a tuple; None if it is empty.

    Args:
        value: One or more regular expressions that match the part of a module's name before a layer's index.
    """
    if value in (None, [], (), ""):
        return None
    patterns = tuple(value) if isinstance(value, list | tuple) else (value,)
    for pattern in patterns:
        if not isinstance(pattern, str) or not pattern:
            raise ValueError(
                f"should be the name of the list that holds the layers, found {quoted(value)}. For example: 'layers'."
            )
        _check_regex(pattern)
    return patterns


def parameter_names(value: object) -> tuple[str, ...] | None:
    """Return ``target_parameters`` as sorted names of parameters; None stays."""
    if value is None:
        return None
    names = (value,) if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not all(
        isinstance(name, str) and re.fullmatch(_MODULE_NAME, name) for name in names
    ):
        raise ValueError(
            f"should be a list of names of parameters, found {quoted(value)}. For example: "
            "[experts.gate_up_proj, experts.down_proj]."
        )
    if len(set(names)) < len(names):
        raise ValueError(f"should name each parameter once, found {quoted(value)}. Remove the repeated name.")
    return tuple(sorted(names))


def per_module(value: object, what: str, is_allowed: Callable[[Any], bool]) -> Pairs:
    """Return ``rank_pattern`` or ``alpha_pattern``, a mapping of names to numbers, as pairs in the same order.

    Args:
        what: The allowed numbers in words, for messages.
    """
    pairs = pairs_of(value)
    if pairs is None:
        raise ValueError(f"should map names of modules to numbers, found {quoted(value)}. For example: {{q_proj: 8}}.")
    for name, number in pairs:
        if not isinstance(name, str) or not name.strip():
            raise ValueError(
                "should have names of modules, or regular expressions that match them, as keys, found "
                f"{quoted(name)}. For example: {{q_proj: 8}}."
            )
        _check_regex(name)
        if isinstance(number, bool) or not isinstance(number, int | float) or not is_allowed(number):
            raise ValueError(f"should give {name!r} {what}, found {quoted(number)}. Correct the number.")
    return pairs


def of_module(name: str, pattern: Sequence[tuple[str, _Number]], usual: _Number) -> _Number:
    """Return the number of the first key of ``pattern`` that matches the module ``name``, else ``usual``."""
    return next((number for key, number in pattern if module_matches(key, name)), usual)


def module_matches(key: str, name: str) -> bool:
    """Return whether the key of a pattern matches the full name of a module, or the part after one of its dots.

    Source: PEFT 0.21, ``get_pattern_key``.
    """
    return re.match(rf"(.*\.)?({key})$", name) is not None


def pairs_of(value: object) -> Pairs | None:
    """Return a mapping, or a list of pairs, as a tuple of pairs; None for any other value."""
    if value is None:
        return ()
    if isinstance(value, Mapping):
        return tuple(value.items())
    if isinstance(value, list | tuple) and all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in value):
        return tuple((key, item) for key, item in value)
    return None


def _names_or_pattern(value: object, others: str) -> str | tuple[str, ...]:
    if isinstance(value, str):
        return (value,) if re.fullmatch(_MODULE_NAME, value) else _checked_pattern(value, others)
    if not isinstance(value, list | tuple):
        raise ValueError(
            f"should be {others}a module name, a list of names or a pattern, found {quoted(value)}. "
            f"For example: [q_proj, v_proj]."
        )
    for name in value:
        if not isinstance(name, str) or not re.fullmatch(_MODULE_NAME, name):
            raise ValueError(
                f"should name modules by letters, digits, '_', '.' and '-', found {quoted(name)} in a list. "
                f"A pattern cannot be in a list: join several with '|'."
            )
    if len(set(value)) < len(value):
        raise ValueError(f"should name each module once, found {quoted(value)}. Remove the repeated name.")
    return tuple(sorted(value))


def _checked_pattern(text: str, others: str) -> str:
    """Return ``text`` if it can be a regular expression over module names."""
    if not text.strip():
        raise ValueError(f"should be {others}names or a pattern, found {quoted(text)}. Remove the key for the default.")
    names = re.split(r"[\s,;]+", text.strip())
    if all(re.fullmatch(_MODULE_NAME, name) for name in names):
        listed = textwrap.shorten(", ".join(names), 80, placeholder=" ...")
        raise ValueError(f"should be a list to hold several names, found {quoted(text)}. Write [{listed}].")
    _check_regex(text)
    return text


def _check_regex(text: str) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings that later Python versions read the pattern differently
            re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(
            f"should be a name, a list of names or a regular expression, found {quoted(text)}: {error}. "
            f"For example: '.*\\.(q|v)_proj'."
        ) from None
