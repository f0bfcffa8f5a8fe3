"""Function objects are written to a task by their names, where any process finds them by these names."""

from __future__ import annotations

import functools
import sys
from types import ModuleType

import pytest
import scoring_functions

from alto.errors import SpecError
from alto.spec import Scoring, Task


def local(**_: str) -> float:
    return 0.0


def make_task(**keys: object) -> Task:
    return Task(model="alto-tiny", dataset="rows.jsonl", **keys)


def test_a_function_is_named() -> None:
    expected = Scoring(scorer="python", function="scoring_functions:length")
    for given in (scoring_functions.length, {"scorer": "python", "function": scoring_functions.length}):
        task = make_task(select_by=given)
        assert task.select_by == expected
        assert task.needs_trust
        assert Task(**task.to_dict()) == task
    assert Scoring(scorer="python", function=scoring_functions.length) == expected


def test_a_method_of_a_class_is_named_too(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("given_scores")
    exec("class Scores:\n    @staticmethod\n    def one(**_): return 1.0", vars(module))
    monkeypatch.setitem(sys.modules, "given_scores", module)
    task = make_task(select_by=vars(module)["Scores"].one)
    assert task.scoring is not None
    assert task.scoring.function == "given_scores:Scores.one"


class Callable:
    def __call__(self, **_: str) -> float:
        return 0.0


@pytest.mark.parametrize(
    "function",
    [lambda **_: 0.0, functools.partial(local), Callable(), functools.wraps(scoring_functions.length)(lambda **_: 0.0)],
    ids=["lambda", "partial", "object", "wrapped"],
)
def test_a_function_without_a_name_of_its_own_is_refused(function: object) -> None:
    with pytest.raises(SpecError, match=r"select_by.function should be a function that other processes can import"):
        make_task(select_by=function)


def test_a_function_of_the_program_itself_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    main = sys.modules["__main__"]

    def score(**_: str) -> float:
        return 0.0

    score.__module__, score.__qualname__ = "__main__", "score"
    monkeypatch.setattr(main, "score", score, raising=False)
    with pytest.raises(SpecError, match=r"found score of the program or the notebook itself"):
        make_task(select_by=score)


def test_a_metric_is_no_function() -> None:
    with pytest.raises(SpecError, match=r"metric should be the name of what is measured .* Give it as select_by"):
        make_task(metric=scoring_functions.length)
