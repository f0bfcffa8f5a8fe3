"""Pattern *diverging*: training and validation loss both rise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from alto.early_exit.rule import Evidence, verdict_in_a_row
from alto.records import ExitDecision, ExitReason, LossPoint
from alto.spec.rules import DivergenceSettings, Rule

__all__ = ["Divergence", "slope"]


class Divergence(DivergenceSettings, Rule):
    """End a job whose smoothed training loss and validation loss rise together (Algorithm 1, pattern 1).

    The condition: the least-squares slopes of the last ``window`` smoothed training losses and of the last ``window``
    validation losses, both sampled at evaluations, are at least ``tau_slope`` (in units of the loss per evaluation). It
    must hold at ``divergence_patience`` evaluations in a row. Before ``window`` evaluations there is no slope and the
    condition does not hold.
    """

    reason: ClassVar[str] = ExitReason.DIVERGING

    def judge(self, history: Sequence[LossPoint]) -> ExitDecision | None:
        """Return the verdict for the last point of ``history``."""
        return verdict_in_a_row(history, self._rises, patience=self.divergence_patience, reason=self.reason)

    def _rises(self, history: Sequence[LossPoint]) -> Evidence | None:
        if len(history) < self.window:
            return None
        recent = history[-self.window :]
        train_slope = slope([point.train_ema for point in recent])
        validation_slope = slope([point.validation_loss for point in recent])
        # Written as "both rise" so that a NaN slope, which compares False, never counts as rising.
        if not (train_slope >= self.tau_slope and validation_slope >= self.tau_slope):
            return None
        return {"train_slope": train_slope, "validation_slope": validation_slope, "tau_slope": self.tau_slope}


def slope(values: Sequence[float]) -> float:
    """Return the least-squares slope of ``values`` (two or more) over positions 0, 1, …; exactly 0 for equal values."""
    centre = (len(values) - 1) / 2
    # Values are taken relative to the first one, so that rounding gives equal values no slope.
    rise = sum((position - centre) * (value - values[0]) for position, value in enumerate(values))
    return rise / sum((position - centre) ** 2 for position in range(len(values)))
