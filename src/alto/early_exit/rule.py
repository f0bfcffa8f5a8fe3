"""What every online rule shares: its interface, and counting how often in a row its condition held."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from alto.errors import SpecError
from alto.records import ExitDecision, ExitReason, LossPoint

__all__ = ["Evidence", "Rule", "check_at_least", "check_positive", "magnitude", "verdict_in_a_row"]

# Below a thousandth of a nat a model is certain of every token, or of which reply of every pair is preferred, and
# ratios of losses say nothing.
SMALLEST_LOSS = 1e-3

Evidence = Mapping[str, float]


class Rule(Protocol):
    """A pure verdict on one job: same history, same verdict."""

    def judge(self, history: Sequence[LossPoint]) -> ExitDecision | None:
        """The verdict for the last point of ``history`` (one job, oldest first), or None to train on."""
        ...


def verdict_in_a_row(
    history: Sequence[LossPoint],
    holds: Callable[[Sequence[LossPoint]], Evidence | None],
    *,
    patience: int,
    reason: ExitReason,
) -> ExitDecision | None:
    """End the job if a condition holds at its last ``patience`` evaluations.

    Args:
        history: Evaluations of one job, oldest first.
        holds: The condition as of the last point of the history it is given: its evidence, or None where it fails.
        patience: Evaluations in a row at which it must hold; one failure starts the count anew.
        reason: The reason of the verdict. Its evidence is that of the last point.
    """
    if len(history) < patience:
        return None
    evidence = holds(history)
    if evidence is None or any(holds(history[: len(history) - back]) is None for back in range(1, patience)):
        return None
    last = history[-1]
    return ExitDecision(job=last.job, step=last.step, reason=reason, evidence={**evidence, "in_a_row": patience})


def magnitude(loss: float) -> float:
    """What changes of ``loss`` are measured against: its size, which is never taken for less than 0.001 nats."""
    return max(abs(loss), SMALLEST_LOSS)


def check_positive(name: str, value: float) -> None:
    """Raise `SpecError` unless ``value`` is a finite number above zero."""
    if not 0.0 < value < float("inf"):
        raise SpecError(f"{name}: expected a finite number above 0, found {value}. Correct it or use the default.")


def check_at_least(name: str, value: float, least: float) -> None:
    """Raise `SpecError` unless ``value`` is finite and at least ``least``."""
    if not least <= value < float("inf"):
        raise SpecError(f"{name}: expected at least {least}, found {value}. Correct it or use the default.")
