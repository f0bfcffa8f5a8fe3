"""Pattern *overfitting* as the paper's Algorithm 1 tests it: validation and training loss lie apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from alto.early_exit.rule import Evidence, check_at_least, check_positive, magnitude, verdict_in_a_row
from alto.records import ExitDecision, ExitReason, LossPoint

__all__ = ["OverfittingGap"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OverfittingGap:
    """End a job whose validation loss lies too far above its training loss (Algorithm 1, pattern 2).

    The condition: ``(validation_loss - train_ema) / magnitude(train_ema) > tau_gap``, at ``patience`` evaluations in a
    row; a training loss near zero cannot blow the ratio up.

    Attributes:
        patience: Evaluations in a row, at least 1.
        tau_gap: Relative gap, above 0.
    """

    patience: int = 2
    tau_gap: float = 0.1

    def __post_init__(self) -> None:
        check_at_least("overfitting_patience", self.patience, 1)
        check_positive("tau_gap", self.tau_gap)

    def judge(self, history: Sequence[LossPoint]) -> ExitDecision | None:
        """The verdict for the last point of ``history``."""
        return verdict_in_a_row(history, self._lies_apart, patience=self.patience, reason=ExitReason.OVERFITTING)

    def _lies_apart(self, history: Sequence[LossPoint]) -> Evidence | None:
        last = history[-1]
        gap = (last.validation_loss - last.train_ema) / magnitude(last.train_ema)
        if not gap > self.tau_gap:
            return None
        return {
            "gap": gap,
            "tau_gap": self.tau_gap,
            "validation_loss": last.validation_loss,
            "train_ema": last.train_ema,
        }
