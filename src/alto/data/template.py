"""Applies a tokenizer's chat template, and finds parts of conversations that it leaves out."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any, overload

from jinja2 import Environment, Template, nodes
from jinja2.visitor import NodeTransformer

from alto.data.messages import Conversation, Message
from alto.data.rows import ConversationError

# Finds the texts of all beginnings of a conversation in one rendering of its chat template.
#
# If a template writes message after message, its text of the first ``n`` messages is a prefix of its text of all. The
# template is rendered with messages that record when each one is read, so that a beginning is used only if rendering it
# alone would give the same text. A template may look ahead (``loop.last``, ``messages | length``, a loop over all
# messages before the one that writes); beginnings that this can change are marked as unknown.

_ITERATE, _BEGIN, _PEEK, _END = (f"alto_{name}_of_turns" for name in ("iterate", "begin", "peek", "end"))
_OF_PAST = frozenset({"index", "index0", "first", "previtem", "cycle", "changed", "depth", "depth0"})
"""Attributes of ``loop`` that do not depend on later messages."""
_OF_NEXT = frozenset({"last", "nextitem"})
_STATEFUL = frozenset({"cycler", "joiner"})


class _UnrecordableError(Exception):
    """A template for which the texts of beginnings cannot be derived from the whole text."""


@dataclass(frozen=True, slots=True)
class Beginnings:
    """The text that a template writes for a conversation, and how to cut the texts of its beginnings from it.

    Attributes:
        starts: Offset in the text of each message, and of what follows the last one.
        is_known: For each number of messages, whether the text of that many messages can be derived.
    """

    text: str
    starts: Sequence[int]
    is_known: Sequence[bool]

    def of(self, num_turns: int) -> str | None:
        """Return the text of the first ``num_turns`` messages; None if it cannot be derived from the whole text."""
        if not self.is_known[num_turns]:
            return None
        return self.text[: self.starts[num_turns]] + self.text[self.starts[-1] :]


def record_beginnings(
    source: str, messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]
) -> Beginnings | None:
    """Render the template ``source`` once; return None if this says nothing about beginnings.

    Args:
        messages: All messages, as JSON values.
        arguments: All other arguments of the template.
    """
    template = _instrumented(source)
    if template is None:
        return None
    record = _Record(messages)
    try:
        given = {_ITERATE: record.iterate, _BEGIN: record.begin, _PEEK: record.peek, _END: record.end}
        pieces = []
        for piece in template.generate(messages=_Turns(record), **arguments, **given):
            pieces.append(piece)
            record.num_written += len(piece)
        return record.beginnings("".join(pieces))
    except Exception:  # a template is a program and may raise anything; rendering it alone reports the error
        return None


class _Record:
    """A record of where each message begins in the text, and of the beginnings that would be rendered differently.

    Attributes:
        num_written: Number of characters that the template has written so far.
    """

    def __init__(self, messages: Sequence[Mapping[str, Any]]) -> None:
        self.messages = list(messages)
        self.num_written = 0
        self._starts: list[int] = []
        self._first = 0
        self._current = -1
        self._has_ended = False
        self._changes = [0] * (len(messages) + 2)

    def read(self, index: int) -> None:
        """Record that the template reads message ``index``. Beginnings of the conversation that contain the current
        message but not this one may then be rendered differently."""
        if self._current < index < len(self.messages):
            self._changes[self._current + 1] += 1
            self._changes[index + 1] -= 1

    def read_all(self) -> None:
        """Record that the template reads a value that differs in every beginning, such as the number of messages."""
        self.read(len(self.messages) - 1)

    def iterate(self, turns: object) -> list[Mapping[str, Any]]:
        """Start the loop that writes the messages."""
        if not isinstance(turns, _Turns):
            raise _UnrecordableError
        self._first = turns.first
        self._starts = [self.num_written] * min(turns.first, len(self.messages))
        return self.messages[turns.first :]

    def begin(self) -> str:
        """Start the next message."""
        self._current = len(self._starts)
        self._starts.append(self.num_written)
        return ""

    def peek(self, value: object) -> object:
        """Return ``value``, and note that it depends on the next message."""
        self.read(self._current + 1)
        return value

    def end(self) -> str:
        """End the loop; every beginning continues with the text after it."""
        self._starts.append(self.num_written)
        self._current, self._has_ended = -1, True
        return ""

    def beginnings(self, text: str) -> Beginnings:
        if not self._has_ended or len(self._starts) != len(self.messages) + 1:
            raise _UnrecordableError
        num_turns = len(self.messages)
        is_known = [count == 0 for count in accumulate(self._changes[: num_turns + 1])]
        return Beginnings(text, self._starts, is_known)


class _Turns(Sequence[Mapping[str, Any]]):
    """The messages from ``first`` on; every access is recorded."""

    def __init__(self, record: _Record, first: int = 0) -> None:
        self._record = record
        self.first = first

    def __bool__(self) -> bool:
        self._record.read(self.first)
        return self.first < len(self._record.messages)

    def __len__(self) -> int:
        self._record.read_all()
        return len(self._record.messages[self.first :])

    @overload
    def __getitem__(self, index: int) -> Mapping[str, Any]: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Mapping[str, Any]]: ...

    def __getitem__(self, index: int | slice) -> Mapping[str, Any] | Sequence[Mapping[str, Any]]:
        if isinstance(index, slice):
            if index.stop is None and index.step in (None, 1) and (index.start or 0) >= 0:
                return _Turns(self._record, self.first + (index.start or 0))
            self._record.read_all()
        elif index < 0:
            self._record.read_all()
        else:
            self._record.read(self.first + index)
        return self._record.messages[self.first :][index]

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        for index in range(self.first, len(self._record.messages)):
            self._record.read(index)
            yield self._record.messages[index]
        self._record.read_all()


@lru_cache(maxsize=16)
def _instrumented(source: str) -> Template | None:
    """Return the template ``source`` with calls to a :class:`_Record` around its last loop.

    None if there is no suitable loop, or if the text after the loop may depend on what was done in it."""
    try:
        return _with_calls(source)
    except _UnrecordableError:
        return None


def _with_calls(source: str) -> Template:
    from transformers.utils.chat_template_utils import _compile_jinja_template

    environment: Environment = _compile_jinja_template(source).environment
    tree = environment.parse(source)
    loop = next((node for node in reversed(tree.body) if isinstance(node, nodes.For)), None)
    if loop is None or loop.test is not None or loop.else_ or loop.recursive:
        raise _UnrecordableError
    place = tree.body.index(loop)
    if _keeps_state(tree) and _reads_own(tree, tree.body[place + 1 :]):
        raise _UnrecordableError
    _MarkedPeeks().of_body(loop)
    loop.iter = _call(_ITERATE, loop.iter)
    loop.body.insert(0, nodes.Output([_call(_BEGIN)]))
    tree.body.insert(place + 1, nodes.Output([_call(_END)]))
    for node in tree.find_all(nodes.Node):
        node.lineno = getattr(node, "lineno", None) or 1
    tree.set_environment(environment)
    return environment.from_string(tree)


def _keeps_state(tree: nodes.Template) -> bool:
    """Return whether a message can change the text after the loop; names that are set in a loop end with it."""
    is_stateful = any(name.name in _STATEFUL for name in tree.find_all(nodes.Name))
    return is_stateful or tree.find(nodes.NSRef) is not None


def _reads_own(tree: nodes.Template, after: Sequence[nodes.Node]) -> bool:
    """Return whether ``after`` reads a name that the template sets."""
    own = {name.name for name in tree.find_all(nodes.Name) if name.ctx != "load"}
    own |= {macro.name for macro in tree.find_all(nodes.Macro)}
    read = {name.name for node in after for name in (node, *node.find_all(nodes.Name)) if isinstance(name, nodes.Name)}
    return not own.isdisjoint(read)


class _MarkedPeeks(NodeTransformer):
    """A transformer of templates: afterwards the record notices every access to the next message through ``loop``."""

    def of_body(self, loop: nodes.For) -> None:
        """Rewrite the body of ``loop``.

        Raises:
            _UnrecordableError: The body uses ``loop`` in a way whose result may depend on any later message.
        """
        loop.body = [self.visit(node) for node in loop.body]

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802 (jinja's name)
        node.iter = self.visit(node.iter)  # in the body of this inner loop, the name `loop` means the inner loop
        if any(name.name == "loop" for part in (node.test, *node.else_) if part for name in part.find_all(nodes.Name)):
            raise _UnrecordableError
        return node

    def visit_Getattr(self, node: nodes.Getattr) -> nodes.Node:  # noqa: N802
        if not isinstance(node.node, nodes.Name) or node.node.name != "loop":
            return self.generic_visit(node)
        if node.attr in _OF_NEXT:
            return _call(_PEEK, node)
        if node.attr not in _OF_PAST:
            raise _UnrecordableError
        return node

    def visit_Name(self, node: nodes.Name) -> nodes.Name:  # noqa: N802
        if node.name == "loop":
            raise _UnrecordableError
        return node


def _call(name: str, *arguments: nodes.Node) -> nodes.Call:
    return nodes.Call(nodes.Name(name, "load"), list(arguments), [], None, None)


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
    arguments of calls become JSON text, and missing content of messages with calls becomes empty.
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
        beside = _arguments_of(conversation)
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
        beside = _arguments_of(conversation)
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
        yield [_without_nulls(message) for message in own]
        has_calls = any(message.get("tool_calls") for message in own)
        lacks_content = any(message["content"] is None for message in own)
        if has_calls:
            yield [_without_nulls(_with_text_arguments(message)) for message in own]
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
        return str(self.tokenizer.get_chat_template(None, _arguments_of(conversation).get("tools")))


class TurnTexts:
    """The template's texts of a conversation and of its beginnings.

    Args:
        is_recorded: Whether the texts of beginnings are cut from the text of the whole conversation. This is faster if
            many beginnings are needed.

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
    """Return the parts of ``conversation`` other than the texts of its turns, each with its count.

    These are keys of messages; ``tools`` and other arguments of the template, as ``row: tools``; turns of roles that
    many templates do not support, as ``role: tool``; and :data:`PARALLEL_CALLS`, because some templates write only the
    first of several calls.
    """
    counts: dict[str, int] = {f"row: {name}": 1 for name, value in _arguments_of(conversation).items() if value}
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
    beside = _arguments_of(conversation)
    if name == PARALLEL_CALLS:
        turns = [_with_one_call(turn) for turn in conversation]
    elif kind == "row" and of_kind:
        del beside[of_kind]
    elif kind == "role" and of_kind:
        turns = [_altered(turn) if turn.role == of_kind else turn for turn in conversation]
    else:
        turns = [_stripped(turn, name) for turn in conversation]
    return Conversation(turns, json.dumps(beside, ensure_ascii=False) if beside else "")


def _arguments_of(conversation: Conversation) -> dict[str, Any]:
    """Return the arguments of the template other than the turns."""
    text = conversation.template_arguments
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


def _without_nulls(message: dict[str, Any]) -> dict[str, Any]:
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
