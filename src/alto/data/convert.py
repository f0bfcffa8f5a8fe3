"""Converts rows of a known form into conversations and pairs, and checks their values."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from alto.data.formats import Layout
from alto.data.messages import (
    Conversation,
    LabelledText,
    Message,
    Pair,
    read_message,
    read_template_options,
    read_tools,
)
from alto.data.rows import FaultKind, RawRow, RowError, RowFault, broken_part, listed, quoted
from alto.errors import DataFormatError
from alto.records import LabelSet, ProblemType, RowLabel
from alto.spec import DataKeys

_NEEDED_LABELS = 2


class LabelError(ValueError):
    """A value that is not a label of the task; the message completes "expected … to be"."""

    def __init__(self, expected: str, kind: FaultKind = FaultKind.WRONG_VALUE) -> None:
        super().__init__(expected)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class LabelReader:
    """A reader of the labels of rows.

    Attributes:
        labels: All labels of the task.
        reads_indices: Whether a whole number is read as the index of a label; otherwise only names are read.
    """

    labels: LabelSet
    reads_indices: bool

    def read(self, value: object) -> RowLabel:
        """Return the label for ``value``, the content of a row's label column.

        Raises:
            LabelError: ``value`` is missing or is not a label.
        """
        if _is_missing(value):
            raise LabelError("a label", FaultKind.NO_LABEL)
        if self.labels.problem_type == "regression":
            return _numbers(value, self.labels.num_labels)
        if self.labels.problem_type == "single_label_classification":
            return self._index(value)
        return self._marks(value)

    def _index(self, value: object) -> int:
        expected = f"one of {listed(self.labels.names)}"
        number, name = _number(value), _name(value)
        if name in self.labels.names:
            return self.labels.names.index(name)
        if self.reads_indices and number is not None and number in range(self.labels.num_labels):
            return int(number)
        raise LabelError(expected, FaultKind.UNKNOWN_LABEL if name is not None else FaultKind.WRONG_VALUE)

    def _marks(self, value: object) -> tuple[float, ...]:
        """Return a 1 for every label that a row has, and a 0 for others; ``value`` lists names, or 0s and 1s."""
        count = self.labels.num_labels
        if not isinstance(value, list):
            raise LabelError("a list of labels")
        numbers = [_number(item) for item in value]
        if value and all(number is not None for number in numbers):
            if len(numbers) != count or not all(number in (0, 1) for number in numbers):
                raise LabelError(f"a list of names, or of {count} numbers that are 0 or 1")
            return tuple(float(number or 0) for number in numbers)
        found = {self._index(item) for item in value}
        return tuple(float(index in found) for index in range(count))


def find_labels(values: Sequence[object], keys: DataKeys, allowed: Sequence[ProblemType], key: str) -> LabelReader:
    """Find the labels of a dataset.

    Names are sorted. Whole numbers are the indices of labels, and all from 0 to K - 1 have to occur unless
    ``num_labels`` is set; CSV files hold them as text. Values that cannot be labels are ignored: they are faults of
    their rows.

    Args:
        values: The value of every row in the label column.
        keys: Data keys of the task, or of one source of its mixture.
        allowed: Problem types that the task's method can learn.
        key: The task's key that names the dataset, for messages.

    Raises:
        DataFormatError: The labels do not fit the method or the keys, or there are fewer than two.
    """
    present = [value for value in values if not _is_missing(value)]
    if not present:
        raise DataFormatError(
            f"{key}: expected rows with labels, found none; name the column with columns: {{label: <its column>}}"
        )
    problem_type = keys.problem_type or _problem_type(present, allowed)
    if problem_type == "regression":
        names = _output_names(present, keys)
    else:
        names = keys.id2label or _class_names(present, keys, problem_type, key)
    return LabelReader(
        LabelSet(problem_type=problem_type, names=names),
        # If the names of labels look like numbers, a number in a row is a name.
        reads_indices=_are_numbers(present) and all(_number(name) is None for name in names),
    )


def methods_of_labels(values: Sequence[object]) -> tuple[str, ...]:
    """Return the methods that can learn labels such as ``values``, the more likely one first.

    Names are classes, and fractions are numbers to predict. Whole numbers can be both; they are more likely classes if
    they count from 0.
    """
    present = [value for value in values if not _is_missing(value)]
    items = [item for value in present for item in (value if isinstance(value, list) else [value])]
    numbers = [number for item in items if (number := _number(item)) is not None]
    if not numbers or len(numbers) < len(items):
        return ("classification",) if present else ()
    if not all(number.is_integer() for number in map(float, numbers)):
        return ("regression",)
    both = ("classification", "regression")
    return both if min(numbers) == 0 else both[::-1]


def _problem_type(present: Sequence[object], allowed: Sequence[ProblemType]) -> ProblemType:
    if len(allowed) == 1:
        return allowed[0]
    is_list = any(isinstance(value, list) for value in present)
    return "multi_label_classification" if is_list else "single_label_classification"


def _output_names(present: Sequence[object], keys: DataKeys) -> tuple[str, ...]:
    """Return the names of the outputs of a regression."""
    first = present[0]
    count = keys.num_labels or (len(first) if isinstance(first, list) else 1)
    return keys.id2label or _default_names(count)


def _class_names(present: Sequence[object], keys: DataKeys, problem_type: ProblemType, key: str) -> tuple[str, ...]:
    if problem_type == "multi_label_classification":
        vector = next((value for value in present if isinstance(value, list) and value), [])
        if vector and all(_number(item) is not None for item in vector):
            return _default_names(keys.num_labels or len(vector))
        present = [item for value in present if isinstance(value, list) for item in value]
    if _are_numbers(present):
        return _numbered_names([number for value in present if (number := _number(value)) is not None], keys, key)
    names = tuple(sorted({name for value in present if isinstance(value, str | bool) and (name := _name(value))}))
    return _checked_labels(names, keys, key)


def _numbered_names(numbers: Sequence[float], keys: DataKeys, key: str) -> tuple[str, ...]:
    fraction = next((number for number in numbers if not float(number).is_integer()), None)
    if fraction is not None:
        raise DataFormatError(
            f"{key}: expected labels that are names or whole numbers, found {fraction}; set method: regression to "
            "learn numbers"
        )
    indices = sorted({int(number) for number in numbers if number >= 0})
    count = keys.num_labels or len(indices)
    if keys.num_labels is None and indices != list(range(count)):
        raise DataFormatError(
            f"{key}: expected labels that are all the numbers from 0 to one less than their count, found "
            f"{listed(map(str, indices))}; set num_labels if some do not occur in the rows, or use names as labels"
        )
    return _checked_labels(_default_names(count), keys, key)


def _checked_labels(names: tuple[str, ...], keys: DataKeys, key: str) -> tuple[str, ...]:
    if len(names) < _NEEDED_LABELS:
        raise DataFormatError(
            f"{key}: expected at least two different labels, found {listed(names)}; check the column with columns: "
            "{label: <its column>}, or name all labels with id2label"
        )
    if keys.num_labels is not None and keys.num_labels != len(names):
        raise DataFormatError(
            f"{key}: expected num_labels {keys.num_labels} to equal the number of different labels, found "
            f"{len(names)}: {listed(names)}; name all labels with id2label if some do not occur in the rows"
        )
    return names


def _default_names(count: int) -> tuple[str, ...]:
    return tuple(f"LABEL_{index}" for index in range(count))


def _numbers(value: object, count: int) -> tuple[float, ...]:
    numbers = [_number(item) for item in (value if isinstance(value, list) else [value])]
    if len(numbers) != count or any(number is None for number in numbers):
        raise LabelError("a finite number" if count == 1 else f"a list of {count} finite numbers")
    return tuple(float(number) for number in numbers if number is not None)


def _is_missing(value: object) -> bool:
    is_nan = isinstance(value, float) and math.isnan(value)
    return value is None or is_nan or (isinstance(value, str) and not value.strip())


def _are_numbers(present: Sequence[object]) -> bool:
    """Return whether most labels, including those in lists, are numbers."""
    items = [item for value in present for item in (value if isinstance(value, list) else [value])]
    return 2 * sum(_number(item) is not None for item in items) > len(items)


def _name(value: object) -> str | None:
    """Return the name of a label: a text, a whole number, or a truth value as JSON writes it; None for others."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(value).strip() if isinstance(value, str | int) else None


