"""Rows of pairs become two conversations that begin alike and differ first in a reply of the assistant."""

from __future__ import annotations

from typing import Any

import pytest

from alto.data import Conversation, Message, Pair
from alto.data.convert import to_pair
from alto.data.formats import find_layout
from alto.data.rows import RawRow
from alto.errors import DataFormatError

Turn = dict[str, str]


def user(text: str) -> Turn:
    return {"role": "user", "content": text}


def reply(text: str) -> Turn:
    return {"role": "assistant", "content": text}


SYSTEM = {"role": "system", "content": "s"}


def convert(row: dict[str, Any]) -> Pair:
    raw = RawRow("rows.jsonl:1", row)
    return to_pair(raw, find_layout([raw], "auto", {}, is_paired=True))


def conversation(*turns: str) -> Conversation:
    """Return a conversation of turns such as ``u:hello``; ``c`` is a turn of the assistant that is not trained."""
    roles = {"s": "system", "u": "user", "a": "assistant", "c": "assistant"}
    return Conversation(Message(roles[turn[0]], turn[2:], is_context=turn[0] == "c") for turn in turns)


QUESTION = Pair(chosen=conversation("u:q", "a:good"), rejected=conversation("u:q", "a:bad"))
SECOND = Pair(
    chosen=conversation("u:q", "c:x", "u:and?", "a:good"),
    rejected=conversation("u:q", "c:x", "u:and?", "a:bad"),
)
TOLD = Pair(chosen=conversation("s:s", "u:q", "a:good"), rejected=conversation("s:s", "u:q", "a:bad"))


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "q", "chosen": "good", "rejected": "bad"}, QUESTION),
        ({"question": "q", "chosen": "good", "rejected": "bad", "system": "s"}, TOLD),
        ({"question": "q", "chosen": "good", "rejected": "bad", "system": None}, QUESTION),
        ({"instruction": "q", "input": None, "chosen_response": "good", "rejected_response": "bad"}, QUESTION),
        # TRL: lists of messages, with the prompt beside them or inside them
        ({"prompt": [user("q")], "chosen": [reply("good")], "rejected": [reply("bad")]}, QUESTION),
        ({"chosen": [user("q"), reply("good")], "rejected": [user("q"), reply("bad")]}, QUESTION),
        (
            {
                "chosen": [user("q"), reply("x"), user("and?"), reply("good")],
                "rejected": [user("q"), reply("x"), user("and?"), reply("bad")],
            },
            SECOND,
        ),
        (
            {
                "prompt": [user("q"), reply("x"), user("and?")],
                "chosen": [reply("good")],
                "rejected": [reply("bad")],
            },
            SECOND,
        ),
        # UltraFeedback: the conversations repeat the prompt
        ({"prompt": "q", "chosen": [user("q"), reply("good")], "rejected": [user("q"), reply("bad")]}, QUESTION),
        (
            {
                "prompt": "q",
                "chosen": [SYSTEM, user("q"), reply("good")],
                "rejected": [SYSTEM, user("q"), reply("bad")],
            },
            TOLD,
        ),
        ({"prompt": [user("q")], "chosen": [user("q"), reply("good")], "rejected": [reply("bad")]}, QUESTION),
        # LLaMA-Factory and Axolotl: a single message each
        ({"prompt": "q", "chosen": reply("good"), "rejected": reply("bad")}, QUESTION),
        (
            {
                "conversations": [{"from": "system", "value": "s"}, {"from": "human", "value": "q"}],
                "chosen": {"from": "gpt", "value": "good"},
                "rejected": {"from": "gpt", "value": "bad"},
            },
            TOLD,
        ),
        (
            {
                "input": {"messages": [SYSTEM, user("q")], "tools": [], "parallel_tool_calls": True},
                "preferred_output": [reply("good")],
                "non_preferred_output": [reply("bad")],
            },
            TOLD,
        ),
    ],
)
def test_every_way_to_write_a_pair_comes_to_the_same(row: dict[str, Any], expected: Pair) -> None:
    assert convert(row) == expected


