"""Converts shares of a job's steps: to the steps of its evaluations, and to its loss at a share."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from alto.early_exit.noise import on_scale_of
from alto.errors import SpecError
from alto.records import LossPoint, Rung, StartValue
from alto.spec import LEAST_SCORE, ceil_fraction, rung_step

# An evaluation counts as at the rung if it is closer than this, relative to the distance of the two around the rung.
_EXACT = 1e-9


def point_at_fraction(
    history: Sequence[LossPoint],
    rung: Rung,
    total_steps: int,
    start: StartValue | None,
    row_weights: Sequence[float] = (),
) -> LossPoint | None:
    """Return the value of a job after exactly ``rung.progress`` of its steps; None if no evaluation has reached it.

    A job is evaluated after whole steps, and with large batches the first evaluation at or after the rung may be far
    behind it. So the loss (and the score) is interpolated between the two evaluations around the rung: linear in the
    logarithm of the steps, because loss curves nearly are; before the first evaluation, linear in the steps from
    ``start``. If there is no earlier value, or if one of the two is not finite, the later evaluation is returned. The
    earlier value is first put on the scale of the later evaluation, whose loss rows the result has. Rows of a score are
    interpolated like their mean; if one side has none, the result has none.

    Args:
        history: Evaluations of one job, oldest first.
        start: Evaluation before the first step; None if unknown, for example if a job begins with another job's
            weights.
        row_weights: Weight of every validation row, in the order of evaluation; empty if all evaluations are on all
            rows.
    """
    reached = rung_step(rung, total_steps)
    index = next((index for index, point in enumerate(history) if point.step >= reached), None)
    if index is None:
        return None
    point, exact = history[index], rung.progress * total_steps
    if index:
        before = history[index - 1]
        near: LossPoint | StartValue | None = before
        fraction = math.log(exact / before.step) / math.log(point.step / before.step)
    else:
        near, fraction = start, exact / point.step
    if near is None or fraction >= 1.0 - _EXACT:
        return point
    near = on_scale_of(point, near, row_weights)
    loss = _between(near.validation_loss, point.validation_loss, fraction)
    if not math.isfinite(loss):
        return point
    if LEAST_SCORE in (near.score, point.score):
        return replace(point, validation_loss=loss)
    rows: tuple[float, ...] = ()
    if len(near.score_rows) == len(point.score_rows):
        rows = tuple(_between(old, new, fraction) for old, new in zip(near.score_rows, point.score_rows, strict=True))
    return replace(point, validation_loss=loss, score=_between(near.score, point.score, fraction), score_rows=rows)


def _between(old: float, new: float, fraction: float) -> float:
    return old + fraction * (new - old)


def rung_notes(rungs: Sequence[Rung], *, lr_warmup: float, earliest: float) -> tuple[str, ...]:
    """Return notices about rungs that come early in the longest learning-rate warmup.

    Args:
        rungs: Rungs of the task that may end a job.
        lr_warmup: Largest share of a job's steps in which the learning rate rises.
        earliest: Share of the steps before which jobs cannot be compared.
    """
    if not rungs or lr_warmup <= 0 or rungs[0].progress > earliest:
        return ()
    first = rungs[0].progress
    rises = f"The learning rate of a job rises for {100 * lr_warmup:.3g} % of its steps"
    if first == earliest:
        return (
            f"{rises}, so no job ends as underperforming before {100 * first:.3g} %; to save more, shorten "
            "warmup_steps or warmup_ratio of the jobs with the longest warmup, or set early_exit.rungs.",
        )
    return (
        f"{rises}, and the rung at {100 * first:.3g} % ranks it before {100 * earliest:.3g} %, from where on jobs can "
        "be compared; use a later rung, or give all jobs the same warmup.",
    )


def evaluation_steps(total_steps: int, every: float, rungs: Iterable[Rung]) -> tuple[int, ...]:
    """Return the numbers of steps after which a job is evaluated, in increasing order and without duplicates.

    They are the fractions ``every``, ``2 * every``, … of the job's own steps, rounded up, the step of every rung, and
    the last step. So jobs of different lengths are compared at equal progress, and a rung always has a fresh value.

    Args:
        every: Fraction of the steps between two evaluations, in (0, 1].
    """
    if not 0.0 < every <= 1.0:
        raise SpecError(
            f"evaluate every: expected a fraction of a job's steps in (0, 1], found {every}."
            " 0.05 evaluates a job twenty times."
        )
    if every * total_steps <= 1.0:
        return tuple(range(1, total_steps + 1))
    regular = (ceil_fraction(count * every, total_steps) for count in range(1, math.ceil(1.0 / every) + 1))
    steps = {min(step, total_steps) for step in regular}
    steps.update(rung_step(rung, total_steps) for rung in rungs)
    steps.add(total_steps)
    return tuple(sorted(steps))
