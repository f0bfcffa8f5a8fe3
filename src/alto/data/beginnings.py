"""Finds the texts of all beginnings of a conversation in one rendering of its chat template.

If a template writes message after message, its text of the first ``n`` messages is a prefix of its text of all. The
template is rendered with messages that record when each one is read, so that a beginning is used only if rendering it
alone would give the same text. A template may look ahead (``loop.last``, ``messages | length``, a loop over all
messages before the one that writes); beginnings that this can change are marked as unknown.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any, overload

from jinja2 import Environment, Template, nodes
from jinja2.visitor import NodeTransformer

__all__ = ["Beginnings", "record_beginnings"]

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
        """Note a look at message ``index``, which changes beginnings that have the current message but not this one."""
        if self._current < index < len(self.messages):
            self._changes[self._current + 1] += 1
            self._changes[index + 1] -= 1

    def read_all(self) -> None:
        """Note a look at something that differs in every beginning, such as the number of messages."""
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
    """A transformer that makes the record note each look at the next message through ``loop``."""

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
