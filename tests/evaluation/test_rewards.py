"""Rewards of completions: scorers and users' functions, which run in processes of their own and may fail in any way."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from alto.errors import SpecError
from alto.evaluation import Answer, Completion, Rewards, ScorerFailedError
from alto.spec.scoring import parse_reward_funcs

MODULE = """
import math, os, sys, time
from pathlib import Path

def lengths(prompts, completions, completion_ids, reference, **_):
    print("not an answer")
    return [len(ids) + 10 * (text == wanted) for ids, text, wanted in zip(completion_ids, completions, reference)]

def right(completions, reference, **_):
    return [text == wanted for text, wanted in zip(completions, reference)]

def some(completions, **_):
    return [None if "?" in text else 1.0 for text in completions]

def raising(completions, **_):
    if any("bad" in text for text in completions):
        raise ValueError("cannot read\\nthis")
    return [0.0] * len(completions)

def hanging(**_):
    time.sleep(600)

def dying(**_):
    os._exit(3)

def exiting(**_):
    sys.exit("enough")

def short(completions, **_):
    return [1.0] * (len(completions) - 1)

def text(completions, **_):
    return ["1"] * len(completions)

def nan(completions, **_):
    return [math.nan if "bad" in text else 1.0 for text in completions]

def infinite(completions, **_):
    return [math.inf] * len(completions)

def process(**_):
    return [os.getpid(), os.getppid()]

def one_number(**_):
    return 1.0

def by_level(completions, level, hint=None, **other):
    assert sorted(other) == ["completion_ids", "prompts", "reference", "tags"], sorted(other)
    return [one + (text is not None) for one, text in zip(level, hint)]
"""
COMPLETIONS = [
    Completion(answer=Answer(prompt="2 + 2", reference="4", answer="4"), ids=[7]),
    Completion(answer=Answer(prompt="2 + 3", reference="5", answer="bad 4"), ids=[7, 8, 9]),
    Completion(answer=Answer(prompt="2 + 4", reference="6", answer="?"), ids=[]),
]


@pytest.fixture(autouse=True)
def _module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "users_rewards.py").write_text(MODULE, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)


@pytest.fixture
def made() -> Iterator[list[Rewards]]:
    made: list[Rewards] = []
    yield made
    for rewards in made:
        rewards.close()


def rewards_of(made: list[Rewards], *names: object, weights: list[float] | None = None) -> list[float]:
    rewards = Rewards(parse_reward_funcs(names), weights)
    made.append(rewards)
    return rewards(COMPLETIONS, lambda: None)


def function(name: str, **settings: object) -> dict[str, object]:
    return {"scorer": "python", "function": f"users_rewards:{name}", **settings}


def test_scorers_and_functions_are_weighted_and_summed(made: list[Rewards]) -> None:
    assert rewards_of(made, "exact") == [1.0, 0.0, 0.0]
    assert rewards_of(made, "exact", "users_rewards:lengths") == [12.0, 3.0, 0.0]
    assert rewards_of(made, "exact", "users_rewards:lengths", weights=[2.0, -0.5]) == [-3.5, -1.5, 0.0]


def test_booleans_are_numbers(made: list[Rewards]) -> None:
    assert rewards_of(made, "users_rewards:right") == [1.0, 0.0, 0.0]


def test_a_completion_counts_by_the_rewards_that_can_score_it(made: list[Rewards]) -> None:
    assert rewards_of(made, "users_rewards:some", "exact") == [2.0, 1.0, 0.0]
    first, second, third = rewards_of(made, "users_rewards:some")
    assert (first, second) == (1.0, 1.0)
    assert math.isnan(third)


def test_functions_get_the_columns_of_every_completions_row(made: list[Rewards]) -> None:
    rewards = Rewards(parse_reward_funcs(["users_rewards:by_level"]))
    made.append(rewards)
    columns: list[dict[str, object]] = [
        {"level": 1, "tags": ["a"]},
        {"level": 2.5, "tags": [], "hint": "add"},
        {"level": 3, "tags": None},
    ]
    completions = [replace(one, columns=of_row) for one, of_row in zip(COMPLETIONS, columns, strict=True)]
    assert rewards(completions, lambda: None) == [1.0, 3.5, 3.0]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "raising",
            r"it raised ValueError: .*users_rewards.py, line \d+\) for completion 2 \('bad 4'\) of .*2 \+ 3",
        ),
        ("dying", r"it ended its process \(exit code 3\)"),
        ("exiting", "it raised SystemExit: enough"),
        ("short", "expected a list of 3 numbers, one for each completion, found 2 entries"),
        ("one_number", "expected a list of 3 numbers, one for each completion, found 1.0"),
        ("text", r"expected a finite number or None, found '1' for completion 1 \('4'\) of the prompt '2 \+ 2'"),
        ("nan", r"expected a finite number or None, found nan for completion 2 \('bad 4'\) of the prompt '2 \+ 3'"),
        ("infinite", "expected a finite number or None, found inf for completion 1"),
    ],
)
def test_a_function_that_returns_no_rewards_is_named_with_the_completion(
    name: str, message: str, made: list[Rewards]
) -> None:
    with pytest.raises(ScorerFailedError, match=rf"(?s)^users_rewards:{name}: {message}"):
        rewards_of(made, function(name))


def test_a_function_that_hangs_is_ended_and_the_next_call_starts_it_again(made: list[Rewards]) -> None:
    for _ in range(2):
        began = time.monotonic()
        with pytest.raises(ScorerFailedError, match=r"users_rewards:hanging: no result within 0.2 s; .*timeout_s"):
            rewards_of(made, function("hanging", timeout_s=0.2))
        assert time.monotonic() - began < 60


def test_functions_run_in_a_process_of_their_own_which_close_ends(made: list[Rewards]) -> None:
    rewards = Rewards(parse_reward_funcs([function("process")]))
    [child, parent] = rewards(COMPLETIONS[:2], lambda: None)
    assert parent == os.getpid()
    os.kill(int(child), 0)
    rewards.close()
    with pytest.raises(ProcessLookupError):
        os.kill(int(child), 0)


@pytest.mark.parametrize("is_in_path", [True, False])
def test_a_file_of_the_user_does_not_replace_a_module_of_the_standard_library(
    is_in_path: bool, made: list[Rewards], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "current"
    folder.mkdir()
    for name in ("json", "traceback", "socket", "subprocess"):
        (folder / f"{name}.py").write_text("raise ImportError('this is not the standard library')", encoding="utf-8")
    (folder / "beside.py").write_text("import json\ndef f(completions, **_):\n    return json.loads('[1, 2, 3]')")
    monkeypatch.chdir(folder)
    if is_in_path:
        monkeypatch.syspath_prepend(folder)
    assert rewards_of(made, "beside:f") == [1.0, 2.0, 3.0]


def test_an_error_of_the_caller_ends_the_call_and_its_process(made: list[Rewards]) -> None:
    rewards = Rewards(parse_reward_funcs([function("hanging")]))
    made.append(rewards)

    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rewards(COMPLETIONS, stop)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("users_rewards:missing", "expected a function 'missing' in the module 'users_rewards', found none"),
        ("no_such_module:f", "expected a module 'no_such_module' that can be imported, found ModuleNotFoundError"),
        ("users_rewards:MODULE.x", "expected a function 'MODULE.x' in the module 'users_rewards', found none"),
    ],
)
def test_a_function_that_does_not_exist_is_reported_before_training(name: str, message: str) -> None:
    with pytest.raises(SpecError, match=f"reward_funcs: {message}.*correct the name"):
        Rewards(parse_reward_funcs([name]))
