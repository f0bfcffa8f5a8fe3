"""Converts messages and tools in the forms of TRL, OpenAI and ShareGPT into turns.

Tool calls are converted into OpenAI's form: ``{"type": "function", "function": {"name", "arguments"}}``, with arguments
as an object. A row may have them in this form, flat (``{"name", "arguments"}``), with arguments as JSON text, or as the
older ``function_call``. All other keys of a message stay as they are.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, SupportsIndex, TypeAlias, overload

from alto.data.rows import FaultKind, RowError, broken_part
from alto.records import RowLabel

REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
"""Keys of a message that may hold its reasoning; transformers also gives each to the template under the first name."""


@dataclass(frozen=True, slots=True)
class Message:
    """One turn.

    Attributes:
        role: ``system``, ``developer``, ``user``, ``assistant``, ``tool`` or ``text``. The role ``text`` is for plain
            texts, which are trained completely, and for raw prompts and their replies. A raw prompt is not trained.
        is_context: Whether an assistant turn or a text is only shown to the model, not trained.
        extras: All other keys that the chat template gets (``tool_calls``, ``reasoning_content``, ``name``, …), as the
            text of a JSON object; its ``content`` is null if the row has no content. Empty if there are no other keys.
    """

    role: str
    content: str
    is_context: bool = False
    extras: str = ""

    @property
    def is_trained(self) -> bool:
        return self.role in ("text", "assistant") and not self.is_context

    @property
    def is_empty(self) -> bool:
        """Whether the turn has no text, no reasoning and no tool call."""
        spoken = ("tool_calls", *REASONING_KEYS)
        return not self.content.strip() and not any(self.other_keys().get(key) for key in spoken)

    def other_keys(self) -> dict[str, Any]:
        """Return the values of :attr:`extras`, by key."""
        keys: dict[str, Any] = json.loads(self.extras) if self.extras else {}
        return keys


class Conversation(tuple[Message, ...]):
    """Turns in order, and what belongs to all of them.

    Attributes:
        template_arguments: The text of a JSON object with the other arguments of the chat template: ``tools``, and the
            row's ``chat_template_kwargs``; empty if the row has neither.
        where: File and line of the row, for messages: ``train.jsonl:7``; empty if unknown. Ignored in comparisons.
        is_desirable: Whether the model should give the last reply; None if the reply has no label.
        columns: The row's other columns, for reward functions: the text of a JSON object; empty if they are not kept.
            They do not count in comparisons.
    """

    template_arguments: str
    where: str
    is_desirable: bool | None
    columns: str

    def __new__(
        cls,
        turns: Iterable[Message],
        template_arguments: str = "",
        where: str = "",
        is_desirable: bool | None = None,
        columns: str = "",
    ) -> Conversation:
        made = super().__new__(cls, turns)
        made.template_arguments = template_arguments
        made.where = where
        made.is_desirable = is_desirable
        made.columns = columns
        return made

    def __getnewargs__(self) -> tuple[tuple[Message, ...], str, str, bool | None, str]:
        return tuple(self), self.template_arguments, self.where, self.is_desirable, self.columns

    def labelled(self, is_desirable: bool | None) -> Conversation:
        """Return the same conversation with another label, or without one."""
        return Conversation(self, self.template_arguments, self.where, is_desirable, self.columns)

    def with_columns(self, columns: str) -> Conversation:
        """Return the same conversation with other columns of its row."""
        return Conversation(self, self.template_arguments, self.where, self.is_desirable, columns)

    @overload
    def __getitem__(self, index: SupportsIndex) -> Message: ...

    @overload
    def __getitem__(self, index: slice) -> Conversation: ...

    def __getitem__(self, index: SupportsIndex | slice) -> Message | Conversation:
        if isinstance(index, slice):
            return Conversation(super().__getitem__(index), self.template_arguments, self.where)
        return super().__getitem__(index)

    @property
    def _extra_fields(self) -> tuple[str, bool | None]:
        return self.template_arguments, self.is_desirable

    def __eq__(self, other: object) -> bool:
        return super().__eq__(other) is True and self._extra_fields == getattr(other, "_extra_fields", ("", None))

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        # A conversation without extra fields equals the plain tuple of its turns, so both need the same hash.
        own = super().__hash__()
        return hash((own, self._extra_fields)) if self._extra_fields != ("", None) else own


@dataclass(frozen=True, slots=True)
class Pair:
    """Two conversations with the same beginning; the first has the better end. The shared turns are context."""

    chosen: Conversation
    rejected: Conversation

    @property
    def conversations(self) -> tuple[Conversation, Conversation]:
        """The chosen conversation, then the rejected one."""
        return self.chosen, self.rejected


@dataclass(frozen=True, slots=True)
class LabelledText:
    """One text, two texts or a conversation, with a label, or without one (None) if it is only to be predicted;
    ``where`` is the file and line of the row, for messages."""

    text: str | Conversation
    text_pair: str | None
    label: RowLabel | None
    where: str = field(default="", compare=False)


Row: TypeAlias = Conversation | Pair | LabelledText
"""A conversation, a pair of conversations, or a labelled text."""


def place_of(row: Row, otherwise: str) -> str:
    """Return file and line of ``row``, for messages; ``otherwise`` if unknown."""
    return getattr(row.chosen if isinstance(row, Pair) else row, "where", "") or otherwise


def unpaired(rows: Iterable[Row]) -> Iterator[Row]:
    """Yield ``rows`` with two labelled conversations instead of each pair, the chosen one first."""
    for row in rows:
        if isinstance(row, Pair):
            yield row.chosen.labelled(True)
            yield row.rejected.labelled(False)
        else:
            yield row


class Wrong(Protocol):
    """A function that makes the error of a row from the expected and the found value."""

    def __call__(self, expected: str, value: object, kind: FaultKind = ..., /) -> RowError: ...


_ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
_SHAREGPT_ROLES = {
    **_ROLES,
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "observation": "tool",
    "function_call": "assistant",
}
_TEXT_PARTS = ("text", "input_text", "output_text")

_RESERVED_OPTIONS = (
    "add_generation_prompt",
    "chat_template",
    "continue_final_message",
    "conversation",
    "max_length",
    "messages",
    "padding",
    "return_assistant_tokens_mask",
    "return_dict",
    "return_tensors",
    "sanitize_control_tokens",
    "tokenize",
    "tokenizer_kwargs",
    "truncation",
)
"""Arguments of ``apply_chat_template`` that a row cannot set."""


def read_message(message: Any, *, is_sharegpt: bool, wrong: Wrong) -> Message:
    """Convert one message of a row into a turn; ``is_sharegpt`` says whether it has ShareGPT's keys."""
    speaker, says, roles = ("from", "value", _SHAREGPT_ROLES) if is_sharegpt else ("role", "content", _ROLES)
    name = message.get(speaker) if isinstance(message, Mapping) else None
    role = roles.get(name) if isinstance(name, str) else None
    if role is None:
        raise wrong(
            f"every message to have a {speaker} ({', '.join(roles)}) and a {says} text", message, FaultKind.BAD_MESSAGE
        )
    given = {key: value for key, value in message.items() if key not in (speaker, says) and value is not None}
    # OpenAI's form: a weight of 0 shows a turn without training it.
    is_context = given.pop("weight", None) == 0
    if name == "function_call":
        given["tool_calls"] = _parsed(message.get(says), f"{says} to be the JSON text of a call", wrong)
        says = ""
    calls = _calls(given, wrong)
    extras = {**{key: value for key, value in given.items() if key != "tool_calls"}}
    if calls:
        extras["tool_calls"] = calls
    content = message.get(says)
    if isinstance(content, list):
        content = _joined(content, wrong)
    if content is None and calls:
        content, extras["content"] = "", None
    if not isinstance(content, str):
        raise wrong(
            f"every message to have a {speaker} ({', '.join(roles)}) and a {says} text", message, FaultKind.BAD_MESSAGE
        )
    written = json.dumps(extras, ensure_ascii=False, default=str) if extras else ""
    for text in (content, written):
        _check_whole(text, says or "value", wrong)
    return Message(role, content, is_context=is_context, extras=written)


