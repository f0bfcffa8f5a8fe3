"""The interface of scorers of generated answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

__all__ = ["Answer", "OnTurn", "Scorer", "ScorerFailedError"]

OnTurn = Callable[[], None]
"""A callback that is called regularly; an exception that it raises ends the scoring."""


class ScorerFailedError(Exception):
    """Raised inside this package when a scorer returns no scores; the message has the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A row and the text that a model generated for it.

    Attributes:
        prompt: The text as the model saw it.
        reference: The row's own reply.
        answer: The generated text, without the end token.
    """

    prompt: str
    reference: str
    answer: str


class Scorer(Protocol):
    """The interface of scorers."""

    def __call__(self, answers: Sequence[Answer], on_turn: OnTurn) -> Sequence[float]:
        """Return a finite score for each of ``answers``, in the same order; higher is better.

        Args:
            answers: Answers of one adapter.
            on_turn: Called regularly; an exception that it raises ends the scoring.

        Raises:
            ScorerFailedError: The scorer returns no such scores.
        """
        ...