def _number(value: object) -> float | None:
    """Return a finite number, which may be written as a text; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, str | int | float) or "_" in str(value):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def to_conversation(row: RawRow, layout: Layout) -> Conversation:
    """Convert one row into its turns.

    Raises:
        RowError: The row could not be read, a column does not hold what the form needs, or a reply to be trained is
            empty. The message names file and line.
    """
    fields = _Fields(_checked(row, layout), layout)
    conversation = _completed(_CONVERTERS[layout.form](fields), fields)
    if any(turn.is_trained and turn.is_empty for turn in conversation):
        raise fields.wrong("replies with a text", [turn.content for turn in conversation], FaultKind.EMPTY_REPLY)
    return conversation


def to_labelled(row: RawRow, layout: Layout) -> Conversation:
    """Convert one row into its turns, with the label of the reply.

    Raises:
        DataFormatError: See :func:`to_conversation`; or the label is neither true nor false.
    """
    fields = _Fields(_checked(row, layout), layout)
    label = fields.get("label")
    if not isinstance(label, bool | int) or label not in (0, 1):
        raise fields.wrong(f"{fields.column('label')} to be true (a desirable reply) or false", label)
    return to_conversation(row, layout).labelled(bool(label))


def to_pair(row: RawRow, layout: Layout) -> Pair:
    """Convert one row into two conversations. Their common beginning is context, for all roles.

    Raises:
        RowError: The row could not be read; a column does not hold what the form needs; the conversations are equal, or
            do not first differ in an assistant reply; or a reply is empty. The message names file and line.
    """
    fields = _Fields(_checked(row, layout), layout)
    conversations = _with_common_context(_PAIR_CONVERTERS[layout.form](fields), fields)
    chosen, rejected = (_completed(turns, fields) for turns in conversations)
    for side in (chosen, rejected):
        trained = [turn for turn in side if turn.is_trained]
        if trained and all(turn.is_empty for turn in trained):
            raise fields.wrong("two replies with a text", [turn.content for turn in side], FaultKind.EMPTY_REPLY)
    return Pair(chosen=chosen, rejected=rejected)


def to_labelled_text(row: RawRow, layout: Layout, labels: LabelReader | None) -> LabelledText:
    """Convert one row into its text, texts or turns, with the label; without ``labels``, rows have none.

    Raises:
        RowError: The row could not be read; a column does not hold what the form needs; a text is empty; or the label
            is missing or not in ``labels``. The message names file and line.
    """
    fields = _Fields(_checked(row, layout), layout)
    text: str | Conversation
    if layout.column("messages") is not None:
        given = fields.get("messages")
        is_sharegpt = isinstance(given, list) and bool(given) and isinstance(given[0], Mapping) and "from" in given[0]
        text = Conversation(fields.turns(given, "messages", is_sharegpt=is_sharegpt))
        texts: list[str] = []
    else:
        texts = [fields.text(role) for role in ("text", "text_pair") if layout.column(role) is not None]
        text = texts[0]
    if any(not one.strip() for one in texts):
        raise fields.wrong("a text that is not empty", texts, FaultKind.EMPTY_REPLY)
    try:
        label = None if labels is None else labels.read(fields.get("label"))
    except LabelError as error:
        raise fields.wrong(f"{fields.column('label')} to be {error}", fields.get("label"), error.kind) from None
    return LabelledText(text, texts[1] if len(texts) > 1 else None, label, row.where)


def label_of(row: RawRow, layout: Layout) -> object:
    """Return the value of a row in the label column; None if it has none."""
    return _Fields(row, layout).get("label")


def have_labels(rows: Sequence[RawRow], columns: Mapping[str, str]) -> bool:
    """Return whether a row has a value in its label column; also true if no row could be read."""
    names = (columns["label"],) if "label" in columns else ("label", "labels")
    readable = [row for row in rows if row.fault is None]
    return not readable or any(not _is_missing(row.values.get(name)) for row in readable for name in names)


def _checked(row: RawRow, layout: Layout) -> RawRow:
    """Return ``row`` if it was read and has the columns of ``layout``.

    Raises:
        RowError: The row has a fault, or lacks a column.
    """
    if row.fault is not None:
        raise RowError(row.where, row.fault)
    missing = layout.misfit(row)
    if missing is not None:
        raise RowError(row.where, missing)
    return row


@dataclass(frozen=True, slots=True)
class _Fields:
    """The values of one row by role."""

    row: RawRow
    layout: Layout

    def get(self, role: str) -> Any:
        column = self.layout.column(role)
        return None if column is None else self.row.values.get(column)

    def column(self, role: str) -> str:
        """Return the name of the column of ``role``, for messages."""
        return quoted(self.layout.column(role))[1:-1]

    def text(self, role: str, *, optional: bool = False) -> str:
        """Return the text of ``role``; an empty text if it is optional and missing."""
        value = self.get(role)
        if value is None and optional:
            return ""
        return self.checked(value, self.column(role))

    def checked(self, value: object, what: str) -> str:
        if not isinstance(value, str):
            raise self.wrong(f"{what} to be a text", value)
        if (part := broken_part(value)) is not None:
            raise self.wrong(f"{what} to be a text without broken characters", part, FaultKind.NOT_UTF8)
        return value

    def turns_or_text(self, role: str, speaker: str) -> list[Message]:
        """Return the messages of ``role``: a list or a single one, in either shape, or a text by ``speaker``."""
        value = self.get(role)
        messages = [value] if isinstance(value, Mapping) else value
        if not isinstance(messages, list):
            return [Message(speaker, self.text(role))]
        first = messages[0] if messages else None
        return self.turns(messages, role, is_sharegpt=isinstance(first, Mapping) and "from" in first)

    def turns(self, value: object, role: str, *, is_sharegpt: bool = False) -> list[Message]:
        """Return ``value`` of the column of ``role`` as a list of messages."""
        if not isinstance(value, list) or not value:
            raise self.wrong(f"{self.column(role)} to be a list with at least one message", value)
        return [read_message(message, is_sharegpt=is_sharegpt, wrong=self.wrong) for message in value]

    def wrong(self, expected: str, value: object, kind: FaultKind = FaultKind.WRONG_VALUE) -> RowError:
        reason = f"expected {expected}, found {quoted(value)}; correct the row"
        return RowError(self.row.where, RowFault(kind, reason))


def _completed(turns: list[Message], fields: _Fields) -> Conversation:
    """Return a conversation: the text of the system column, then ``turns``; and the arguments of the chat template."""
    if fields.layout.column("system") is not None and turns[0].role not in ("system", "developer"):
        text = fields.text("system", optional=True)
        turns = [Message("system", text), *turns] if text else turns
    arguments = _template_arguments(fields)
    written = json.dumps(arguments, ensure_ascii=False) if arguments else ""
    return Conversation(turns, written, fields.row.where)


def _template_arguments(fields: _Fields) -> dict[str, Any]:
    tools = fields.get("tools")
    if fields.layout.form == "openai_preference":
        given = fields.get("input")
        tools = given.get("tools") if isinstance(given, Mapping) else None
    tools = read_tools(tools, fields.get("functions"), fields.wrong)
    options = read_template_options(fields.get("chat_template_kwargs"), fields.wrong)
    return {**({"tools": tools} if tools else {}), **options}


def _messages(fields: _Fields) -> list[Message]:
    turns = fields.turns(fields.get("messages"), "messages", is_sharegpt=fields.layout.form == "sharegpt")
    if not any(turn.role == "assistant" for turn in turns):
        reason = "expected at least one assistant message to train on, found none; add it"
        raise RowError(fields.row.where, RowFault(FaultKind.NO_REPLY, reason))
    return turns


def _prompt_completion(fields: _Fields) -> list[Message]:
    """Return the prompt as context and the completion; as in TRL, assistant turns of the prompt are not trained."""
    return _after_prompt(fields.turns_or_text("prompt", "user"), "completion", fields)


def _after_prompt(prompt: Sequence[Message], role: str, fields: _Fields) -> list[Message]:
    """Return ``prompt`` as context, followed by the reply in the column of ``role``, which may repeat the prompt.

    Raises:
        RowError: There is no assistant reply.
    """
    reply = fields.turns_or_text(role, "assistant")
    if _comparable(reply[: len(prompt)]) == _comparable(prompt):
        reply = reply[len(prompt) :]
    if not any(turn.role == "assistant" for turn in reply):
        raise fields.wrong(
            f"at least one assistant message in column {fields.column(role)}", fields.get(role), FaultKind.NO_REPLY
        )
    return [*_as_context(prompt), *reply]


def _comparable(turns: Sequence[Message]) -> list[tuple[str, str, str]]:
    return [(turn.role, turn.content, turn.extras) for turn in turns]


def _as_context(turns: Sequence[Message]) -> list[Message]:
    return [replace(turn, is_context=turn.role == "assistant") for turn in turns]


def _alpaca(fields: _Fields) -> list[Message]:
    """Return the turns of an Alpaca row; the replies in its history are trained as well."""
    history = fields.get("history") or []
    if not isinstance(history, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in history):
        raise fields.wrong(f"{fields.column('history')} to be a list of [question, reply]", history)
    turns = []
    for question, reply in history:
        turns += [Message("user", fields.checked(question, "history"))]
        turns += [Message("assistant", fields.checked(reply, "history"))]
    return [*turns, _with_input("instruction", fields), Message("assistant", fields.text("output"))]


def _with_input(role: str, fields: _Fields) -> Message:
    """Return the user's text in the column of ``role``, followed by the optional input after a blank line."""
    parts = [fields.text(role), fields.text("input", optional=True)]
    return Message("user", "\n\n".join(part for part in parts if part))


