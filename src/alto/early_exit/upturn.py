"""Pattern *overfitting* as ALTO tests it by default: validation loss has turned upward."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import ClassVar

from alto.early_exit.rule import Evidence, magnitude, verdict_in_a_row
from alto.records import ExitDecision, ExitReason, LossPoint
from alto.spec.rules import Rule, UpturnSettings

__all__ = ["OverfittingUpturn", "validation_noise"]

# The median absolute value of a normal variable is this share of its standard deviation.
MEDIAN_OF_NORMAL = 0.6745


class OverfittingUpturn(UpturnSettings, Rule):
    """End a job whose validation loss has risen over its best by more than its own noise.

    With ``best`` the lowest validation loss and ``noise`` the `validation_noise` of all evaluations before the one
    judged, the condition is::

        validation_loss - best > max(tau_upturn * magnitude(best), tau_noise * noise)

    at ``overfitting_patience`` evaluations in a row. With fewer than three earlier evaluations the noise is unknown and
    the condition does not hold. Training loss plays no part: on small data it runs far below a validation loss that
    still falls.

    ``tau_upturn`` is a minimum for smooth curves. Of jobs that only fluctuate around a plateau for twenty evaluations,
    a ``tau_noise`` of 3 lets two in three continue, 2 lets one in three, and 0 lets none.
    """

    reason: ClassVar[str] = ExitReason.OVERFITTING

    def judge(self, history: Sequence[LossPoint]) -> ExitDecision | None:
        """Return the verdict for the last point of ``history``."""
        return verdict_in_a_row(history, self._turned_up, patience=self.overfitting_patience, reason=self.reason)

    def _turned_up(self, history: Sequence[LossPoint]) -> Evidence | None:
        last = history[-1]
        earlier = [point for point in history[:-1] if math.isfinite(point.validation_loss)]
        noise = validation_noise(earlier)
        if noise is None:
            return None
        best = min(point.validation_loss for point in earlier)
        rise = last.validation_loss - best
        margin = max(self.tau_upturn * magnitude(best), self.tau_noise * noise)
        if not rise > margin:
            return None
        return {
            "rise": rise,
            "margin": margin,
            "noise": noise,
            "validation_loss": last.validation_loss,
            "best_validation_loss": best,
        }


def validation_noise(history: Sequence[LossPoint]) -> float | None:
    """Estimate the standard deviation of the validation loss around its own trend; None below three points.

    The residual of each inner point is its distance from the straight line between its two neighbours, with the steps
    as abscissa because rungs make them uneven. For independent noise of deviation ``s`` on a straight trend and a point
    at share ``u`` of the way between its neighbours, the residual has deviation ``s * sqrt(1 + u² + (1 - u)²)``; it is
    divided by that root. The estimate is the median of the absolute residuals, so the few large ones of a steep start
    do not count. Bends of the trend add to it, which makes it larger than the noise, never smaller.
    """
    residuals = []
    for before, point, after in zip(history, history[1:], history[2:], strict=False):
        share = (point.step - before.step) / (after.step - before.step)
        on_the_line = before.validation_loss + share * (after.validation_loss - before.validation_loss)
        unit = math.sqrt(1.0 + share**2 + (1.0 - share) ** 2)
        residuals.append(abs(point.validation_loss - on_the_line) / unit)
    return statistics.median(residuals) / MEDIAN_OF_NORMAL if residuals else None
