"""Common parts of online rules: counts how often in a row a condition held, and gives the scale of loss changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from alto.records import ExitDecision, LossPoint

__all__ = ["Evidence", "magnitude", "verdict_in_a_row"]

# With a loss below a thousandth of a nat, a model is certain of every token, or of the preferred reply of every pair,
# and ratios of losses have no meaning.
SMALLEST_LOSS = 1e-3

Evidence = Mapping[str, float]


def verdict_in_a_row(
    history: Sequence[LossPoint],
    holds: Callable[[Sequence[LossPoint]], Evidence | None],
    *,
    patience: int,
    reason: str,
) -> ExitDecision | None:
    """End the job if a condition holds at its last ``patience`` evaluations.

    Args:
        history: Evaluations of one job, oldest first.
        holds: Function that tests the condition at the last point of a history, and returns its evidence, or None if it
            does not hold.
        patience: Number of evaluations in a row at which it must hold; one failure resets the count.
        reason: The reason of the verdict (:attr:`Rule.reason`). Its evidence is that of the last point, and
            ``in_a_row``.
    """
    if len(history) < patience:
        return None
    evidence = holds(history)
    if evidence is None or any(holds(history[: len(history) - back]) is None for back in range(1, patience)):
        return None
    last = history[-1]
    return ExitDecision(job=last.job, step=last.step, reason=reason, evidence={**evidence, "in_a_row": patience})


def magnitude(loss: float) -> float:
    """Return the scale of changes of ``loss``: its absolute value, at least 0.001 nats."""
    return max(abs(loss), SMALLEST_LOSS)
