"""Prompts: exactly the tokens that training has before the reply, and none of the reply."""

from __future__ import annotations

from typing import Any

import pytest
from tiny import load_tokenizer

from alto.data import Conversation, Message, encode_prompt
from alto.data.encode import Encoder
from alto.errors import DataError

SINGLE = Conversation([Message("user", "What is 2 plus 3?"), Message("assistant", "It is\n#### 5")])
SEVERAL = Conversation(
    [Message("system", "Be brief."), Message("user", "Hello."), Message("assistant", "Hello!"), *SINGLE]
)


@pytest.fixture(params=["with a chat template", "without"])
def tokenizer(request: pytest.FixtureRequest) -> Any:
    tokenizer = load_tokenizer()
    if request.param == "without":
        tokenizer.chat_template = None
    return tokenizer


@pytest.mark.parametrize("conversation", [SINGLE, SEVERAL])
def test_a_prompt_is_what_training_puts_before_the_reply(tokenizer: Any, conversation: Conversation) -> None:
    (row,) = Encoder(tokenizer).rows(conversation)
    prompt = encode_prompt(conversation[:-1], tokenizer)
    reply_starts = len(row.is_trained) - row.is_trained[::-1].index(False)
    assert prompt == list(row.input_ids[:reply_starts])


def test_a_reply_alone_is_no_question(tokenizer: Any) -> None:
    with pytest.raises(DataError, match="expected a turn before the assistant's reply"):
        encode_prompt(Conversation(()), tokenizer)


def test_turns_the_template_refuses_are_named() -> None:
    tokenizer = load_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(DataError, match=r"found user \(roles must alternate\)"):
        encode_prompt(SINGLE[:1], tokenizer)
