"""The interface of scorers of generated answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

__all__ = ["Answer", "OnTurn", "Scorer", "ScorerFailedError"]

OnTurn = Callable[[], None]
"""Called regularly; what it raises ends the scoring."""


class ScorerFailedError(Exception):
    """Signal inside this package: the scorer gives no scores, for the reason in its message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One row with the text that a job generated for it.

    Attributes:
        prompt: The text as the model saw it.
        reference: The row's own reply.
        answer: The generated text, without the token that ended it.
    """

    prompt: str
    reference: str
    answer: str


class Scorer(Protocol):
    """Scores the answers of one adapter."""

    def __call__(self, answers: Sequence[Answer], on_turn: OnTurn) -> Sequence[float]:
        """A finite number for each of ``answers``, in their order; higher is better.

        Args:
            answers: Answers of one adapter.
            on_turn: Called regularly; what it raises ends the scoring.

        Raises:
            ScorerFailedError: There are no such scores.
        """
        ...
