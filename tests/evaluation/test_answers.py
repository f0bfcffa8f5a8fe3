"""Final answers: what counts as one, what two may differ in, and that GSM8K's references all have one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from alto.evaluation.scorers import final_answer, final_number

GSM8K = Path(__file__).parents[2] / "../shared/data/gsm8k"


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("6 * 3 = 18\n#### 18", "18"),
        ("####18", "18"),
        ("#### $1,234,567.", "1234567"),
        ("#### -5 ", "-5"),
        ("#### 3.50", "3.50"),
        ("#### 1,5", "1,5"),  # not a thousands comma
        ("#### 18\nThat is all.", "18"),
        ("#### 17\nNo, wait.\n#### 18", "18"),
        ("#### 18 eggs", "18 eggs"),
        ("The answer is 18.", None),
        ("####", None),
        ("####\n18", None),
        ("#### $.", None),
        ("", None),
    ],
)
def test_final_answer(text: str, answer: str | None) -> None:
    assert final_answer(text) == answer


def test_answers_are_compared_as_they_are_written() -> None:
    assert final_answer("#### 18.0") != final_answer("#### 18")
    assert final_answer("#### 018") != final_answer("#### 18")


def test_a_heading_is_no_number() -> None:
    assert final_number("#### Summary") is None
    assert final_number("18") is None
    assert final_number("so\n#### $1,000.50") == "1000.50"


@pytest.mark.parametrize("split", ["train", "test"])
def test_every_reference_of_gsm8k_has_an_answer(split: str) -> None:
    path = GSM8K / f"{split}.jsonl"
    if not path.is_file():
        pytest.skip(f"the real data is not there: {path}")
    answers = [json.loads(line)["answer"] for line in path.read_text(encoding="utf-8").splitlines()]
    assert len(answers) > 1000
    assert all((final_number(answer) or "").lstrip("-").replace(".", "").isdigit() for answer in answers)
