"""Forms of rows: told by the columns of a dataset, or named, and what a row of each becomes.

============================  ================================================================================
form                          columns (optional ones in brackets)
============================  ================================================================================
``messages``                  ``messages`` or ``conversations``: a list of ``{role, content}``; [``system``]
``sharegpt``                  the same columns: a list of ``{from, value}``; [``system``]
``prompt_completion``         ``prompt`` and ``completion`` or ``response``, or ``question`` and ``answer``, each a
                              text or a list of messages; [``system``]
``alpaca``                    ``instruction``, ``output``; [``input``, ``system``, ``history``]
``text``                      ``text``; only where no other form fits
``preference``                ``chosen`` and ``rejected``, each a text or a list of messages, and ``prompt``, which
                              lists of messages may hold themselves; [``system``]
``openai_preference``         ``input`` (``{messages: […]}``), ``preferred_output``, ``non_preferred_output``
============================  ================================================================================
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from alto.data.conversation import Conversation, Message, Pair
from alto.data.rows import RawRow, listed, quoted
from alto.errors import DataFormatError

__all__ = ["PAIR_FORMS", "Layout", "find_layout", "to_conversation", "to_pair"]

PAIR_FORMS = ("preference", "openai_preference")
"""Forms of preference pairs."""

_Columns = tuple[tuple[str, str], ...]

_REQUIRED: tuple[tuple[str, _Columns], ...] = (
    ("messages", (("messages", "messages"),)),
    ("messages", (("messages", "conversations"),)),
    ("prompt_completion", (("prompt", "prompt"), ("completion", "completion"))),
    ("prompt_completion", (("prompt", "prompt"), ("completion", "response"))),
    ("prompt_completion", (("prompt", "question"), ("completion", "answer"))),
    ("alpaca", (("instruction", "instruction"), ("output", "output"))),
    ("text", (("text", "text"),)),
    ("preference", (("chosen", "chosen"), ("rejected", "rejected"))),
    (
        "openai_preference",
        (
            ("input", "input"),
            ("preferred_output", "preferred_output"),
            ("non_preferred_output", "non_preferred_output"),
        ),
    ),
)
"""Every way to write a form: its roles, and the columns that play them where the task does not say otherwise."""

_OPTIONAL: Mapping[str, tuple[str, ...]] = {
    "messages": ("system",),
    "prompt_completion": ("system",),
    "alpaca": ("input", "system", "history"),
    "text": (),
    "preference": ("prompt", "system"),
    "openai_preference": (),
}

_ROLES = {"system": "system", "user": "user", "assistant": "assistant"}
_SHAREGPT_ROLES = {**_ROLES, "human": "user", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The form of a dataset's rows, and which column plays which role: pairs of role and column."""

    form: str
    columns: _Columns

    def __str__(self) -> str:
        return f"{self.form} ({listed(column for _, column in self.columns)})"

    def column(self, role: str) -> str | None:
        """The column that plays ``role``; None where none does."""
        return dict(self.columns).get(role)


def find_layout(rows: Sequence[RawRow], form: str, columns: Mapping[str, str]) -> Layout:
    """The one layout that fits every row.

    Args:
        form: Its name, or ``auto``.
        columns: Roles to columns, where they are not the usual ones.

    Raises:
        DataFormatError: No layout fits a row, rows need different ones, or several fit all.
    """
    candidates = _candidates(form, columns)
    if not candidates:
        raise DataFormatError(
            f"columns: expected roles of {'one form' if form == 'auto' else f'the form {form}'}, found "
            f"{listed(columns)}; remove those that do not belong"
        )
    _check_columns(rows, columns)
    known: dict[tuple[str, ...], list[Layout]] = {}
    common = candidates
    for row in rows:
        names = tuple(row.values)
        if names not in known:
            known[names] = [layout for layout in candidates if all(column in names for _, column in layout.columns)]
        fitting = known[names]
        if not fitting:
            raise _no_form(row, candidates, form)
        if not any(layout in fitting for layout in common):
            raise DataFormatError(
                f"{row.where}: expected rows of one form, found {_either(fitting)} here and {_either(common)} at "
                f"{rows[0].where}; put each form into a file of its own"
            )
        common = [layout for layout in common if layout in fitting]
    if len(common) > 1:
        common = [layout for layout in common if layout.form != "text"]
    if len(common) > 1:
        raise DataFormatError(
            f"{rows[0].where}: expected columns of one form, found those of {_either(common, ' and ')}; "
            f"{_choose(common)}"
        )
    return _completed(common[0], rows, {name for names in known for name in names}, form, columns)


def to_conversation(row: RawRow, layout: Layout) -> Conversation:
    """The turns of one row.

    Raises:
        DataFormatError: A column does not hold what the form says; names file and line.
    """
    fields = _Fields(row, layout)
    return _with_system(_CONVERTERS[layout.form](fields), fields)


