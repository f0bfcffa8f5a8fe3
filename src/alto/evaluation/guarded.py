"""Support for work whose failure must not end a task, while errors of the caller's callback must be raised."""

from __future__ import annotations

from alto.errors import AltoError
from alto.evaluation.scorers import OnTurn, ScorerFailedError

__all__ = ["Guard", "failure_text"]

_MAX_REASON_CHARS = 500


class Guard:
    """A wrapper of a callback that remembers the callback's latest exception.

    Attributes:
        raised: The latest exception of the callback; None if it raised none.
    """

    def __init__(self, on_turn: OnTurn) -> None:
        self._on_turn = on_turn
        self.raised: BaseException | None = None

    def __call__(self) -> None:
        try:
            self._on_turn()
        except BaseException as error:
            self.raised = error
            raise


def failure_text(error: Exception) -> str:
    """Return the message of ``error`` in one line of at most 500 characters."""
    text = str(error) if isinstance(error, AltoError | ScorerFailedError) else f"{type(error).__name__}: {error}"
    text = " ".join(text.split())
    return text if len(text) <= _MAX_REASON_CHARS else text[: _MAX_REASON_CHARS - 1] + "…"
