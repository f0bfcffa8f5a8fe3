"""Patterns that end a job: divergence, a gap to the training loss, an upturn, a non-finite loss, collapsed rewards."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

from alto.records import ExitDecision, ExitReason, LossPoint
from alto.spec import CollapseSettings, DivergenceSettings, GapSettings, Rule, UpturnSettings

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
        holds: Function that tests the condition at the last point of a history, and returns its evidence, or None if it
            does not hold.
        patience: Number of evaluations in a row at which it must hold; one failure resets the count.
        reason: The reason of the verdict (:attr:`Rule.reason`). Its evidence comes from the last point, and
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


def judge_step_loss(job: str, step: int, loss: float) -> ExitDecision | None:
    """End ``job`` as diverging if the training loss of its step ``step`` is not finite."""
    if math.isfinite(loss):
        return None
    return ExitDecision(job=job, step=step, reason=ExitReason.DIVERGING, evidence={"train_loss": loss})


def judge_point(point: LossPoint) -> ExitDecision | None:
    """End a job as diverging if its validation loss or its smoothed training loss is not finite."""
    if math.isfinite(point.validation_loss) and math.isfinite(point.train_ema):
        return None
    evidence = {"validation_loss": point.validation_loss, "train_ema": point.train_ema}
    return ExitDecision(job=point.job, step=point.step, reason=ExitReason.DIVERGING, evidence=evidence)


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


class OverfittingGap(GapSettings, Rule):
    """End a job whose validation loss lies too far above its training loss (Algorithm 1, pattern 2).

    The condition: ``(validation_loss - train_ema) / magnitude(train_ema) > tau_gap``, at ``overfitting_patience``
    evaluations in a row; a training loss near zero cannot blow the ratio up.
    """

    reason: ClassVar[str] = ExitReason.OVERFITTING

    def judge(self, history: Sequence[LossPoint]) -> ExitDecision | None:
        """Return the verdict for the last point of ``history``."""
        return verdict_in_a_row(history, self._has_gap, patience=self.overfitting_patience, reason=self.reason)

    def _has_gap(self, history: Sequence[LossPoint]) -> Evidence | None:
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

    ``tau_upturn`` is a minimum for smooth curves. If jobs only fluctuate around a plateau for twenty evaluations, two
    in three continue with a ``tau_noise`` of 3, one in three with 2, and none with 0.
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


CERTAIN = 0.001
"""Entropy in nats per token below which sampled completions are practically always the same."""

MOSTLY, ALMOST_ALL = 0.5, 0.95


class Collapse(CollapseSettings, Rule):
    """End a job that learns from rewards and has stopped learning.

    The condition holds if one of these was true at each of the last ``collapse_patience`` steps:

    - the completions of each prompt had equal rewards, so nothing was trained;
    - the entropy of the sampled tokens was below 0.001 nats, so all completions of a prompt are the same;
    - at least 95 % of the completions did not end, while at most half did not end in as many steps at the start, and
      the mean reward is lower than then.
    """

    reason: ClassVar[str] = ExitReason.COLLAPSED

    def judge(self, history: Sequence[LossPoint]) -> ExitDecision | None:
        """Return the verdict for the last point of ``history``."""
        names = history[-1].step_metrics if history else ()
        found = self._collapsed(
            {name: [value for point in history for value in point.step_metrics.get(name, ())] for name in names}
        )
        if found is None:
            return None
        last = history[-1]
        evidence = {**found, "in_a_row": self.collapse_patience}
        return ExitDecision(job=last.job, step=last.step, reason=self.reason, evidence=evidence)

    def _collapsed(self, metrics: Mapping[str, Sequence[float]]) -> Evidence | None:
        size = self.collapse_patience
        if not {"equal_groups", "entropy", "truncated", "reward"} <= metrics.keys() or len(metrics["reward"]) < size:
            return None
        last = {name: values[-size:] for name, values in metrics.items()}
        reward = statistics.fmean(last["reward"])
        if min(last["equal_groups"]) == 1.0:
            return {"equal_groups": 1.0, "reward": reward}
        if max(last["entropy"]) < CERTAIN:
            return {"entropy": statistics.fmean(last["entropy"]), "reward": reward}
        first = {name: statistics.fmean(values[:size]) for name, values in metrics.items()}
        if min(last["truncated"]) >= ALMOST_ALL and first["truncated"] <= MOSTLY and reward < first["reward"]:
            return {"truncated": statistics.fmean(last["truncated"]), "reward": reward, "first_reward": first["reward"]}
        return None


def validation_noise(history: Sequence[LossPoint]) -> float | None:
    """Estimate the standard deviation of the validation loss around its own trend; None below three points.

    The residual of each inner point is its distance from the straight line between its two neighbors, with the steps
    as abscissa because rungs make them uneven. For independent noise of deviation ``s`` on a straight trend and a point
    at share ``u`` of the way between its neighbors, the residual has deviation ``s * sqrt(1 + u² + (1 - u)²)``; it is
    divided by that root. The estimate is the median of the absolute residuals, so the few large ones of a steep start
    do not count. Bends of the trend add to it, which makes it larger than the noise, never smaller.
    """
    residuals = []
    for before, point, after in zip(history, history[1:], history[2:], strict=False):
        fraction = (point.step - before.step) / (after.step - before.step)
        on_the_line = before.validation_loss + fraction * (after.validation_loss - before.validation_loss)
        unit = math.sqrt(1.0 + fraction**2 + (1.0 - fraction) ** 2)
        residuals.append(abs(point.validation_loss - on_the_line) / unit)
    return statistics.median(residuals) / MEDIAN_OF_NORMAL if residuals else None
