"""Graders of requests, OpenAI's and ALTO's own scorers, as the ``select_by`` or the ``reward_funcs`` of a task."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple, get_args

from alto.base import quoted
from alto.errors import SpecError
from alto.service.errors import ApiError, refused
from alto.spec import SimilarityMeasure, parse_reward_funcs, parse_select_by

_SCORERS = (
    "exact",
    "contains",
    "numeric",
    "exact_match",
    "json",
    "tool_call",
    "format",
    "similarity",
    "multiple_choice",
)
"""Scorers that requests may name. The others run code, contact servers, or may never end (backtracking patterns)."""
_REWARDS = tuple(name for name in _SCORERS if name != "multiple_choice")
_SETTINGS = ("keys", "tolerance", "tags", "measure", "ignore_case")
_KEYS = ("scorer", *_SETTINGS, "num_rows", "max_new_tokens", "at")

_OPENAIS = ("string_check", "text_similarity")
_TEXTS = ("input", "reference")
_TEMPLATE = re.compile(r"\{\{\s*([\w.]+)\s*\}\}")
_ANSWER = "sample.output_text"
_COLUMN = re.compile(r"item\.(\w+)")
_REPLY = "reference"
"""Name of a row's reply in templates; other names are columns."""

_REFUSED_TYPES = {
    "python": "this service runs no code of requests",
    "score_model": "this service asks no model",
    "label_model": "this service asks no model",
    "endpoint": "this service contacts no server",
    "http": "this service contacts no server",
    "regex": "a pattern may never stop",
}
"""Graders and scorers that a service does not run, each with the reason."""

_MOST_CHARS = 1000
"""Maximum length of a formula."""


class _Part(NamedTuple):
    """A scorer of a grader.

    Attributes:
        scorer: Settings of the scorer.
        weight: Its weight in the grade.
        column: The column of a row with which it compares answers; :data:`_REPLY` for the row's reply, None if the
            grader does not say.
    """

    scorer: dict[str, Any]
    weight: float
    column: str | None


def select_by_of(value: Any) -> Any:
    """Return the task's ``select_by`` for the ``select_by`` of a request.

    Args:
        value: A grader of OpenAI (with ``type``), or ``select_by`` in ALTO's form.

    Raises:
        ApiError: A service does not run this grader or scorer.
    """
    if not isinstance(value, Mapping):
        return value
    if "type" in value:
        part = _part_of(value, "select_by", {})
        if part.weight != 1:
            raise _unsupported("select_by.operation", "eq or like or ilike", value["operation"], "use one of these")
        if part.column not in (None, _REPLY):
            remedy = "write the expected value, which stands for the reply of a row"
            raise _unsupported("select_by.reference", f"'{{{{item.{_REPLY}}}}}'", value["reference"], remedy)
        return part.scorer
    if value.get("scorer") not in _SCORERS:
        raise _unsupported("select_by.scorer", " or ".join(_SCORERS), value.get("scorer"), "use one of these")
    _check_keys(value, _KEYS, "select_by")
    return dict(value)