def to_pair(row: RawRow, layout: Layout) -> Pair:
    """The two talks of one row; what both begin with is context, whoever says it.

    Raises:
        DataFormatError: A column does not hold what the form says; names file and line.
    """
    fields = _Fields(row, layout)
    chosen, rejected = (_with_system(turns, fields) for turns in _PAIR_CONVERTERS[layout.form](fields))
    return Pair(chosen=chosen, rejected=rejected)


def _with_system(turns: list[Message], fields: _Fields) -> Conversation:
    if fields.layout.column("system") is not None and turns[0].role != "system":
        text = fields.text("system", optional=True)
        turns = [Message("system", text), *turns] if text else turns
    return tuple(turns)


def _check_columns(rows: Sequence[RawRow], columns: Mapping[str, str]) -> None:
    if not columns:
        return
    names = {name: None for row in rows for name in row.values}  # in the dataset's order
    for role, column in columns.items():
        if column not in names:
            near = difflib.get_close_matches(column.lower(), {name.lower(): name for name in names}, n=1)
            meant = next((name for name in names if near and name.lower() == near[0]), None)
            raise DataFormatError(
                f"columns: expected a column of the dataset for {role} ({listed(names)}), found {quoted(column)}; "
                + (f"did you mean {quoted(meant)}?" if meant is not None else "correct the name")
            )


def _candidates(form: str, columns: Mapping[str, str]) -> list[Layout]:
    wanted = "messages" if form == "sharegpt" else form
    layouts = []
    for name, required in _REQUIRED:
        roles = {*dict(required), *_OPTIONAL[name]}
        if wanted in ("auto", name) and roles.issuperset(columns):
            layouts.append(
                Layout(form=name, columns=tuple((role, columns.get(role, usual)) for role, usual in required))
            )
    return list(dict.fromkeys(layouts))


def _completed(layout: Layout, rows: Sequence[RawRow], seen: set[str], form: str, columns: Mapping[str, str]) -> Layout:
    """``layout`` with the optional columns that the dataset has, and with its shape of messages named."""
    optional = [(role, columns.get(role, role)) for role in _OPTIONAL[layout.form]]
    name = layout.form
    if name == "messages":
        name = form if form != "auto" else _shape(rows, dict(layout.columns)["messages"])
    return Layout(form=name, columns=(*layout.columns, *(pair for pair in optional if pair[1] in seen)))


def _shape(rows: Sequence[RawRow], column: str) -> str:
    for row in rows:
        turns = row.values[column]
        if isinstance(turns, list) and turns and isinstance(turns[0], Mapping):
            return "sharegpt" if "from" in turns[0] else "messages"
    return "messages"


def _no_form(row: RawRow, candidates: Sequence[Layout], form: str) -> DataFormatError:
    what = "the columns of a form" if form == "auto" else f"the columns of the form {form}"
    return DataFormatError(
        f"{row.where}: expected {what}: {_either(candidates)}; found {listed(row.values)}; say which is which with "
        "columns, such as {prompt: <its column>, completion: <its column>}, or rename the columns"
    )


def _either(layouts: Sequence[Layout], joint: str = " or ") -> str:
    return joint.join(map(str, layouts))


def _choose(layouts: Sequence[Layout]) -> str:
    """How to name one of ``layouts``, which fit all rows."""
    if len({layout.form for layout in layouts}) == len(layouts):
        return f"name one with dataset_format: {' or '.join(layout.form for layout in layouts)}"
    ways = ["{" + ", ".join(f"{role}: {column}" for role, column in layout.columns) + "}" for layout in layouts]
    return f"name one with columns: {' or '.join(ways)}"


@dataclass(frozen=True, slots=True)
class _Fields:
    """The values of one row by role, checked as they are taken."""

    row: RawRow
    layout: Layout

    def get(self, role: str) -> Any:
        column = self.layout.column(role)
        return None if column is None else self.row.values.get(column)

    def text(self, role: str, *, optional: bool = False) -> str:
        """A text; where it is optional and missing, an empty one."""
        value = self.get(role)
        if value is None and optional:
            return ""
        return self.checked(value, str(self.layout.column(role)))

    def checked(self, value: object, what: str) -> str:
        if not isinstance(value, str):
            raise self.wrong(f"{quoted(what)[1:-1]} to be a text", value)
        try:
            value.encode()
        except UnicodeEncodeError as error:
            part = value[max(0, error.start - 20) : error.start + 20]
            raise self.wrong(f"{quoted(what)[1:-1]} to be a text of whole characters", part) from None
        return value

    def turns(self, role: str, *, is_sharegpt: bool = False) -> list[Message]:
        """A list of messages."""
        return self.listed_turns(self.get(role), role, is_sharegpt=is_sharegpt)

    def listed_turns(self, value: object, role: str, *, is_sharegpt: bool = False) -> list[Message]:
        """``value``, which was found in the column of ``role``, as a list of messages."""
        if not isinstance(value, list) or not value:
            column = quoted(self.layout.column(role))[1:-1]
            raise self.wrong(f"{column} to be a list with at least one message", value)
        return [self._turn(message, is_sharegpt=is_sharegpt) for message in value]

    def wrong(self, expected: str, value: object) -> DataFormatError:
        return DataFormatError(f"{self.row.where}: expected {expected}, found {quoted(value)}; correct the row")

    def _turn(self, message: Any, *, is_sharegpt: bool) -> Message:
        speaker, says, roles = ("from", "value", _SHAREGPT_ROLES) if is_sharegpt else ("role", "content", _ROLES)
        name = message.get(speaker) if isinstance(message, Mapping) else None
        role = roles.get(name) if isinstance(name, str) else None
        if role is None or not isinstance(message.get(says), str):
            raise self.wrong(f"every message to have a {speaker} ({', '.join(roles)}) and a {says} text", message)
        # OpenAI's form: a weight of 0 shows a turn without training it.
        return Message(role, self.checked(message[says], says), is_context=message.get("weight") == 0)


