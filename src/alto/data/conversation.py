"""The common form of rows: turns in order, a pair of conversations of which one is preferred, or a labelled text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, SupportsIndex, TypeAlias, overload

from alto.records import RowLabel

__all__ = [
    "REASONING_KEYS",
    "Conversation",
    "ConversationWithTools",
    "LabelledConversation",
    "LabelledText",
    "Message",
    "Pair",
    "Row",
    "place_of",
    "unpaired",
]

REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
"""Keys of a message that may hold its reasoning; transformers also gives each to the template under the first name."""


@dataclass(frozen=True, slots=True)
class Message:
    """One turn.

    Attributes:
        role: ``system``, ``developer``, ``user``, ``assistant`` or ``tool``. Or ``text``: for a plain text, which is
            trained as a whole, and for a raw prompt, which is not trained and whose reply is plain text as well.
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


Conversation = tuple[Message, ...]
"""Turns in order."""


class ConversationWithTools(Conversation):
    """Turns in order, with the other arguments of the chat template.

    Attributes:
        template_arguments: The text of a JSON object: ``tools``, and the row's ``chat_template_kwargs``; empty if the
            row has neither.
        where: Place of the row, for messages: ``train.jsonl:7``; empty if unknown. It does not count in comparisons.
    """

    template_arguments: str
    where: str

    def __new__(cls, turns: Iterable[Message], template_arguments: str, where: str = "") -> ConversationWithTools:
        made = super().__new__(cls, turns)
        made.template_arguments = template_arguments
        made.where = where
        return made

    def __getnewargs__(self) -> tuple[Conversation, str, str]:
        return tuple(self), self.template_arguments, self.where

    @overload
    def __getitem__(self, index: SupportsIndex) -> Message: ...

    @overload
    def __getitem__(self, index: slice) -> ConversationWithTools: ...

    def __getitem__(self, index: SupportsIndex | slice) -> Message | ConversationWithTools:
        if isinstance(index, slice):
            return ConversationWithTools(super().__getitem__(index), self.template_arguments, self.where)
        return super().__getitem__(index)

    def __eq__(self, other: object) -> bool:
        return super().__eq__(other) and self.template_arguments == getattr(other, "template_arguments", "")

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        own = super().__hash__()  # a plain tuple may be equal if there are no arguments
        return hash((own, self.template_arguments)) if self.template_arguments else own


class LabelledConversation(ConversationWithTools):
    """A conversation whose last reply is labelled.

    Attributes:
        is_desirable: Whether the model should give this reply.
    """

    is_desirable: bool

    def __new__(cls, turns: Conversation, is_desirable: bool) -> LabelledConversation:
        made = super().__new__(cls, turns, getattr(turns, "template_arguments", ""), getattr(turns, "where", ""))
        assert isinstance(made, LabelledConversation)
        made.is_desirable = is_desirable
        return made

    def __getnewargs__(self) -> tuple[Conversation, bool]:  # type: ignore[override]
        return self.unlabelled, self.is_desirable

    @property
    def unlabelled(self) -> Conversation:
        """The conversation without the label."""
        return ConversationWithTools(tuple(self), self.template_arguments, self.where)

    def __eq__(self, other: object) -> bool:
        return super().__eq__(other) and self.is_desirable == getattr(other, "is_desirable", None)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((super().__hash__(), self.is_desirable))


@dataclass(frozen=True, slots=True)
class Pair:
    """Two conversations with the same beginning, of which the first ends better; the shared turns are context."""

    chosen: Conversation
    rejected: Conversation

    @property
    def conversations(self) -> tuple[Conversation, Conversation]:
        """The chosen conversation, then the rejected one."""
        return self.chosen, self.rejected


@dataclass(frozen=True, slots=True)
class LabelledText:
    """One text, two texts or a conversation, with a label; ``where`` is the place of the row, for messages."""

    text: str | Conversation
    text_pair: str | None
    label: RowLabel
    where: str = field(default="", compare=False)


Row: TypeAlias = Conversation | Pair | LabelledText
"""A conversation, a pair of conversations, or a labelled text."""


def place_of(row: Row, otherwise: str) -> str:
    """Return the place of ``row``, for messages; ``otherwise`` if unknown."""
    return getattr(row.chosen if isinstance(row, Pair) else row, "where", "") or otherwise


def unpaired(rows: Iterable[Row]) -> Iterator[Row]:
    """Yield ``rows`` with two labelled conversations instead of each pair, the chosen one first."""
    for row in rows:
        if isinstance(row, Pair):
            yield LabelledConversation(row.chosen, True)
            yield LabelledConversation(row.rejected, False)
        else:
            yield row
