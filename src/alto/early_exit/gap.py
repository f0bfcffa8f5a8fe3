"""Pattern *overfitting* as the paper's Algorithm 1 tests it: validation loss is far above training loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from alto.early_exit.rule import Evidence, magnitude, verdict_in_a_row
from alto.records import ExitDecision, ExitReason, LossPoint
from alto.spec.rules import GapSettings, Rule

__all__ = ["OverfittingGap"]


class OverfittingGap(GapSettings, Rule):
    """End a job whose validation loss lies too far above its training loss (Algorithm 1, pattern 2).

    The condition: ``(validation_loss - train_ema) / magnitude(train_ema) > tau_gap``, at ``overfitting_patience``
    evaluations in a row; a training loss near zero cannot blow the ratio up.
    """

    reason: ClassVar[str] = ExitReason.OVERFITTING

    def judge(self, history: Sequence[LossPoint]) -> ExitDecision | None:
        """Return the verdict for the last point of ``history``."""
        return verdict_in_a_row(history, self._lies_apart, patience=self.overfitting_patience, reason=self.reason)

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
