"""What a row becomes, whatever its form: turns in order, or two talks of which one is preferred."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

__all__ = ["Conversation", "Message", "Pair", "Row"]


@dataclass(frozen=True, slots=True)
class Message:
    """One turn.

    Attributes:
        role: ``system``, ``user`` or ``assistant``; ``text`` for a row that is plain text, trained whole.
        is_context: Whether a turn of the assistant is only shown to the model, not trained.
    """

    role: str
    content: str
    is_context: bool = False

    @property
    def is_trained(self) -> bool:
        return self.role == "text" or (self.role == "assistant" and not self.is_context)


Conversation = tuple[Message, ...]
"""Turns in order."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Two talks that begin alike, of which the first ends better; the turns they share are context."""

    chosen: Conversation
    rejected: Conversation

    @property
    def talks(self) -> tuple[Conversation, Conversation]:
        """The chosen one, then the rejected one."""
        return self.chosen, self.rejected


Row: TypeAlias = Conversation | Pair
"""Talk to learn from, or a pair of talks."""