def _labelled_reply(fields: _Fields) -> list[Message]:
    """Return the prompt and its completion, or a conversation in which only the last message is not context."""
    if fields.layout.column("messages") is None:
        return _prompt_completion(fields)
    turns = fields.turns_or_text("messages", "user")
    if turns[-1].role != "assistant":
        expected = f"{fields.column('messages')} to end with the reply that the label is about"
        raise fields.wrong(expected, turns[-1].role, FaultKind.NO_REPLY)
    return [*_as_context(turns[:-1]), turns[-1]]


def _text(fields: _Fields) -> list[Message]:
    return [Message("text", fields.text("text"))]


def _raw_prompt_completion(fields: _Fields) -> list[Message]:
    return [Message("text", fields.text("prompt"), is_context=True), Message("assistant", fields.text("completion"))]


_CONVERTERS: Mapping[str, Callable[[_Fields], list[Message]]] = {
    "messages": _messages,
    "sharegpt": _messages,
    "prompt_completion": _prompt_completion,
    "raw_prompt_completion": _raw_prompt_completion,
    "alpaca": _alpaca,
    "text": _text,
    "unpaired_preference": _labelled_reply,
}

_Conversations = tuple[list[Message], list[Message]]


def _preference(fields: _Fields) -> _Conversations:
    """Return both conversations; as in TRL, no prompt is needed if both are lists of messages that begin with it."""
    chosen, rejected = (fields.turns_or_text(role, "assistant") for role in ("chosen", "rejected"))
    given = fields.get("prompt")
    if given is None and not all(isinstance(fields.get(role), list) for role in ("chosen", "rejected")):
        if fields.layout.column("prompt") is None:
            reason = (
                "expected a column with the prompt beside chosen and rejected replies, found "
                f"{listed(fields.row.values)}; name it with columns: {{prompt: <its column>}}, or, if both are "
                "texts that begin with the prompt, join them unchanged with dataset_format: raw_preference"
            )
            raise RowError(fields.row.where, RowFault(FaultKind.NO_COLUMNS, reason))
        raise fields.wrong("a prompt beside chosen and rejected replies", list(fields.row.values))
    if given is None or (isinstance(given, str) and "assistant" not in (chosen[0].role, rejected[0].role)):
        return chosen, rejected
    prompt = [_with_input("prompt", fields)] if fields.get("input") else fields.turns_or_text("prompt", "user")
    return _after_prompt(prompt, "chosen", fields), _after_prompt(prompt, "rejected", fields)


