"""The quickstart's data: the same on every machine, no row in two splits, every answer correct."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import random
import re
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "make_word_problems.py"
SIZES = {"train": 400, "validation": 60, "test": 100}
STEP = re.compile(r"(\d+) ([-+*/]) (\d+) = (\d+) [a-z]+")


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_word_problems", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def splits(script: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, str]]]:
    folder = tmp_path_factory.mktemp("word_problems")
    script.main(["--output", str(folder)])
    return {split: read_jsonl(folder / f"{split}.jsonl") for split in SIZES}


@pytest.fixture(scope="module")
def rows(splits: dict[str, list[dict[str, str]]]) -> list[dict[str, str]]:
    return [row for split in splits.values() for row in split]


def read_jsonl(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def read_bytes(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def compute(left: str, sign: str, right: str) -> Fraction:
    a, b = Fraction(left), Fraction(right)
    return {"+": a + b, "-": a - b, "*": a * b, "/": a / b}[sign]


def test_splits_have_the_sizes_asked_for(splits):
    assert {split: len(rows) for split, rows in splits.items()} == SIZES


def test_every_row_is_a_question_and_an_answer(rows):
    for row in rows:
        assert set(row) == {"question", "answer"}
        assert re.fullmatch(r"[A-Z][A-Za-z0-9 ,.]+\?", row["question"])
        assert 10 <= len(row["question"].split()) <= 40


def test_every_shown_step_and_final_answer_is_right(rows):
    for row in rows:
        *steps, last = row["answer"].split("\n")
        assert 1 <= len(steps) <= 3
        matches = [STEP.fullmatch(step) for step in steps]
        assert all(matches), row
        for left, sign, right, value in (match.groups() for match in matches):
            assert compute(left, sign, right) == int(value), row
        assert last == f"#### {matches[-1].group(4)}"


def test_every_number_of_a_solution_comes_from_the_question_or_an_earlier_step(rows):
    for row in rows:
        known = set(re.findall(r"\d+", row["question"]))
        known |= {"2"} if re.search(r"half|share them equally", row["question"]) else set()
        for left, _, right, value in STEP.findall(row["answer"]):
            assert {left, right} <= known, row
            known.add(value)


def test_no_question_repeats_within_or_across_splits(splits):
    questions = [row["question"] for rows in splits.values() for row in rows]
    assert len(set(questions)) == len(questions)


def test_no_problem_repeats_under_other_names(script):
    used: set[tuple[int, ...]] = set()
    rng = random.Random(0)
    template = script.TEMPLATES[0]
    size = 1
    for low, high in template.numbers.values():
        size *= high - low + 1
    rows = []
    while (row := script.draw_row(0, used, rng)) is not None:
        rows.append(row)
    numbers = [tuple(re.findall(r"\d+", row["question"])) for row in rows]
    assert len(set(numbers)) == len(numbers)
    assert 0.9 * size < len(numbers) <= size


def test_every_template_and_operation_appears_in_every_split(script, splits):
    patterns = [re.sub(r"\\\{\w+\\\}", r"\\w+", re.escape(template.question)) for template in script.TEMPLATES]
    for split, rows in splits.items():
        for pattern in patterns:
            assert any(re.fullmatch(pattern, row["question"]) for row in rows), (split, pattern)
        assert {sign for row in rows for _, sign, _, _ in STEP.findall(row["answer"])} == set("+-*/")


def test_same_seed_same_files_in_another_process(script, tmp_path):
    for folder, seed in (("a", 7), ("other_seed", 8)):
        script.main(["--output", str(tmp_path / folder), "--seed", str(seed), "--train", "30"])
    command = [sys.executable, "-I", str(SCRIPT), "--output", str(tmp_path / "b"), "--seed", "7", "--train", "30"]
    subprocess.run(command, check=True, capture_output=True)
    assert read_bytes(tmp_path / "a") == read_bytes(tmp_path / "b")
    assert read_bytes(tmp_path / "a")["train.jsonl"] != read_bytes(tmp_path / "other_seed")["train.jsonl"]


def test_solve_rejects_numbers_that_do_not_come_out_clean(script):
    halves = next(template for template in script.TEMPLATES if template.steps == ("a + b", "x / 2"))
    assert script.solve(halves, {"a": 3, "b": 5}) == [("3 + 5", 8), ("8 / 2", 4)]
    assert script.solve(halves, {"a": 3, "b": 6}) is None
    lost = next(template for template in script.TEMPLATES if template.steps == ("a - b",))
    assert script.solve(lost, {"a": 20, "b": 20}) is None
    assert script.solve(lost, {"a": 20, "b": 60}) is None


def test_a_wrong_formula_is_caught(script):
    broken = dataclasses.replace(script.TEMPLATES[0], formula="a - b")
    with pytest.raises(AssertionError):
        script.write_row(broken, {"a": 9, "b": 4}, random.Random(0))


@pytest.mark.parametrize("expression", ["a ** 2", "-a", "f(a)", "1.5", "a < 2"])
def test_evaluate_knows_four_operations_only(script, expression):
    with pytest.raises(ValueError, match="expected whole numbers"):
        script.evaluate(expression, {"a": 3})


@pytest.mark.parametrize("count", ["0", "-3", "many"])
def test_a_bad_count_is_named(script, tmp_path, capsys, count):
    with pytest.raises(SystemExit) as failure:
        script.main(["--output", str(tmp_path), f"--train={count}"])
    assert failure.value.code == 2
    assert f"at least 1, found {count!r}" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_more_rows_than_there_are_problems_is_an_error(script, monkeypatch):
    tiny = dataclasses.replace(script.TEMPLATES[0], numbers={"a": (1, 3), "b": (1, 2)})
    monkeypatch.setattr(script, "TEMPLATES", (tiny,))
    assert len(script.make_rows(6, seed=0)) == 6
    with pytest.raises(ValueError, match="at most 6 rows in all, found 7"):
        script.make_rows(7, seed=0)
