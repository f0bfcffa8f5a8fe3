"""Answers scored by a Python function."""

from __future__ import annotations

import time

import pytest
import scoring_functions

from alto.errors import SpecError
from alto.evaluation.scorers import Answer, ScorerFailedError
from alto.evaluation.scoring import PythonScorer

ANSWERS = [Answer(prompt=f"p{n}", reference=f"r{n}", answer="x" * n) for n in range(3)]


def scorer(function: str, timeout_s: float = 30.0) -> PythonScorer:
    return PythonScorer(f"scoring_functions:{function}", timeout_s)


@pytest.mark.parametrize("name", ["scoring_functions:length", "scoring_functions.length"])
def test_the_function_gets_every_row_by_keyword(name: str) -> None:
    scoring_functions.CALLS.clear()
    turns: list[None] = []
    found = PythonScorer(name, 30.0)(ANSWERS, lambda: turns.append(None))
    assert found == [0.0, 0.01, 0.02]
    assert scoring_functions.CALLS[1] == {"prompt": "p1", "reference": "r1", "answer": "x"}
    assert len(turns) >= len(ANSWERS)


def test_a_truth_value_is_one_or_zero() -> None:
    rows = [Answer(prompt="", reference="2", answer="It is 2."), Answer(prompt="", reference="2", answer="3")]
    assert scorer("is_right")(rows, lambda: None) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("raising", r"row 1: it raised LookupError: the judge is asleep \(scoring_functions.py, line \d+\)"),
        ("exiting", "row 1: it raised SystemExit: 3"),
        ("text", r"row 1: expected a finite number, found '0.5' \(str\)"),
        ("nothing", r"row 1: expected a finite number, found None \(NoneType\)"),
        ("infinite", "row 1: expected a finite number, found inf"),
    ],
)
def test_what_is_no_score_is_a_failure_with_its_reason(function: str, said: str) -> None:
    with pytest.raises(ScorerFailedError, match=said):
        scorer(function)(ANSWERS, lambda: None)


def test_a_function_that_hangs_is_given_up() -> None:
    began = time.monotonic()
    with pytest.raises(ScorerFailedError, match=r"row 1: no result within 0.2 s; increase timeout_s"):
        scorer("hanging", 0.2)(ANSWERS, lambda: None)
    assert time.monotonic() - began < 10


def test_a_user_who_wants_to_stop_does_not_wait_for_it() -> None:
    began = time.monotonic()

    def stop() -> None:
        if time.monotonic() - began > 0.2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        scorer("hanging")(ANSWERS, stop)
    assert time.monotonic() - began < 10


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("no_such_module:score", "expected a module 'no_such_module' that can be imported, found ModuleNotFoundError"),
        ("scoring_functions:absent", "expected a function 'absent' in the module 'scoring_functions', found none"),
        ("scoring_functions.NOT_A_FUNCTION", "expected a function 'NOT_A_FUNCTION' .* found int"),
    ],
)
def test_a_function_that_is_not_there_is_refused_at_once(name: str, said: str) -> None:
    with pytest.raises(SpecError, match=f"select_by.function: {said}"):
        PythonScorer(name, 30.0)