def _raw_preference(fields: _Fields) -> _Conversations:
    """Join the texts as they are; as in TRL, the prompt is their common beginning if there is no prompt column."""
    chosen, rejected = fields.text("chosen"), fields.text("rejected")
    if fields.layout.column("prompt") is None:
        begin = _num_common(chosen, rejected)
        prompt, chosen, rejected = chosen[:begin], chosen[begin:], rejected[begin:]
    else:
        prompt = fields.text("prompt")
    first = Message("text", prompt, is_context=True)
    return [first, Message("assistant", chosen)], [first, Message("assistant", rejected)]


def _num_common(first: str, second: str) -> int:
    """Return the length of the common beginning, without a trailing space and never a whole text.

    This is TRL's ``extract_prompt``."""
    most = min(len(first), len(second)) - 1
    shared = next((place for place in range(most + 1) if first[place] != second[place]), None)
    if shared is None:
        return max(most, 0)
    return shared - 1 if shared and first[shared - 1] == " " else shared


def _openai_preference(fields: _Fields) -> _Conversations:
    given = fields.get("input")
    prompt = fields.turns(given.get("messages") if isinstance(given, Mapping) else given, "input")
    return _after_prompt(prompt, "preferred_output", fields), _after_prompt(prompt, "non_preferred_output", fields)


