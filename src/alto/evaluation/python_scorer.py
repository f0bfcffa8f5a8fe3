"""Scoring of answers by a Python function of the user."""

from __future__ import annotations

import importlib
import math
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from alto.errors import SpecError
from alto.evaluation.deadline import TooLateError, within
from alto.evaluation.scorers import Answer, OnTurn, ScorerFailedError

__all__ = ["PythonScorer"]


class PythonScorer:
    """A scorer that calls ``function(prompt=…, reference=…, answer=…)`` for one row after another, in separate threads
    of this process.

    Args:
        name: Dotted name of the function; it is imported and runs with all rights of this process.
        timeout_s: Maximum seconds per call.

    Raises:
        SpecError: There is no such function.
    """

    def __init__(self, name: str, timeout_s: float) -> None:
        self._name = name
        self._timeout_s = timeout_s
        self._function = _imported(name)

    def __call__(self, answers: Sequence[Answer], on_turn: OnTurn) -> list[float]:
        return [self._score(number, one, on_turn) for number, one in enumerate(answers, start=1)]

    def _score(self, number: int, one: Answer, on_turn: OnTurn) -> float:
        def call() -> tuple[Any, str]:
            try:
                return self._function(prompt=one.prompt, reference=one.reference, answer=one.answer), ""
            except BaseException as error:  # includes SystemExit
                return None, _described(error)

        try:
            found, failure = within(self._timeout_s, call, on_turn)
        except TooLateError as error:
            raise ScorerFailedError(f"{self._name}: row {number}: {error}; increase timeout_s") from None
        if failure:
            raise ScorerFailedError(f"{self._name}: row {number}: it raised {failure}")
        try:
            score = math.nan if isinstance(found, str | bytes) else float(found)
        except Exception:
            score = math.nan
        if not math.isfinite(score):
            raise ScorerFailedError(
                f"{self._name}: row {number}: expected a finite number, found {found!r:.60} ({type(found).__name__})"
            )
        return score


def _imported(name: str) -> Callable[..., object]:
    module_name, _, function_name = name.partition(":") if ":" in name else name.rpartition(".")
    remedy = (
        "correct the name, or install its package (for a module in a different folder, set the environment variable "
        "PYTHONPATH)"
    )
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:
        raise SpecError(
            f"select_by.function: expected a module {module_name!r} that can be imported, found {_described(error)}; "
            f"{remedy}"
        ) from error
    for part in function_name.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        raise SpecError(
            f"select_by.function: expected a function {function_name!r} in the module {module_name!r}, found "
            f"{'none' if found is None else type(found).__name__}; {remedy}"
        )
    return found


def _described(error: BaseException) -> str:
    """Return the type, message and source line of an error."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    try:
        said = str(error)
    except Exception:
        said = ""
    return f"{type(error).__name__}{': ' if said else ''}{said:.200}{place}"
