"""Forms of rows: recognised by all columns, named, or overridden; and errors in a row."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from budgets import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny import load_tokenizer

from alto.data import Conversation, Message, read_task_rows
from alto.data.convert import to_conversation
from alto.data.formats import find_layout
from alto.data.rows import RawRow
from alto.errors import AltoError, DataFormatError
from alto.spec import Task


def convert(
    *rows: dict[str, Any], form: str = "auto", columns: Mapping[str, str] | None = None
) -> tuple[str, list[Conversation]]:
    """Return the name of the form, and every row converted."""
    raw = [RawRow(f"rows.jsonl:{number}", row) for number, row in enumerate(rows, start=1)]
    layout = find_layout(raw, form, columns or {})
    return layout.form, [to_conversation(row, layout) for row in raw]


def refusal(*rows: dict[str, Any], form: str = "auto", columns: Mapping[str, str] | None = None) -> str:
    with pytest.raises(DataFormatError) as caught:
        convert(*rows, form=form, columns=columns)
    return str(caught.value)


def turns(*pairs: tuple[str, str]) -> Conversation:
    return Conversation(Message(role, content) for role, content in pairs)


TOKENIZER = load_tokenizer()

CONVERSATION = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "u"},
    {"role": "assistant", "content": "a"},
]
GPT = [{"from": "system", "value": "s"}, {"from": "human", "value": "u"}, {"from": "gpt", "value": "a"}]
SUA = turns(("system", "s"), ("user", "u"), ("assistant", "a"))
UA = SUA[1:]
PAIR = {"prompt": "u", "completion": "a"}


@pytest.mark.parametrize(
    ("row", "form", "expected"),
    [
        ({"messages": CONVERSATION}, "messages", SUA),
        ({"messages": CONVERSATION[2:]}, "messages", SUA[2:]),
        ({"messages": CONVERSATION[1:] * 2, "id": 7, "source": "x"}, "messages", UA * 2),
        ({"messages": CONVERSATION[1:], "system": "s"}, "messages", SUA),
        ({"messages": CONVERSATION, "prompt": "u", "prompt_id": "7"}, "messages", SUA),
        ({"conversations": CONVERSATION}, "messages", SUA),
        ({"conversations": GPT, "domain": "math", "difficulty": 3}, "sharegpt", SUA),
        ({"conversations": [{"from": "user", "value": "u"}, {"from": "assistant", "value": "a"}]}, "sharegpt", UA),
        ({"conversations": GPT[1:], "system": "s"}, "sharegpt", SUA),
        (PAIR, "prompt_completion", UA),
        ({"prompt": "u", "response": "a"}, "prompt_completion", UA),
        ({"question": "u", "answer": "a"}, "prompt_completion", UA),
        ({"system": "s", "prompt": "u", "response": "a", "answer": "7"}, "prompt_completion", SUA),
        ({"system": None, **PAIR}, "prompt_completion", UA),
        ({"system": "", **PAIR, "text": "u a"}, "prompt_completion", UA),
        ({"prompt": CONVERSATION[:2], "completion": CONVERSATION[2:]}, "prompt_completion", SUA),
        ({"prompt": "é 漢", "completion": "."}, "prompt_completion", turns(("user", "é 漢"), ("assistant", "."))),
        ({"instruction": "u", "output": "a"}, "alpaca", UA),
        ({"instruction": "u", "input": "", "output": "a", "text": "### …"}, "alpaca", UA),
        ({"instruction": "i", "input": "x", "output": "a"}, "alpaca", turns(("user", "i\n\nx"), ("assistant", "a"))),
        ({"instruction": "u", "output": "a", "history": [["u", "a"]], "system": "s"}, "alpaca", (*SUA, *UA)),
        ({"text": "once", "title": "t"}, "text", turns(("text", "once"))),
    ],
)
def test_every_form_is_recognised_by_its_columns(row: dict[str, Any], form: str, expected: Conversation) -> None:
    assert convert(row) == (form, [expected])


def test_only_the_completion_of_messages_is_trained() -> None:
    _, [row] = convert({"prompt": [*CONVERSATION, CONVERSATION[1]], "completion": CONVERSATION[2:]})
    assert [(turn.role, turn.is_trained) for turn in row if turn.role == "assistant"] == [
        ("assistant", False),
        ("assistant", True),
    ]


def test_a_message_of_weight_zero_is_context() -> None:
    _, [row] = convert({"messages": [*CONVERSATION[:2], {**CONVERSATION[2], "weight": 0}, *CONVERSATION[1:]]})
    assert [turn.is_trained for turn in row] == [False, False, False, False, True]


def test_columns_say_which_is_which() -> None:
    row = {"id": 1, "problem": "u", "solution": "a"}
    assert convert(row, columns={"prompt": "problem", "completion": "solution"})[1] == [UA]
    assert convert({"prompt": "u", "best": "a"}, columns={"completion": "best"})[1] == [UA]
    assert convert({**PAIR, "preamble": "s"}, columns={"system": "preamble"})[1] == [SUA]
    assert convert({"dialog": GPT}, columns={"messages": "dialog"}) == ("sharegpt", [SUA])
    assert convert({"body": "b"}, columns={"text": "body"})[0] == "text"


def test_columns_win_over_the_recognised_form() -> None:
    row = {"prompt": "no", "completion": "no", "q": "u", "a": "a"}
    assert convert(row, columns={"prompt": "q", "completion": "a"})[1] == [UA]


@pytest.mark.parametrize(
    ("row", "candidates", "remedy"),
    [
        (
            {"messages": CONVERSATION, **PAIR},
            "messages (messages) and prompt_completion (prompt, completion)",
            "dataset_format: messages or prompt_completion",
        ),
        (
            {**PAIR, "response": "a"},
            "prompt_completion (prompt, completion) and prompt_completion (prompt, response)",
            "columns: {prompt: prompt, completion: completion} or {prompt: prompt, completion: response}",
        ),
        (
            {"instruction": "i", "output": "o", "question": "q", "answer": "a"},
            "prompt_completion (question, answer) and alpaca (instruction, output)",
            "dataset_format: prompt_completion or alpaca",
        ),
    ],
)
def test_two_forms_that_fit_are_both_named(row: dict[str, Any], candidates: str, remedy: str) -> None:
    message = refusal(row)
    assert message.startswith(f"rows.jsonl:1: expected columns of one form, found the columns of {candidates}")
    assert message.endswith(f"; name one with {remedy}")


def test_naming_the_form_ends_the_doubt() -> None:
    row = {"messages": CONVERSATION, **PAIR}
    assert convert(row, form="messages") == ("messages", [SUA])
    assert convert(row, form="prompt_completion") == ("prompt_completion", [UA])
    assert convert({"conversations": GPT}, form="sharegpt")[0] == "sharegpt"


def test_later_rows_settle_what_the_first_leaves_open() -> None:
    assert convert({"messages": CONVERSATION, **PAIR}, PAIR)[0] == "prompt_completion"


def test_mixed_forms_are_an_error_that_names_both() -> None:
    message = refusal(PAIR, PAIR, {"messages": CONVERSATION})
    assert message.startswith(
        "rows.jsonl:3: expected the columns of the other rows, prompt_completion (prompt, completion), found messages;"
    )
    assert refusal(PAIR, {"messages": CONVERSATION}).startswith("rows.jsonl:2: expected the columns of the other rows")


PAIRED = {"chosen": "a", "rejected": "b"}
OPENAI = {
    "input": {"messages": CONVERSATION[:2]},
    "preferred_output": CONVERSATION[2:],
    "non_preferred_output": CONVERSATION[2:],
}


@pytest.mark.parametrize(
    ("row", "columns"),
    [
        ({"prompt": "u", **PAIRED, "score_chosen": 8.0}, {"prompt": "prompt"}),
        ({"chosen": CONVERSATION, "rejected": CONVERSATION}, {}),
        ({"question": "u", **PAIRED, "system": "s"}, {"prompt": "question", "system": "system"}),
        ({"instruction": "u", "input": "", **PAIRED}, {"prompt": "instruction", "input": "input"}),
        ({"instruction": "u", **PAIRED}, {"prompt": "instruction"}),
        ({"input": "u", **PAIRED, "system": "s"}, {"prompt": "input", "system": "system"}),
        ({"prompt": "u", "input": "x", **PAIRED}, {"prompt": "prompt"}),
        ({"chosen": CONVERSATION, "rejected": CONVERSATION, "prompt": "u", "question": "u"}, {"prompt": "prompt"}),
    ],
)
def test_columns_of_pairs_and_their_prompts(row: dict[str, Any], columns: dict[str, str]) -> None:
    layout = find_layout([RawRow("rows.jsonl:1", row)], "auto", {})
    assert (layout.form, layout.is_paired) == ("preference", True)
    assert dict(layout.columns) == {"chosen": "chosen", "rejected": "rejected", **columns}


def test_other_spellings_of_pairs() -> None:
    row = RawRow("r:1", {"instruction": "u", "chosen_response": "a", "rejected_response": "b"})
    assert find_layout([row], "auto", {}).column("chosen") == "chosen_response"
    assert find_layout([RawRow("r:1", OPENAI)], "auto", {}).form == "openai_preference"
    layout = find_layout(
        [RawRow("r:1", {"q": "u", "win": "a", "loss": "b"})],
        "auto",
        {"chosen": "win", "rejected": "loss", "prompt": "q"},
    )
    assert dict(layout.columns) == {"chosen": "win", "rejected": "loss", "prompt": "q"}


def test_a_named_column_is_not_taken_for_another_role_too() -> None:
    row = RawRow("r:1", {"prompt": "s", "question": "u", **PAIRED})
    layout = find_layout([row], "auto", {"system": "prompt"})
    assert (layout.column("prompt"), layout.column("system")) == ("question", "prompt")


@pytest.mark.parametrize(("is_paired", "form"), [(True, "preference"), (False, "messages")])
def test_where_both_kinds_fit_the_kind_that_is_meant_is_taken(is_paired: bool, form: str) -> None:
    both = RawRow("r:1", {"prompt": "u", "messages": CONVERSATION, "chosen": CONVERSATION, "rejected": CONVERSATION})
    assert find_layout([both], "auto", {}, is_paired=is_paired).form == form


def test_the_other_kind_is_found_where_it_alone_fits() -> None:
    assert find_layout([RawRow("r:1", PAIR)], "auto", {}, is_paired=True).form == "prompt_completion"
    assert find_layout([RawRow("r:1", {"prompt": "u", **PAIRED})], "auto", {}, is_paired=False).is_paired


def test_two_kinds_that_fit_are_both_named_where_neither_is_meant() -> None:
    message = refusal({"messages": CONVERSATION, "chosen": CONVERSATION, "rejected": CONVERSATION})
    assert "found the columns of messages (messages) and preference (chosen, rejected)" in message
    assert message.endswith("name one with dataset_format: messages or preference")


def test_unknown_columns_are_answered_with_those_of_pairs_if_the_task_needs_pairs() -> None:
    with pytest.raises(DataFormatError) as caught:
        find_layout([RawRow("r:1", {"prompt": "u", "best": "a"})], "auto", {}, is_paired=True)
    message = str(caught.value)
    assert "the columns of a form: preference (chosen, rejected) or openai_preference (input, " in message
    assert "prompt_completion" not in message
    assert message.endswith(
        "{prompt: <its column>, chosen: <its column>, rejected: <its column>}, or rename the columns"
    )


def test_columns_of_no_form_may_be_texts_with_labels() -> None:
    message = refusal({"question": "q", "tool": "search"})
    assert message.endswith(
        "such as {prompt: <its column>, completion: <its column>}, or rename the columns; to learn labels of texts, "
        "set method: classification and columns: {text: <its column>, label: <its column>}"
    )
    with pytest.raises(DataFormatError) as of_labelled_replies:
        find_layout([RawRow("r:1", {"question": "q", "tool": "x"})], "auto", {}, is_labelled=True)
    for other in (str(of_labelled_replies.value), refusal({"question": "q"}, form="prompt_completion")):
        assert "method: classification" not in other


@pytest.mark.parametrize(
    ("row", "nearest"),
    [({"foo": "u", "bar": 1}, "text, label"), ({"premise": "u", "bar": 1, "labels": 2}, "premise, hypothesis, labels")],
)
def test_the_nearest_spelling_of_a_form_is_named(row: dict[str, Any], nearest: str) -> None:
    with pytest.raises(DataFormatError) as caught:
        find_layout([RawRow("r:1", row)], "auto", {}, is_classified=True)
    assert str(caught.value) == (
        f"r:1: expected the columns of a form: text_classification ({nearest}) (docs/data.md lists other names of "
        f"columns); found {', '.join(row)}; name roles with columns, such as {{text: <its column>, label: <its "
        "column>}, or rename the columns"
    )


@pytest.mark.parametrize("chosen", ["a", CONVERSATION[2:], CONVERSATION[1:]])
def test_chosen_replies_can_be_trained_on(chosen: Any) -> None:
    row = {"prompt": "u", "prompt_id": "1", "chosen": chosen, "rejected": "b"}
    assert convert(row, columns={"completion": "chosen"})[1] == [UA]


@pytest.mark.parametrize(
    ("bad", "found"),
    [
        ({}, "found none; name roles with columns"),
        ({"prompt": "p", "answer": "a"}, "found prompt, answer; name roles"),
        ({"a\x1b[31m": 1}, r"found a\x1b[31m; name roles"),
        ({f"column{number}": 1 for number in range(40)}, "and 28 more"),
        ({"prompt": 5, "completion": "c"}, "expected prompt to be a text, found 5"),
        ({"prompt": "p", "completion": None}, "expected completion to be a text, found None"),
        ({"question": "p", "answer": float("nan")}, "expected answer to be a text, found nan"),
        ({"system": {"a": 1}, **PAIR}, "expected system to be a text, found {'a': 1}"),
        ({"prompt": "\ud800", "completion": "c"}, r"a text without broken characters, found '\ud800'"),
        (
            {"prompt": "p", "completion": CONVERSATION[:2]},
            "expected at least one assistant message in column completion",
        ),
        ({"prompt": [], "completion": "c"}, "expected prompt to be a list with at least one message, found []"),
        ({"instruction": "i", "output": ["o"]}, "expected output to be a text, found ['o']"),
        ({"instruction": "i", "output": "o", "history": [["q"]]}, "history to be a list of [question, reply]"),
        ({"instruction": "i", "output": "o", "history": [["q", 7]]}, "expected history to be a text, found 7"),
        ({"text": ["a"]}, "expected text to be a text, found ['a']"),
        ({"messages": "hello"}, "expected messages to be a list with at least one message, found 'hello'"),
        ({"messages": []}, "found []"),
        ({"messages": ["hello"]}, "found 'hello'"),
        ({"messages": [{"role": "assistant"}]}, "found {'role': 'assistant'}"),
        (
            {"messages": [{"role": ["x"], "content": "u"}]},
            "a role (system, developer, user, assistant, tool, function) and a content text",
        ),
        ({"messages": [{"role": "bot", "content": "u"}]}, "'bot'"),
        ({"messages": [{"role": "assistant", "content": [{"type": "text"}]}]}, "of text, not a part without text"),
        ({"messages": CONVERSATION[:2]}, "expected at least one assistant message to train on, found none; add it"),
        (
            {"conversations": [*GPT, *CONVERSATION]},
            "a from (system, developer, user, assistant, tool, function, human, gpt",
        ),
        ({"conversations": [{"from": "bing", "value": "u"}]}, "'bing'"),
    ],
)
def test_a_wrong_row_names_its_place_and_what_was_found(bad: dict[str, Any], found: str) -> None:
    message = refusal(bad)
    assert message.startswith("rows.jsonl:1: expected ")
    assert found in message
    assert message.isprintable()


def test_a_named_form_says_which_columns_it_needs() -> None:
    message = refusal({"prompt": "p"}, form="alpaca")
    assert "expected the columns of the form alpaca: alpaca (instruction, output); found prompt" in message


def test_columns_that_fit_no_form_or_no_column() -> None:
    assert "do not all belong to one dataset format: messages, prompt" in refusal(
        PAIR, columns={"messages": "m", "prompt": "p"}
    )
    assert "do not all belong to format text: prompt" in refusal(PAIR, form="text", columns={"prompt": "p"})
    assert "expected a column of the dataset for system (prompt, completion), found 'sys'" in refusal(
        PAIR, columns={"system": "sys"}
    )


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=8)
json_values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "from", "value", "weight"]) | st.text(max_size=3), inner)
    ),
    max_leaves=8,
)
known_columns = st.sampled_from(
    [
        *("messages", "conversations", "prompt", "completion", "response", "question", "answer", "system"),
        *("instruction", "input", "output", "history", "text", "chosen", "rejected", "chosen", "rejected"),
    ]
)
turn_lists = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant"]), "content": st.text(max_size=5)}),
    max_size=3,
)
json_rows = st.lists(st.dictionaries(known_columns, json_values | turn_lists, max_size=4), min_size=1, max_size=4)


@settings(max_examples=examples(200), suppress_health_check=list(HealthCheck))
@given(rows=json_rows, method=st.sampled_from(["sft", "dpo"]))
def test_any_json_rows_are_encoded_or_refused_by_name(tmp_path: Path, rows: list[dict[str, Any]], method: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    task = Task(model="alto-tiny", dataset=str(path), validation_dataset=str(path), max_length=32, method=method)
    with contextlib.suppress(AltoError):
        read_task_rows(task).encode(TOKENIZER)