def read_tools(tools: Any, functions: Any, wrong: Wrong) -> list[Any]:
    """Return the tools of a row, given as JSON schemas or as JSON text of them.

    Args:
        functions: The older column, with functions that are not wrapped as tools.
    """
    tools, functions = (_listed(value, wrong) for value in (tools, functions))
    if tools and functions:
        raise wrong("only one of tools and functions, the older name of tools", [*tools, *functions])
    return tools or [{"type": "function", "function": function} for function in functions]


def read_template_options(options: Any, wrong: Wrong) -> dict[str, Any]:
    """Return the arguments of the chat template in the column ``chat_template_kwargs``."""
    if isinstance(options, str) and options.strip():
        options = _parsed(options, "chat_template_kwargs to be a JSON object", wrong)
    if not options:
        return {}
    if not isinstance(options, Mapping):
        raise wrong("chat_template_kwargs to be an object", options)
    for name in options:
        if name in _RESERVED_OPTIONS:
            raise wrong(f"chat_template_kwargs that the chat template itself reads, not {name}", options)
    return {name: value for name, value in options.items() if value is not None}


def _listed(value: Any, wrong: Wrong) -> list[Any]:
    if isinstance(value, str):
        value = _parsed(value, "tools to be a list of JSON schemas, or its JSON text", wrong) if value.strip() else None
    if not value:
        return []
    if not isinstance(value, list):
        raise wrong("tools to be a list of JSON schemas, or its JSON text", value)
    what = "every tool to be a JSON schema, or its JSON text"
    tools = [_parsed(tool, what, wrong) if isinstance(tool, str) else tool for tool in value]
    for tool in tools:
        if not isinstance(tool, Mapping):
            raise wrong(what, tool)
    return tools