def _messages(fields: _Fields) -> list[Message]:
    turns = fields.turns("messages", is_sharegpt=fields.layout.form == "sharegpt")
    if not any(turn.role == "assistant" for turn in turns):
        raise DataFormatError(
            f"{fields.row.where}: expected at least one assistant message to train on, found none; add it"
        )
    return turns


def _prompt_completion(fields: _Fields) -> list[Message]:
    """Only the completion is trained, as in TRL: what the assistant says in a prompt of messages is context."""
    prompt = _turns_or_text(fields, "prompt", "user")
    return _behind(prompt, _turns_or_text(fields, "completion", "assistant"), fields, "completion")


def _preference(fields: _Fields) -> tuple[list[Message], list[Message]]:
    prompt = _turns_or_text(fields, "prompt", "user") if fields.layout.column("prompt") is not None else []
    if not prompt and not isinstance(fields.get("chosen"), list):
        raise fields.wrong("a prompt beside a chosen reply that is a text", list(fields.row.values))
    chosen, rejected = (_turns_or_text(fields, role, "assistant") for role in ("chosen", "rejected"))
    if not prompt:
        while len(prompt) < min(len(chosen), len(rejected)) - 1 and chosen[len(prompt)] == rejected[len(prompt)]:
            prompt.append(chosen[len(prompt)])
    return _behind(prompt, chosen, fields, "chosen"), _behind(prompt, rejected, fields, "rejected")


def _openai_preference(fields: _Fields) -> tuple[list[Message], list[Message]]:
    given = fields.get("input")
    messages = given.get("messages") if isinstance(given, Mapping) else given
    prompt = fields.listed_turns(messages, "input")
    replies = [(role, fields.turns(role)) for role in ("preferred_output", "non_preferred_output")]
    chosen, rejected = (_behind(prompt, reply, fields, role) for role, reply in replies)
    return chosen, rejected


def _behind(prompt: Sequence[Message], reply: list[Message], fields: _Fields, role: str) -> list[Message]:
    """``prompt``, of which nothing is trained, and ``reply`` behind it, which may repeat it."""
    if [(turn.role, turn.content) for turn in reply[: len(prompt)]] == [(turn.role, turn.content) for turn in prompt]:
        reply = reply[len(prompt) :]
    if not any(turn.role == "assistant" for turn in reply):
        raise fields.wrong(f"{quoted(fields.layout.column(role))[1:-1]} to hold an assistant message", fields.get(role))
    return [*(replace(turn, is_context=turn.role == "assistant") for turn in prompt), *reply]


def _turns_or_text(fields: _Fields, role: str, speaker: str) -> list[Message]:
    return fields.turns(role) if isinstance(fields.get(role), list) else [Message(speaker, fields.text(role))]


def _alpaca(fields: _Fields) -> list[Message]:
    """An input goes below its instruction, behind a blank line; earlier turns of a history are trained as well."""
    history = fields.get("history") or []
    if not isinstance(history, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in history):
        raise fields.wrong(f"{fields.layout.column('history')} to be a list of [question, reply]", history)
    turns = []
    for question, reply in history:
        turns += [Message("user", fields.checked(question, "history"))]
        turns += [Message("assistant", fields.checked(reply, "history"))]
    parts = [fields.text("instruction"), fields.text("input", optional=True)]
    return [
        *turns,
        Message("user", "\n\n".join(part for part in parts if part)),
        Message("assistant", fields.text("output")),
    ]


def _text(fields: _Fields) -> list[Message]:
    return [Message("text", fields.text("text"))]


_CONVERTERS: Mapping[str, Callable[[_Fields], list[Message]]] = {
    "messages": _messages,
    "sharegpt": _messages,
    "prompt_completion": _prompt_completion,
    "alpaca": _alpaca,
    "text": _text,
}

_PAIR_CONVERTERS: Mapping[str, Callable[[_Fields], tuple[list[Message], list[Message]]]] = {
    "preference": _preference,
    "openai_preference": _openai_preference,
}
