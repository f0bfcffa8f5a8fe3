"""Rows of long conversations: rendering and tokenising the whole once equals doing it for every beginning."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any, get_args

import pytest
from budgets import examples
from merging import BLANK, MARKED, merging_tokenizer
from tiny import load_tokenizer
from tokenizers import AddedToken

from alto.data import Conversation, Message
from alto.data.encode import EncodedRow, Encoder, TextTokenizer
from alto.data.template import ChatTemplate
from alto.errors import DataError
from alto.spec import TrainOn
from tools.templates.chat_templates import STYLES, make_tokenizer

TURN = "<|{{ m.role }}|>{{ m.content }}<|end|>"
OPENING = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
TURNS = "{% for m in messages %}" + TURN + "{% endfor %}"

SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|system|>You are a helpful AI assistant.<|end|>\n' }}{% endif %}"
    "{{ '<|' + message['role'] + '|>\n' + message['content'] + '<|end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
CAUSAL = {
    "plain": TURNS + OPENING,
    "smollm2": SMOLLM2,
    "without the system's": "{% if messages[0].role == 'system' %}{{ messages[0].content }}"
    "{% set messages = messages[1:] %}{% endif %}" + TURNS + OPENING,
    "state inside": "{% set held = namespace(text='') %}{% for m in messages %}{% if m.role == 'system' %}"
    "{% set held.text = m.content %}{% else %}{{ held.text }}"
    + TURN
    + "{% set held.text = '' %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% else %}{{ eos_token }}{% endif %}",
    "past": "{% for m in messages %}{% if loop.index0 and messages[loop.index0 - 1].role == m.role %}again{% endif %}"
    + TURN
    + "{% endfor %}"
    + OPENING,
    "some are left out": TURNS.replace("<|{{", "{% if m.role == 'tool' %}{% continue %}{% endif %}<|{{") + OPENING,
    "rewritten opening": TURNS + "{% if add_generation_prompt %}<|assistant|><think>{% endif %}",
    "merging": BLANK,
    "marked": MARKED,
}
"""Templates in which a later message does not change the text before it."""

AHEAD = {
    "last": TURNS.replace("{% endfor %}", "{% if loop.last %}!{% endif %}{% endfor %}") + OPENING,
    "next": TURNS.replace("{% endfor %}", "{% if loop.nextitem is defined %}!{% endif %}{% endfor %}") + OPENING,
    "number": "{{ messages | length }}" + TURNS + OPENING,
    "end": TURNS + "{% if messages[-1].role == 'user' %}?{% endif %}" + OPENING,
    "rest": TURNS.replace("{% endfor %}", "{{ loop.revindex }}{% endfor %}") + OPENING,
    "scan": "{% set seen = namespace(user=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set seen.user = loop.index0 %}{% endif %}{% endfor %}"
    + TURNS.replace("<|{{", "{% if loop.index0 > seen.user %}!{% endif %}<|{{")
    + OPENING,
    "state after": "{% set seen = namespace(num=0) %}"
    + TURNS.replace("{% endfor %}", "{% set seen.num = seen.num + 1 %}{% endfor %}{{ seen.num }}")
    + OPENING,
    "joiner": "{% set comma = joiner(', ') %}"
    + TURNS.replace("{% endfor %}", "{{ comma() }}{% endfor %}{{ comma() }}")
    + OPENING,
    "filtered": TURNS.replace("in messages", "in messages if m.role != 'system'") + OPENING,
    "reversed": TURNS.replace("messages", "messages | reverse") + OPENING,
    "cut": TURNS.replace("{{ m.role", "{% if loop.index0 == 3 %}{% break %}{% endif %}{{ m.role") + OPENING,
    "macro": "{% macro write(messages) %}" + TURNS + "{% endmacro %}{{ write(messages) }}" + OPENING,
    "handed on": TURNS.replace("{% endfor %}", "{% set place = loop %}{% if place.last %}!{% endif %}{% endfor %}")
    + OPENING,
    "two writers": TURNS + TURNS + OPENING,
    "whole": "{{ messages | tojson }}" + TURNS + OPENING,
}
"""Templates that look ahead, or whose end depends on the text before it."""

TEXTS = ("", " ", "Yes", "a b", "ü🙂", "<|end|>", "<|assistant|>", "\n\n", "user:", "long " * 9)


def tokenizers() -> Iterator[tuple[str, Any]]:
    """Yield names of templates, and tokenizers with them."""
    for name, template in {**CAUSAL, **AHEAD}.items():
        for tokenizer in (load_tokenizer(), merging_tokenizer()):
            tokenizer.chat_template = template
            yield name, tokenizer
    for style in STYLES:
        for is_marked in (False, True):
            yield style, make_tokenizer(style, is_marked=is_marked)


def conversation(chance: random.Random) -> Conversation:
    def text() -> str:
        return "".join(chance.choices(TEXTS, k=chance.randrange(4)))

    repeated = [text(), text()]
    turns = [Message(chance.choice(["system", "developer"]), text())] if chance.random() < 0.4 else []
    for _ in range(chance.choice([1, 2, 3, 5])):
        turns.append(Message("user", chance.choice([text(), *repeated])))
        if chance.random() < 0.1:
            calls = {"tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"x": text()}}}]}
            turns += [Message("assistant", "", extras=json.dumps(calls)), Message("tool", text())]
        extras = {"reasoning_content": text()} if chance.random() < 0.2 else {}
        if chance.random() < 0.1:
            extras["content"] = [{"type": "text", "text": text()}, {"type": "text", "text": text()}]
        is_context = chance.random() < 0.2
        turns.append(
            Message("assistant", chance.choice([text(), *repeated]), is_context, json.dumps(extras) if extras else "")
        )
    arguments = {"tools": [{"type": "function", "function": {"name": "f"}}]} if chance.random() < 0.2 else {}
    return Conversation(turns, json.dumps(arguments) if arguments else "")


def outcome(encoder: Encoder, turns: Conversation) -> tuple[list[EncodedRow] | str, int]:
    try:
        return encoder.rows(turns), encoder.num_shortened
    except DataError as error:
        return str(error), encoder.num_shortened


def test_rows_are_those_of_beginnings_that_are_rendered_and_tokenised_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chance = random.Random(7)
    num_rows = num_refused = 0
    for name, tokenizer in tokenizers():
        for train_on in get_args(TrainOn):
            encoders = [Encoder(tokenizer, train_on), Encoder(tokenizer, train_on, follows_marks=False)]
            talks = [conversation(chance) for _ in range(examples(4))]
            found = [outcome(encoder, turns) for encoder in encoders for turns in talks]
            with monkeypatch.context() as patch:
                patch.setattr(ChatTemplate, "beginnings", lambda *_, **__: None)
                patch.setattr(TextTokenizer, "_dividing", {})
                alone = [Encoder(tokenizer, train_on), Encoder(tokenizer, train_on, follows_marks=False)]
                expected = [outcome(encoder, turns) for encoder in alone for turns in talks]
            assert found == expected, (name, train_on)
            assert [encoder.unread for encoder in encoders] == [encoder.unread for encoder in alone]
            num_refused += sum(isinstance(rows, str) for rows, _ in found)
            num_rows += sum(not isinstance(rows, str) for rows, _ in found)
    assert num_rows > num_refused > 0


@pytest.mark.parametrize(
    ("opening", "added"),
    [
        # One token spans the end of a turn and an opening that a finished reply does not have.
        ("<|assistant|><think>", "<|end|><|assistant|><think>"),
        # One token spans the opening and the reply's first letter.
        ("<|assistant|>Yes", "s|>"),
    ],
)
def test_an_added_token_over_the_opening_of_a_reply_is_seen(
    opening: str, added: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = opening.removesuffix("<think>")
    template = "{% for m in messages %}{% if m.role == 'user' %}<|user|>{{ m.content }}<|end|>{% else %}"
    template += shared + "{{ m.content }}<|end|>{% endif %}{% endfor %}{% if add_generation_prompt %}" + opening
    replies = ("|>Yes", " Yes", "es", "\nYes", "Yes|>")
    turns = Conversation(Message(role, text) for text in replies for role in ("user", "assistant"))
    found = []
    for is_alone in (False, True):
        if is_alone:
            monkeypatch.setattr(TextTokenizer, "_dividing", {})
        tokenizer = merging_tokenizer()
        tokenizer.add_tokens([AddedToken(added, normalized=False)])
        tokenizer.chat_template = template + "{% endif %}"
        found.append(Encoder(tokenizer).rows(turns))
    assert found[0] == found[1]


@pytest.mark.parametrize("name", [*CAUSAL, *AHEAD])
def test_a_beginning_is_known_only_as_the_template_writes_it_alone(name: str) -> None:
    tokenizer = load_tokenizer()
    tokenizer.chat_template = {**CAUSAL, **AHEAD}[name]
    template = ChatTemplate(tokenizer)
    turns = Conversation(Message(role, f"{role} {turn}") for turn in range(3) for role in ("user", "assistant"))
    for whole in (turns, Conversation((Message("system", "Be brief."), *turns))):
        for open_turn in (False, True):
            beginnings = template.beginnings(whole, open_turn=open_turn)
            numbers = range(1, len(whole) + 1)
            found = [None if beginnings is None else beginnings.of(number) for number in numbers]
            expected = [template.text(whole[:number], open_turn=open_turn) for number in numbers]
            assert all(text in (None, alone) for text, alone in zip(found, expected, strict=True))
            assert (found == expected) == (name in CAUSAL)


class _Counted:
    """Counts the calls of a tokenizer, and the characters that it tokenises."""

    def __init__(self, tokenizer: Any, patch: pytest.MonkeyPatch) -> None:
        self.num_renderings = self.num_calls = self.num_characters = 0
        render, tokenise = type(tokenizer).apply_chat_template, type(tokenizer).__call__

        def counted_render(this: Any, *arguments: Any, **keys: Any) -> Any:
            self.num_renderings += 1
            return render(this, *arguments, **keys)

        def counted_tokenise(this: Any, text: str | list[str], **keys: Any) -> Any:
            self.num_calls += 1
            self.num_characters += len("".join(text))
            return tokenise(this, text, **keys)

        counted_render.__module__ = render.__module__
        patch.setattr(type(tokenizer), "apply_chat_template", counted_render)
        patch.setattr(type(tokenizer), "__call__", counted_tokenise)


@pytest.mark.parametrize("style", ["smollm2", *(name for name in STYLES if name != "qwen-3")])
def test_a_long_conversation_is_rendered_and_tokenised_as_often_as_a_short_one(
    style: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = load_tokenizer() if style == "smollm2" else make_tokenizer(style, is_marked=False)
    if style == "smollm2":
        tokenizer.chat_template = SMOLLM2
    turns = Conversation(Message(role, f"{role} {turn}") for turn in range(40) for role in ("user", "assistant"))
    encoder = Encoder(tokenizer)
    encoder.rows(turns[:2])
    num_characters = len(ChatTemplate(tokenizer).text(turns, open_turn=False))
    counted = _Counted(tokenizer, monkeypatch)
    encoder.rows(turns)
    assert counted.num_renderings <= 2
    assert counted.num_characters < 2.5 * num_characters


@pytest.mark.parametrize("template", [None, SMOLLM2])
@pytest.mark.parametrize("form", ["text", "raw", "turns"])
def test_many_rows_are_tokenised_in_one_call(template: str | None, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = load_tokenizer()
    tokenizer.chat_template = template
    chance = random.Random(3)
    texts = ["".join(chance.choices(TEXTS, k=3)) for _ in range(1000)]
    roles = {"text": ("text",), "raw": ("text", "assistant"), "turns": ("user", "assistant")}[form]
    talks = [
        Conversation(Message(role, text, is_context=role == "text" and form == "raw") for role in roles)
        for text in texts
    ]
    for train_on in get_args(TrainOn):
        with monkeypatch.context() as patch:
            counted = _Counted(tokenizer, patch)
            found = list(Encoder(tokenizer, train_on).all_rows(talks))
            assert counted.num_calls < 20
        assert found == [(talk, Encoder(tokenizer, train_on).rows(talk)) for talk in talks]