def check_grader(grader: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Check a grader as in a job with the method ``reinforcement``, or as ``select_by`` of another job.

    Args:
        own: Graders of the service; see :class:`alto.service.settings.ServiceSettings`.

    Raises:
        ApiError: No job can have this grader.
    """
    if "type" in grader:
        reward_values(grader, None, own)
        return
    try:
        parse_select_by(select_by_of(grader))
    except SpecError as error:
        raise refused(str(error), "grader") from None


def reward_values(grader: Mapping[str, Any], columns: object, own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a task that learns from the grades of ``grader``: rewards, weights, and columns of its rows.

    OpenAI's rows are ``messages`` that end with the user's turn, and further columns. So if the grader compares answers
    with a column, the prompt is ``messages`` and the reply is that column.

    Args:
        columns: The task's ``columns`` in the request; None if there are none.
        own: Graders of the service, by their types.

    Raises:
        ApiError: A service does not run this grader, or a setting of it is invalid.
    """
    parts = _weighted(grader, own) if grader.get("type") == "multi" else [_part_of(grader, "grader", own)]
    compared = dict.fromkeys(part.column for part in parts if part.column is not None)
    if len(compared) > 1:
        raise _unsupported(
            "grader", "graders that compare answers with the same column", " and ".join(compared), "use one column"
        )
    values: dict[str, Any] = {
        "reward_funcs": [part.scorer for part in parts],
        "reward_weights": [part.weight for part in parts],
    }
    try:
        parse_reward_funcs(values["reward_funcs"])
    except SpecError as error:
        raise refused(str(error).replace("reward_funcs", "grader"), "grader") from None
    (column,) = compared or (None,)
    if column in (None, _REPLY):
        return values
    if columns is None:
        return {**values, "columns": {"prompt": "messages", "completion": column}}
    if not isinstance(columns, Mapping) or columns.get("completion") != column:
        remedy = f"write columns: {{completion: {column}}}, or '{{{{item.{_REPLY}}}}}' for the reply"
        raise _unsupported("columns", f"completion: {column}, with which the grader compares", columns, remedy)
    return values


def _part_of(grader: Mapping[str, Any], where: str, own: Mapping[str, Any]) -> _Part:
    """Return the scorer that does the same as a single grader."""
    kind = grader.get("type")
    if kind == "string_check":
        scorer, weight = _string_check(grader, where)
    elif kind == "text_similarity":
        scorer, weight = _text_similarity(grader, where), 1.0
    elif isinstance(kind, str) and kind in own:
        _check_keys(grader, ("type", "name", *_TEXTS), where)
        scorer, weight = dict(own[kind]), 1.0
    elif isinstance(kind, str) and kind in _REWARDS:
        _check_keys(grader, ("type", "name", *_TEXTS, *_SETTINGS), where)
        scorer, weight = {"scorer": kind, **{key: grader[key] for key in _SETTINGS if key in grader}}, 1.0
    else:
        reason = _REFUSED_TYPES.get(kind, "use one of these") if isinstance(kind, str) else "use one of these"
        expected = " or ".join(
            (*_OPENAIS, *(("multi",) if where == "grader" else ()), *_REWARDS, *own),
        )
        raise _unsupported(f"{where}.type", expected, kind, reason)
    needs_texts = kind in _OPENAIS
    answer = _template(grader, "input")
    if answer != _ANSWER and (needs_texts or answer is not None):
        remedy = "write the expected value, which stands for the generated text"
        raise _unsupported(f"{where}.input", f"'{{{{{_ANSWER}}}}}'", grader.get("input"), remedy)
    reference = _template(grader, "reference")
    found = _COLUMN.fullmatch(reference or "")
    if found is None and (needs_texts or reference is not None):
        remedy = f"write the name of a column of the rows ({{{{item.{_REPLY}}}}} stands for the reply of a row)"
        raise _unsupported(f"{where}.reference", "'{{item.<column>}}'", grader.get("reference"), remedy)
    return _Part(scorer, weight, None if found is None else found[1])


def _string_check(grader: Mapping[str, Any], where: str) -> tuple[dict[str, Any], float]:
    _check_keys(grader, ("type", "name", "operation", *_TEXTS), where)
    operations: Mapping[str, tuple[dict[str, Any], float]] = {
        "eq": ({"scorer": "exact"}, 1.0),
        # A grade of 1 less for all answers teaches the same.
        "ne": ({"scorer": "exact"}, -1.0),
        "like": ({"scorer": "contains"}, 1.0),
        "ilike": ({"scorer": "contains", "ignore_case": True}, 1.0),
    }
    operation = grader.get("operation")
    if not isinstance(operation, str) or operation not in operations:
        raise _unsupported(f"{where}.operation", " or ".join(operations), operation, "use one of these")
    return operations[operation]


def _text_similarity(grader: Mapping[str, Any], where: str) -> dict[str, Any]:
    _check_keys(grader, ("type", "name", "evaluation_metric", *_TEXTS), where)
    measure, known = grader.get("evaluation_metric"), get_args(SimilarityMeasure)
    if measure not in known:
        raise _unsupported(f"{where}.evaluation_metric", " or ".join(known), measure, "use one of these")
    return {"scorer": "similarity", "measure": measure}


def _template(grader: Mapping[str, Any], key: str) -> str | None:
    """Return the variable that stands alone in a text of a grader; an empty text if the text has anything else, None if
    there is no text."""
    if grader.get(key) is None:
        return None
    found = _TEMPLATE.fullmatch(str(grader[key]).strip())
    return "" if found is None else found[1]


def _weighted(grader: Mapping[str, Any], own: Mapping[str, Any]) -> list[_Part]:
    """Return the scorers of a grader of the type ``multi``, with their weights in its formula."""
    _check_keys(grader, ("type", "name", "graders", "calculate_output"), "grader")
    inner, formula = grader.get("graders"), grader.get("calculate_output")
    if isinstance(inner, Mapping) and isinstance(inner.get("type"), str):  # a single one, as in the client's types
        inner = {str(inner.get("name")): inner}
    if not isinstance(inner, Mapping) or not inner or not all(isinstance(one, Mapping) for one in inner.values()):
        raise _unsupported("grader.graders", "graders by their names", inner, "name at least one")
    expected = f"a sum of {', '.join(map(str, inner))}, each times a number (a * 0.5 + b)"
    weights = _linear(formula)
    if weights is None or weights.pop("", 0.0) or weights.keys() - inner.keys():
        raise _unsupported("grader.calculate_output", expected, formula, "write such a sum")
    if unused := [name for name in inner if not weights.get(name)]:
        raise _unsupported("grader.calculate_output", expected, formula, f"use {unused[0]}, or remove it")
    parts = {name: _part_of(one, f"grader.graders.{name}"[:100], own) for name, one in inner.items()}
    return [part._replace(weight=part.weight * weights[name]) for name, part in parts.items()]


_MOST_DEPTH = 100
"""Maximum depth of nested operations in a formula; each term of a sum adds one."""


def _linear(formula: object) -> dict[str, float] | None:
    """Return the factor of every name in a formula, and the constant under the empty name; None if it is not a sum of
    products of a name and numbers. Nothing is evaluated but numbers."""
    if not isinstance(formula, str) or len(formula) > _MOST_CHARS:
        return None
    try:
        terms = _terms(ast.parse(formula.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):  # the parser raises the last two
        return None
    return terms if all(map(math.isfinite, terms.values())) else None


def _terms(node: ast.expr, depth: int = _MOST_DEPTH) -> dict[str, float]:
    if not depth:
        raise ValueError(f"expected at most {_MOST_DEPTH} nested operations, found more")
    inner = partial(_terms, depth=depth - 1)
    match node:
        case ast.Name(id=name):
            return {name: 1.0}
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return {"": float(number)}
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return _scaled(inner(operand), -1.0)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return inner(operand)
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() as operator, right=right):
            terms, added = inner(left), _scaled(inner(right), -1.0 if isinstance(operator, ast.Sub) else 1.0)
            return {name: terms.get(name, 0.0) + added.get(name, 0.0) for name in (*terms, *added)}
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            one, other = sorted((inner(left), inner(right)), key=lambda terms: terms.keys() != {""})
            return _scaled(other, _number(one))
        case ast.BinOp(left=left, op=ast.Div(), right=right):
            return _scaled(inner(left), 1.0 / _number(inner(right)))
    raise ValueError(f"expected sums and products, found {type(node).__name__}")


def _number(terms: Mapping[str, float]) -> float:
    if terms.keys() != {""}:
        raise ValueError("expected a number, found a name")
    return terms[""]


def _scaled(terms: Mapping[str, float], factor: float) -> dict[str, float]:
    return {name: factor * value for name, value in terms.items()}


def _check_keys(grader: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    for key in grader:
        if key not in known:
            raise _unsupported(where, f"the keys {', '.join(known)}", key, "remove it")


def _unsupported(where: str, expected: str, found: object, remedy: str) -> ApiError:
    param = where.partition(".")[0]
    return refused(f"{where}: expected {expected}, found {quoted(found)}; {remedy}", param, "unsupported_grader")