def test_an_input_goes_below_its_instruction() -> None:
    pair = convert({"instruction": "Sum up.", "input": "A text.", "chosen": "good", "rejected": "bad"})
    assert [conversation[0].content for conversation in pair.conversations] == ["Sum up.\n\nA text."] * 2


def test_conversations_of_unlike_length_differ_at_their_first_difference() -> None:
    pair = convert({"chosen": [user("q"), reply("a"), user("r"), reply("b")], "rejected": [user("q"), reply("c")]})
    assert [[turn.is_trained for turn in conversation] for conversation in pair.conversations] == [
        [False, True, False, True],
        [False, True],
    ]


@pytest.mark.parametrize(
    ("row", "found"),
    [
        ({"prompt": None, "chosen": "a", "rejected": "b"}, "expected a prompt beside chosen and rejected replies"),
        ({"prompt": "p", "chosen": None, "rejected": "b"}, "expected chosen to be a text, found None"),
        ({"prompt": "p", "chosen": "a", "rejected": "a"}, "expected two different replies, found ['a', 'a']"),
        ({"prompt": "p", "chosen": "a", "rejected": " "}, "expected two replies with a text, found ['p', ' ']"),
        ({"prompt": "p", "chosen": "a", "rejected": 7}, "expected rejected to be a text, found 7"),
        ({"prompt": "p", "chosen": [], "rejected": "b"}, "expected chosen to be a list with at least one message"),
        ({"prompt": "p", "chosen": {"a": 1}, "rejected": "b"}, "expected every message to have a role"),
        (
            {"prompt": [user("p")], "chosen": [user("a")], "rejected": [reply("b")]},
            "expected at least one assistant message in column chosen, found",
        ),
        ({"prompt": "p", "chosen": "\ud800", "rejected": "b"}, r"a text without broken characters, found '\ud800'"),
        (
            {"chosen": [user("one"), reply("a")], "rejected": [user("two"), reply("b")]},
            "both conversations of a pair to begin with the same turn, the prompt, found ['one', 'two']",
        ),
        ({"chosen": [reply("a")], "rejected": [reply("b")]}, "to begin with the same turn, the prompt"),
        (
            {"chosen": [SYSTEM, user("one"), reply("a")], "rejected": [SYSTEM, user("two"), reply("b")]},
            "to differ first in a reply of the assistant, found ['system', 'user', 'user']",
        ),
        (
            {"chosen": [user("q"), reply("x"), reply("a")], "rejected": [user("q"), reply("x"), reply("b")]},
            "to differ first in a reply of the assistant, found ['assistant', 'assistant', 'assistant']",
        ),
        (
            {"input": "q", "preferred_output": [reply("a")], "non_preferred_output": [reply("b")]},
            "expected input to be a list with at least one message, found 'q'",
        ),
    ],
)  # fmt: skip
def test_a_wrong_pair_names_its_place_and_what_was_found(row: dict[str, Any], found: str) -> None:
    with pytest.raises(DataFormatError) as caught:
        convert(row)
    message = str(caught.value)
    assert message.startswith("rows.jsonl:1: expected ")
    assert found in message
    assert message.endswith("; correct the row")


@pytest.mark.parametrize("make", [str, reply])
def test_replies_without_a_prompt_name_what_to_do(make: Any) -> None:
    with pytest.raises(DataFormatError) as caught:
        convert({"chosen": make("a"), "rejected": make("b")})
    assert str(caught.value) == (
        "rows.jsonl:1: expected a column with the prompt beside chosen and rejected replies, found chosen, rejected; "
        "name it with columns: {prompt: <its column>}, or, if both are texts that begin with the prompt, join them "
        "unchanged with dataset_format: raw_preference"
    )