def _calls(given: dict[str, Any], wrong: Wrong) -> list[dict[str, Any]]:
    """Return the calls of a message, and remove ``function_call`` from ``given``."""
    older = given.pop("function_call", None)
    calls = given.get("tool_calls")
    if isinstance(calls, str):
        calls = _parsed(calls, "tool_calls to be a list of calls, or its JSON text", wrong) if calls.strip() else None
    if older is not None and calls:
        raise wrong("only one of tool_calls and function_call, the older name of a single call", [older, calls])
    if older is not None:
        calls = [older]
    if isinstance(calls, Mapping):
        calls = [calls]
    if not calls:
        return []
    if not isinstance(calls, list):
        raise wrong("tool_calls to be a list of calls", calls)
    return [_call(call, wrong) for call in calls]


def _call(call: Any, wrong: Wrong) -> dict[str, Any]:
    expected = "every call to have the name of a function, and arguments that are a JSON object or its text"
    call = _parsed(call, expected, wrong) if isinstance(call, str) else call
    if not isinstance(call, Mapping):
        raise wrong(expected, call)
    inner = call.get("function")
    own = {key: value for key, value in call.items() if key not in ("type", "function") and value is not None}
    if not isinstance(inner, Mapping):
        inner = {key: own.pop(key) for key in ("name", "arguments") if key in own}
    arguments = inner.get("arguments")
    if isinstance(arguments, str):
        arguments = _parsed(arguments, expected, wrong) if arguments.strip() else {}
    arguments = {} if arguments is None else arguments
    if not isinstance(inner.get("name"), str) or not isinstance(arguments, Mapping):
        raise wrong(expected, call)
    return {**own, "type": call.get("type") or "function", "function": {**inner, "arguments": arguments}}


def _joined(parts: list[Any], wrong: Wrong) -> str:
    """Return the concatenated text of a message's parts, as chat templates write it."""
    texts = []
    for part in parts:
        if isinstance(part, str):
            texts.append(part)
            continue
        kind = part.get("type", "text") if isinstance(part, Mapping) else None
        text = part.get("text") if isinstance(part, Mapping) else None
        if kind not in _TEXT_PARTS or not isinstance(text, str):
            what = (
                f"a part of the type {kind}"
                if isinstance(kind, str) and kind not in _TEXT_PARTS
                else "a part without text"
            )
            raise wrong(f"content of text, not {what}: only text models are trained", part)
        texts.append(text)
    return "".join(texts)


def _parsed(text: Any, expected: str, wrong: Wrong) -> Any:
    try:
        return json.loads(text)
    except (TypeError, ValueError, RecursionError):
        raise wrong(expected, text) from None


def _check_whole(text: str, what: str, wrong: Wrong) -> None:
    if (part := broken_part(text)) is not None:
        raise wrong(f"{what} to be a text without broken characters", part, FaultKind.NOT_UTF8)
