"""A loss that is NaN or infinite ends a job at once, under every policy."""

from __future__ import annotations

import math

from alto.records import ExitDecision, ExitReason, LossPoint

__all__ = ["judge_point", "judge_step_loss"]


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
