"""Work whose failure does not end a task: errors of the caller's own function are told from those of the work."""

from __future__ import annotations

from alto.errors import AltoError
from alto.evaluation.scorers import OnTurn, ScorerFailedError

__all__ = ["Guard", "failure_text"]

_MAX_REASON_CHARS = 500


class Guard:
    """Calls a function, and remembers what it raises.

    Attributes:
        raised: The latest error of the function; None where it raised none.
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
    """The message of an error in one line, of 500 characters at most."""
    text = str(error) if isinstance(error, AltoError | ScorerFailedError) else f"{type(error).__name__}: {error}"
    text = " ".join(text.split())
    return text if len(text) <= _MAX_REASON_CHARS else text[: _MAX_REASON_CHARS - 1] + "…"
