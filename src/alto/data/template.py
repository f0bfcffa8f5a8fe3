"""Applies a tokenizer's chat template, and finds parts of conversations that it leaves out."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import replace
from functools import cached_property
from typing import Any

from alto.data.beginnings import Beginnings, record_beginnings
from alto.data.conversation import Conversation, ConversationWithTools, Message
from alto.data.rows import ConversationError

__all__ = ["PARALLEL_CALLS", "ChatTemplate", "TurnTexts", "given_keys", "without_key"]

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
PARALLEL_CALLS = "calls: parallel"
"""The key of :func:`given_keys` for all tool calls of a turn but the first."""

_RENDERER = "transformers.tokenization_utils_base"
"""The module with transformers' own code that renders templates."""

_PLAIN_ROLES = ("system", "developer", "user", "assistant")


class ChatTemplate:
    """Writes conversations with the chat template of ``tokenizer``.

    The template gets the row's own messages. There are two exceptions, for templates that accept only one of two
    equivalent forms: ``developer`` becomes ``system`` if the template does not name it; and if the template fails,
    arguments of calls become JSON text, and content that is missing beside calls becomes empty.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def is_marked(self, conversation: Conversation) -> bool:
        """Return whether the template itself marks the assistant's tokens: ``{% generation %}``."""
        return _GENERATION.search(self._source(conversation)) is not None

    def text(self, conversation: Conversation, *, open_turn: bool) -> str:
        """Return ``conversation`` as the template writes it, followed by the opening of a reply if ``open_turn``.

        Raises:
            ConversationError: The template refuses the turns, or fails.
        """
        return str(
            self._first(
                conversation,
                lambda messages, beside: self.tokenizer.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=open_turn, **beside
                ),
            )
        )

    def marked_tokens(self, conversation: Conversation) -> tuple[list[int], list[bool]]:
        """Return the token ids of ``conversation``, and for each whether the template marks it as the assistant's.

        Raises:
            ConversationError: See :meth:`text`.
        """
        found = self._first(
            conversation,
            lambda messages, beside: self.tokenizer.apply_chat_template(
                messages,
                return_dict=True,
                return_assistant_tokens_mask=True,
                tokenizer_kwargs={"verbose": False},
                **beside,
            ),
        )
        return list(found["input_ids"]), [bool(mark) for mark in found["assistant_masks"]]

    def beginnings(self, conversation: Conversation, *, open_turn: bool) -> Beginnings | None:
        """Return the texts of :meth:`text` for all beginnings; None if they cannot be derived from the whole text.

        They cannot if the tokenizer has its own template code, or the template fails on the row's own messages."""
        beside = _beside(conversation)
        if not self._is_transparent or not self._settings.isdisjoint(beside):
            return None
        arguments = {"tools": None, "documents": None, "add_generation_prompt": open_turn}
        arguments |= {**self.tokenizer.special_tokens_map, **beside}
        return record_beginnings(self._source(conversation), next(self._forms(conversation)), arguments)

    @cached_property
    def _is_transparent(self) -> bool:
        """Whether the tokenizer renders templates by transformers' own code."""
        return bool(type(self.tokenizer).apply_chat_template.__module__ == _RENDERER)

    @cached_property
    def _settings(self) -> Set[str]:
        """Arguments of transformers' function that are not simply passed to the template."""
        return inspect.signature(self.tokenizer.apply_chat_template).parameters.keys() - {"tools"}

    def _first(self, conversation: Conversation, render: Callable[[list[dict[str, Any]], dict[str, Any]], Any]) -> Any:
        """Return the result of ``render`` for the first form of the messages that the template accepts."""
        beside = _beside(conversation)
        refusal = None
        for messages in self._forms(conversation):
            try:
                return render(messages, beside)
            except Exception as error:  # a template is a program and may raise anything
                refusal = refusal or error
        roles = ", ".join(message.role for message in conversation)
        raise ConversationError(
            f"expected turns that the model's chat template takes, found {roles} ({refusal}); change the rows, or set "
            "another chat_template"
        ) from refusal

    def _forms(self, conversation: Conversation) -> Iterator[list[dict[str, Any]]]:
        """Yield the same messages in the forms that templates accept, the row's own form first."""
        own = [self._message(message, conversation) for message in conversation]
        yield [_given(message) for message in own]
        has_calls = any(message.get("tool_calls") for message in own)
        lacks_content = any(message["content"] is None for message in own)
        if has_calls:
            yield [_given(_with_text_arguments(message)) for message in own]
        if lacks_content:
            yield [_with_content(message) for message in own]
            yield [_with_content(_with_text_arguments(message)) for message in own]

    def _message(self, message: Message, conversation: Conversation) -> dict[str, Any]:
        role = message.role
        if role == "developer" and role not in self._source(conversation):
            role = "system"
        keys = message.other_keys()
        is_missing = keys.pop("content", "") is None
        return {**keys, "role": role, "content": None if is_missing else message.content}

    def _source(self, conversation: Conversation) -> str:
        return str(self.tokenizer.get_chat_template(None, _beside(conversation).get("tools")))