_PAIR_CONVERTERS: Mapping[str, Callable[[_Fields], _Conversations]] = {
    "preference": _preference,
    "raw_preference": _raw_preference,
    "openai_preference": _openai_preference,
}


def _with_common_context(conversations: _Conversations, fields: _Fields) -> _Conversations:
    """Return both conversations with their common beginning as context.

    Raises:
        RowError: They are equal, share no turn, or do not first differ in an assistant reply.
    """
    chosen, rejected = (_comparable(conversation) for conversation in conversations)
    if chosen == rejected:
        raise fields.wrong("two different replies", [chosen[-1][1], rejected[-1][1]], FaultKind.EQUAL_REPLIES)
    shared, most = 0, min(len(chosen), len(rejected)) - 1
    while shared < most and chosen[shared] == rejected[shared]:
        shared += 1
    if not shared:
        raise fields.wrong(
            "both conversations of a pair to begin with the same turn, the prompt",
            [chosen[0][1], rejected[0][1]],
            FaultKind.UNLIKE_PROMPTS,
        )
    asks, answers = chosen[shared - 1][0], (chosen[shared][0], rejected[shared][0])
    if asks == "assistant" or answers != ("assistant", "assistant"):
        raise fields.wrong(
            "both conversations of a pair to differ first in a reply of the assistant",
            [asks, *answers],
            FaultKind.UNLIKE_PROMPTS,
        )
    first, second = ([*_as_context(conversation[:shared]), *conversation[shared:]] for conversation in conversations)
    return first, second
