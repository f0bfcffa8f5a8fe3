"""Built-in scorers: what each reads from a text, and which answers agree with a reference."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from alto.errors import DataError
from alto.evaluation.matching import Matching, check_keys, matching_of, tool_calls_in
from alto.evaluation.scorers import Answer, final_answer, final_number
from alto.spec import Scoring


def matching(scorer: str, **settings: Any) -> Matching:
    found = matching_of(Scoring(scorer=scorer, **settings))
    assert found is not None
    return found


def is_right(scorer: str, reference: str, answer: str, **settings: Any) -> bool:
    (score,) = matching(scorer, **settings)([Answer(prompt="", reference=reference, answer=answer)], lambda: None)
    return score == 1


@pytest.mark.parametrize(
    ("reference", "answer", "right"),
    [
        ("Oslo", "Oslo", True),
        ("Oslo", "  Oslo\n", True),
        ("New York", "New\n\u00a0York", True),
        ("caf\u00e9", "cafe\u0301", True),
        ("cafe", "caf\u00e9", False),
        ("Oslo", "oslo", False),
        ("Oslo", "Oslo.", False),
        ("Oslo", "", False),
        ("10\u00b2", "102", False),
    ],
)
def test_exact(reference: str, answer: str, right: bool) -> None:
    assert is_right("exact", reference, answer) is right


def test_case_is_ignored_where_that_is_asked() -> None:
    assert is_right("exact", "STRASSE", "stra\u00dfe", ignore_case=True)
    assert is_right("contains", "Oslo", "it is OSLO, I think", ignore_case=True)
    assert is_right("regex", "x", "ANSWER: B", pattern="answer: b", ignore_case=True)
    assert not is_right("contains", "Oslo", "it is OSLO, I think")


@pytest.mark.parametrize(
    ("reference", "answer", "right"),
    [
        ("Oslo", "The capital is Oslo.", True),
        ("New York", "I mean New\n  York City", True),
        ("The capital is Oslo.", "Oslo", False),
        ("Oslo", "", False),
    ],
)
def test_contains(reference: str, answer: str, right: bool) -> None:
    assert is_right("contains", reference, answer) is right


def test_a_pattern_without_a_group_is_searched_for() -> None:
    assert is_right("regex", "whatever", "So the date is 2024-05-06.", pattern=r"\d{4}-\d\d-\d\d")
    assert not is_right("regex", "2024-05-06", "", pattern=r"\d{4}-\d\d-\d\d")


@pytest.mark.parametrize(
    ("answer", "right"), [("I think so. Answer:  B", True), ("Answer: C", False), ("B", False), ("", False)]
)
def test_a_group_captures_the_same_of_both(answer: str, right: bool) -> None:
    assert is_right("regex", "It is two. Answer: B", answer, pattern=r"Answer:\s*(\w)") is right


def test_a_group_that_captures_nothing_of_the_reference_agrees_with_nothing() -> None:
    assert not is_right("regex", "no letter", "no letter", pattern="Answer: (B)?")
    assert not is_right("regex", "Answer: ", "Answer: ", pattern="Answer: (B)?")


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("The answer is 18.", "18"),
        ("18 of 20, so 90%", "90"),
        ("$1,234,567.50 in all.", "1234567.50"),
        ("-5", "-5"),
        ("-$5", "-5"),
        ("$-5", "-5"),
        ("\u22125", "-5"),
        ("it fell to (-5)", "-5"),
        ("10-5", "5"),
        ("(2+3)-5", "5"),
        ("x = -.5", "-.5"),
        ("pages 3\u20135", "5"),
        ("+7", "7"),
        ("1e3 or so", "1000"),
        ("2.5E-3", "0.0025"),
        ("5kg", "5"),
        ("about 1,5", "5"),
        ("1,2345", "2345"),
        ("1,234, and more", "1234"),
        ("area in m2 of room_7", None),
        ("GPT4", None),
        ("10 m\u00b2", "10"),
        ("1e999999999999", "1"),
        ("none", None),
        ("", None),
        ("inf or NaN", None),
    ],
)
def test_the_last_number(text: str, number: str | None) -> None:
    assert matching("numeric").read(text) == (None if number is None else Decimal(number))


@pytest.mark.parametrize(
    ("reference", "answer", "tolerance", "right"),
    [
        ("so it is 18", "18.0", 0, True),
        ("1,000", "1000", 0, True),
        ("1,000", "1.000", 0, False),
        ("0.3", "0.30000000000000004", 0, False),
        ("0.3", "0.30000000000000004", 1e-9, True),
        ("100", "100.5", 0.5, True),
        ("100", "100.51", 0.5, False),
        ("-5", "5", 0.5, False),
        ("12345678901234567890123456789012345", "12345678901234567890123456789012346", 0, False),
        ("7", "", 10, False),
        ("none", "none", 10, False),
    ],
)
def test_numbers_within_the_tolerance(reference: str, answer: str, tolerance: float, right: bool) -> None:
    assert is_right("numeric", reference, answer, tolerance=float(tolerance)) is right


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("<think>2 + 2</think><answer>4</answer>", True),
        ("\n<think>\n2 < 3\n</think>\n\n<answer></answer>\n", True),
        ("<think>a</think> so <answer>4</answer>", False),
        ("So: <think>a</think><answer>4</answer>", False),
        ("<think>a</think><answer>4</answer>.", False),
        ("<answer>4</answer><think>a</think>", False),
        ("<think>a<answer>4</answer></think>", False),
        ("<think>a</think><think>b</think><answer>4</answer>", False),
        ("<think>a</think><answer>4", False),
        ("<think>a</think>", False),
        ("<Think>a</Think><answer>4</answer>", False),
        ("", False),
    ],
)
def test_format(answer: str, right: bool) -> None:
    assert is_right("format", "whatever", answer) is right


def test_the_tags_of_a_format_may_be_others() -> None:
    assert is_right("format", "4", "<a>1</a> <b-2>2</b-2> <c>3</c>", tags=["a", "b-2", "c"])
    assert not is_right("format", "4", "<a>1</a> <c>3</c>", tags=["a", "b-2", "c"])
    assert not is_right("format", "4", "<think>1</think><answer>2</answer>", tags=["answer"])


REFERENCE = "The cat sat on the mat, and the dog slept."
SIMILAR = "On the mat the cat and the dog sat; the bird slept."


@pytest.mark.parametrize(
    ("measure", "expected"),
    [
        # The values of rapidfuzz.fuzz.ratio / 100, and of the F-measures of rouge_score.RougeScorer.
        ("fuzzy_match", 0.6666667),
        ("rouge_1", 0.9090909),
        ("rouge_2", 0.5),
        ("rouge_3", 0.2222222),
        ("rouge_4", 0.0),
        ("rouge_5", 0.0),
        ("rouge_l", 0.6363636),
    ],
)
def test_similarity(measure: str, expected: float) -> None:
    scorer = matching("similarity", measure=measure)
    equal, similar, other = scorer(
        [Answer(prompt="", reference=REFERENCE, answer=answer) for answer in (REFERENCE, SIMILAR, "")], lambda: None
    )
    assert (equal, other) == (1.0, 0.0)
    assert similar == pytest.approx(expected, abs=1e-6)


def test_exact_match_is_the_number_behind_four_hashes_as_it_is_written() -> None:
    assert is_right("exact_match", "so\n#### 1,800", "6 * 300\n#### $1800.")
    assert not is_right("exact_match", "#### 18", "#### 18.0")
    assert not is_right("exact_match", "#### 18", "18")
    assert not is_right("exact_match", "#### Summary", "#### Summary")


ORDER = '{"id": 7, "total": 12.5, "city": {"name": "Oslo", "zip": "0150"}, "tags": ["a", "b"]}'


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        (ORDER, True),
        ('{"tags": ["a", "b"], "city": {"zip": "0150", "name": "Oslo"}, "total": 12.50, "id": 7.0}', True),
        (f"Here it is:\n```json\n{json.dumps(json.loads(ORDER), indent=2)}\n```\nFields are as in [1].", True),
        (f"I read [1] first. {ORDER} Anything else?", True),
        (f'A draft: {{"id": 8}}. Now the result: {ORDER}', True),
        (f'```json\n{ORDER}\n```\nA total may be missing, as in {{"id": 7}}.', True),
        (f"```\n{ORDER}", True),
        (ORDER.replace('["a", "b"]', '["b", "a"]'), False),
        (ORDER.replace("7", '"7"'), False),
        (ORDER.replace("12.5", "12.51"), False),
        (ORDER[:-1] + ', "more": null}', False),
        (ORDER[:-1], False),
        (ORDER.replace('"', "'"), False),
        (f"[{ORDER}]", False),
        ("", False),
        ("null", False),
        ("[" * 100_000, False),
    ],
)
def test_json(answer: str, right: bool) -> None:
    assert is_right("json", ORDER, answer) is right


@pytest.mark.parametrize(
    ("reference", "answer", "right"),
    [
        ('{"a": 1}', '{"a": 1.0}', True),
        ('{"a": 1}', '{"a": true}', False),
        ('{"a": 0}', '{"a": false}', False),
        ('{"a": null}', "{}", False),
        ('{"caf\u00e9": "caf\u00e9"}', '{"cafe\u0301": "cafe\\u0301"}', True),
        ('{"a": "x"}', '{"a": "x "}', False),
        ('{"a": NaN}', '{"a": NaN}', False),
        ('{"a": 1e400}', '{"a": 1e401}', False),
        ('{"a": 1e9999999999999999999}', '{"a": 1e9999999999999999999}', False),
        ('{"a": 0.1}', '{"a": 0.1000000000000000000001}', False),
        ("[1, [2, 3]]", "so [1, [2, 3]]", True),
        ("42", "```\n42.0\n```", True),
        ("true", "1", False),
        ('"Oslo"', "Oslo", False),
    ],
)
def test_values_are_equal_as_json_has_them(reference: str, answer: str, right: bool) -> None:
    assert is_right("json", reference, answer) is right


def test_only_the_named_keys_are_compared() -> None:
    keys = ("total", "city.name", "note")
    assert is_right("json", ORDER, '{"total": 12.50, "city": {"name": "Oslo"}, "id": 0}', keys=keys)
    assert not is_right("json", ORDER, '{"total": 12.5, "city": {"name": "Rome"}}', keys=keys)
    assert not is_right("json", ORDER, '{"total": 12.5}', keys=keys)
    assert not is_right("json", ORDER, '{"total": 12.5, "city": {"name": "Oslo"}, "note": "new"}', keys=keys)
    assert not is_right("json", ORDER, "[12.5]", keys=keys)
    assert is_right("json", '{"a.b": 1}', '{"a.b": 1, "c": 2}', keys=("a.b",))


def test_a_key_of_no_reference_is_refused() -> None:
    scoring = Scoring(scorer="json", keys=("total", "city.nmae"))
    with pytest.raises(
        DataError, match=r"the key 'city.nmae' in .* none of 1; did you mean 'city.name'\? Correct keys"
    ):
        check_keys(scoring, [ORDER])
    with pytest.raises(DataError, match=r"the key 'weather' in .* in none of 1; correct keys$"):
        check_keys(Scoring(scorer="json", keys=("weather",)), [ORDER])


CALL = '{"name": "weather", "arguments": {"city": "Oslo", "days": 2}}'
HERMES = f"<tool_call>\n{CALL}\n</tool_call>"


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        (HERMES, True),
        (f"I will look. {HERMES}", True),
        ('{"arguments": {"days": 2.0, "city": "Oslo"}, "name": "weather"}', True),
        ('{"name": "weather", "parameters": {"city": "Oslo", "days": 2}}', True),
        (f"[TOOL_CALLS] [{CALL}]", True),
        (
            '{"type": "function", "function": {"name": "weather", "arguments": "{\\"days\\": 2, '
            '\\"city\\": \\"Oslo\\"}"}}',
            True,
        ),
        (f'<think>{{"name": "weather", "arguments": {{}}}}?</think>{HERMES}', True),
        (HERMES.replace("Oslo", "Rome"), False),
        (HERMES.replace('"weather"', '"Weather"'), False),
        (HERMES.replace(', "days": 2', ""), False),
        (HERMES.replace("2", '"2"'), False),
        (HERMES * 2, False),
        (HERMES[:-14].rstrip("}"), False),
        ("It rains.", False),
        ("", False),
    ],
)
def test_tool_calls(answer: str, right: bool) -> None:
    assert is_right("tool_call", HERMES, answer) is right


def test_calls_may_come_in_any_order_but_each_once() -> None:
    other = '<tool_call>{"name": "time", "arguments": {}}</tool_call>'
    assert is_right("tool_call", HERMES + other, other + HERMES)
    assert not is_right("tool_call", HERMES + other, HERMES + HERMES)
    assert not is_right("tool_call", HERMES + other, HERMES)
    assert [call["name"] for call in tool_calls_in(HERMES + other)] == ["weather", "time"]
    assert tool_calls_in('{"name": "weather"} {"arguments": {}} {"name": 3, "arguments": {}}') == []


def test_what_was_read_is_shown() -> None:
    assert matching("numeric").extracted("so -1,000.50") == "-1000.50"
    assert matching("json", keys=("id",)).extracted(f"as {ORDER}") == '{"id": 7}'
    assert matching("json").extracted('[1.5, "\u00e9"]') == '[1.5, "\u00e9"]'
    assert matching("json").extracted("true") == "true"
    assert matching("tool_call").extracted(HERMES) == f"[{CALL}]"
    assert matching("regex", pattern="Answer: (.)").extracted("Answer: B") == "B"
    assert matching("numeric").extracted("none") is None


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