class TurnTexts:
    """The template's texts of a conversation and of its beginnings.

    Args:
        is_recorded: Whether enough beginnings are needed to make it worthwhile to render the whole for all of them.

    Attributes:
        whole: Text of the whole conversation.

    Raises:
        ConversationError: See :meth:`ChatTemplate.text`.
    """

    def __init__(self, template: ChatTemplate, conversation: Conversation, *, is_recorded: bool) -> None:
        self._template = template
        self._conversation = conversation
        self.whole = template.text(conversation, open_turn=False)
        self._recorded: dict[bool, Beginnings | None] = {}
        closed = template.beginnings(conversation, open_turn=False) if is_recorded else None
        if closed is not None and closed.text == self.whole:
            self._recorded = {False: closed, True: template.beginnings(conversation, open_turn=True)}

    def text(self, num_turns: int, *, open_turn: bool) -> str:
        """Return the template's text of the first ``num_turns`` turns; see :meth:`ChatTemplate.text`."""
        if num_turns == len(self._conversation) and not open_turn:
            return self.whole
        recorded = self._recorded.get(open_turn)
        known = None if recorded is None else recorded.of(num_turns)
        return self._template.text(self._conversation[:num_turns], open_turn=open_turn) if known is None else known


def given_keys(conversation: Conversation) -> dict[str, int]:
    """Return the parts of ``conversation`` beside the texts of its turns, each with its count.

    These are keys of messages; ``tools`` and other arguments of the template, as ``row: tools``; turns of roles that
    many templates do not support, as ``role: tool``; and :data:`PARALLEL_CALLS`, because some templates write only the
    first of several calls.
    """
    counts: dict[str, int] = {f"row: {name}": 1 for name, value in _beside(conversation).items() if value}
    for message in conversation:
        named = [key for key, value in message.other_keys().items() if value not in (None, "", [], {})]
        if message.role not in (*_PLAIN_ROLES, "text"):
            named.append(f"role: {message.role}")
        if len(message.other_keys().get("tool_calls", ())) > 1:
            named.append(PARALLEL_CALLS)
        for name in named:
            counts[name] = counts.get(name, 0) + 1
    return counts


def without_key(conversation: Conversation, name: str) -> Conversation:
    """Return ``conversation`` without the part that :func:`given_keys` calls ``name``; turns of a role stay, with a
    changed text."""
    kind, _, of_kind = name.partition(": ")
    turns: Sequence[Message] = conversation
    beside = _beside(conversation)
    if name == PARALLEL_CALLS:
        turns = [_with_one_call(turn) for turn in conversation]
    elif kind == "row" and of_kind:
        del beside[of_kind]
    elif kind == "role" and of_kind:
        turns = [_altered(turn) if turn.role == of_kind else turn for turn in conversation]
    else:
        turns = [_stripped(turn, name) for turn in conversation]
    return ConversationWithTools(turns, json.dumps(beside, ensure_ascii=False)) if beside else tuple(turns)


def _beside(conversation: Conversation) -> dict[str, Any]:
    """Return the arguments of the template beside the turns."""
    text = conversation.template_arguments if isinstance(conversation, ConversationWithTools) else ""
    arguments: dict[str, Any] = json.loads(text) if text else {}
    return arguments


def _with_one_call(turn: Message) -> Message:
    keys = turn.other_keys()
    if "tool_calls" in keys:
        keys["tool_calls"] = keys["tool_calls"][:1]
    return replace(turn, extras=json.dumps(keys, ensure_ascii=False)) if keys else turn


def _altered(turn: Message) -> Message:
    return replace(turn, content=turn.content + " and more")


def _stripped(turn: Message, name: str) -> Message:
    keys = turn.other_keys()
    if name not in keys:
        return turn
    del keys[name]
    return replace(turn, extras=json.dumps(keys, ensure_ascii=False) if keys else "")


def _given(message: dict[str, Any]) -> dict[str, Any]:
    """Drop null values: some versions of transformers drop them too, and templates would write ``None``."""
    return {key: value for key, value in message.items() if value is not None}


def _with_content(message: dict[str, Any]) -> dict[str, Any]:
    return {**message, "content": message["content"] or ""}


def _with_text_arguments(message: dict[str, Any]) -> dict[str, Any]:
    if not message.get("tool_calls"):
        return message
    calls = [
        {
            **call,
            "function": {
                **call["function"],
                "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False),
            },
        }
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}
