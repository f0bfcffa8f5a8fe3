"""Graders of generated answers, which choose among finalists: OpenAI's as scorers of ALTO, and ALTO's own."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from alto.errors import SpecError
from alto.service.errors import ApiError, refused
from alto.spec.quoting import quoted
from alto.spec.scoring import parse_select_by

__all__ = ["check_grader", "select_by_of"]

_SCORERS = ("exact", "contains", "numeric", "exact_match", "json", "tool_call", "multiple_choice")
"""Scorers that requests may name. The others run code, contact servers, or may never end (backtracking patterns)."""
_KEYS = ("scorer", "keys", "tolerance", "ignore_case", "num_rows", "max_new_tokens", "at")
_OPERATIONS: Mapping[str, dict[str, Any]] = {
    "eq": {"scorer": "exact"},
    "like": {"scorer": "contains"},
    "ilike": {"scorer": "contains", "ignore_case": True},
}
_STRING_CHECK = {"input": "sample.output_text", "reference": "item.reference"}
"""Keys of OpenAI's grader, with the only template that each may have."""
_TEMPLATE = re.compile(r"\{\{\s*([\w.]+)\s*\}\}")


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
        return _scorer_of(value)
    if value.get("scorer") not in _SCORERS:
        raise _unsupported("select_by.scorer", " or ".join(_SCORERS), value.get("scorer"), "use one of these")
    for key in value:
        if key not in _KEYS:
            raise _unsupported("select_by", f"the keys {', '.join(_KEYS)}", key, "remove it")
    return dict(value)


def check_grader(grader: Mapping[str, Any]) -> None:
    """Check a grader as if it were ``select_by`` of a job.

    Raises:
        ApiError: A job could not have this grader.
    """
    try:
        parse_select_by(select_by_of(grader))
    except SpecError as error:
        raise refused(str(error), "grader") from None


def _scorer_of(grader: Mapping[str, Any]) -> dict[str, Any]:
    """Return the scorer that does the same as a grader of OpenAI."""
    if grader["type"] != "string_check":
        remedy = f"write string_check, or {{scorer: …}} with one of {', '.join(_SCORERS)}"
        raise _unsupported("select_by.type", "'string_check'", grader["type"], remedy)
    for key in grader:
        if key not in ("type", "name", "operation", *_STRING_CHECK):
            raise _unsupported("select_by", "the keys type, name, input, reference, operation", key, "remove it")
    for key, wanted in _STRING_CHECK.items():
        found = _TEMPLATE.fullmatch(str(grader.get(key)).strip())
        if found is None or found[1] != wanted:
            what = "generated text" if key == "input" else "reply of a row"
            remedy = f"write the expected value, which stands for the {what}"
            raise _unsupported(f"select_by.{key}", f"'{{{{{wanted}}}}}'", grader.get(key), remedy)
    operation = grader.get("operation")
    if not isinstance(operation, str) or operation not in _OPERATIONS:
        raise _unsupported("select_by.operation", " or ".join(_OPERATIONS), operation, "use one of these")
    return dict(_OPERATIONS[operation])


def _unsupported(where: str, expected: str, found: object, remedy: str) -> ApiError:
    return refused(f"{where}: expected {expected}, found {quoted(found)}; {remedy}", "select_by", "unsupported_grader")
