"""Plans when jobs are evaluated, and on how many validation rows, within a given fraction of the training time."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import truediv
from typing import Any, Self

from alto.records import Rung
from alto.spec import EarlyExit, places_at, rung_step

# Source of the numbers below: replays on the recorded sweeps (benchmarks/policies/times.py).

FRACTION_AT_END = 0.4
"""Fraction of the evaluation time that is reserved for measuring the best adapters at the end."""

MOST_MEASURED = 2
"""Maximum number of jobs whose best adapters are measured at the end."""

LEAST_LATE, FRACTION_LATE = 4, 0.5
"""Minimum number of evaluations after the last rung, if they take at most ``FRACTION_LATE`` of the training time since
then. The remaining job may begin to overfit. If it were evaluated only at its end, its best checkpoint would be
lost."""

FEW_JOBS, FRACTION_FOR_FEW = 8, 0.4
"""If more jobs than ``FEW_JOBS`` reach a rung, a few rows are enough, because the worst jobs are far behind. With
``FEW_JOBS`` or fewer, the minimum is ``LEAST_ROWS_OF_FEW`` rows, if they take at most ``FRACTION_FOR_FEW`` of the
training time since the previous rung."""

LEAST_ROWS_OF_MANY = 6
"""Minimum number of validation rows at a rung that more than ``FEW_JOBS`` jobs reach."""

LEAST_ROWS_OF_FEW = 16
"""Minimum number of validation rows at a rung that at most ``FEW_JOBS`` jobs reach. All are compared on the same
rows."""

LEAST_ROWS = 12
"""Minimum number of validation rows after the last rung."""

LEAST_PAIRS = 32
"""Minimum number of pairs at any evaluation, because the loss of a pair contains less information."""


def budgeted(
    settings: EarlyExit,
    *,
    steps: Sequence[int],
    num_rows: int,
    row_cost: float,
    every: float,
    least_rows: int = 0,
    drops_rungs: bool = True,
) -> EarlyExit:
    """Return ``settings`` with the evaluations that fit into its ``evaluation_share`` of the training time.

    At a rung, the evaluation of a job may take a fraction of the time that the job has trained since the previous rung.
    After the last rung, a job is evaluated at every ``every`` of its steps, on as many rows as fit into the time since
    its previous evaluation. If not even the minimum number of rows fits, evaluations are less frequent (see
    :data:`LEAST_LATE`). At the end, the
    best jobs are measured for a fraction of the total training time; one of them is measured on all rows if
    ``evaluation_share`` of the training time is enough for all rows. The minimum number of rows is evaluated even if
    that takes longer than ``evaluation_share`` allows.

    Args:
        settings: Early exit with explicit rungs.
        steps: Steps of every job that reaches the first rung.
        row_cost: Time to evaluate one row, divided by the time to train one job to completion.
        every: Smallest fraction of a job's steps between two evaluations after the last rung.
        least_rows: Minimum number of rows of any evaluation: :data:`LEAST_PAIRS` for pairs, and ``num_rows`` if
            evaluations on some of the rows cannot be compared.
        drops_rungs: Whether to keep only the rungs with which training and evaluations take the least time.
    """
    total_share = settings.evaluation_share
    assert total_share != "all", "there is a share to keep to"
    share_at_end = FRACTION_AT_END * total_share
    share = total_share - share_at_end

    def affordable(time: float, least: int) -> int:
        """Return how many rows can be evaluated in ``time``; at least ``least`` and ``least_rows``, at most all."""
        return min(max(math.floor(time / row_cost + 1e-9), least, least_rows), num_rows)

    given = settings.selection_rungs if settings.select else ()
    places = [places_at(given, index, len(steps)) for index in range(len(given))]
    # Places are counted over all rungs, so a rung keeps the same number of jobs whichever rungs before it are left out.
    choices = itertools.chain.from_iterable(
        itertools.combinations(range(len(given)), count) for count in range(len(given), -1, -1)
    )
    plans = [
        _RungPlan.of(given, places, chosen, steps=steps, share=share, row_cost=row_cost, affordable=affordable)
        for chosen in (choices if drops_rungs else [range(len(given))])
    ]
    plan = min(plans, key=lambda plan: plan.time)
    before = plan.evaluations[-1][0] if plan.evaluations else 0.0
    least_time = affordable(0.0, LEAST_ROWS) * row_cost
    most, in_share, in_half = (
        math.floor((1.0 - before) / time + 1e-9) for time in (every, least_time / share, least_time / FRACTION_LATE)
    )
    count = max(1, min(most, max(in_share, min(LEAST_LATE, in_half))))
    spacing = (1.0 - before) / count
    rows = affordable(share * spacing, LEAST_ROWS)
    later = ((before + number * spacing, rows) for number in range(1, count))
    paid = share_at_end * plan.training
    final_rows = num_rows if num_rows * row_cost <= total_share * plan.training else affordable(paid, LEAST_ROWS)
    final_jobs = math.floor(paid / (final_rows * row_cost))
    return settings.replace(
        evaluations=(*plan.evaluations, *later, (1.0, rows)),
        final_evaluations=(min(max(final_jobs, 1), MOST_MEASURED), final_rows),
        **(_as_settings(plan.rungs, len(steps)) if drops_rungs else {}),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _RungPlan:
    """Some of the rungs of a task, with their evaluations.

    Attributes:
        rungs: The rungs, each with its ``keep`` as a fraction of the jobs kept by the previous rung.
        evaluations: Progress and number of rows of each evaluation.
        training: Training time, divided by the time to train one job to completion.
        time: Time of training and of the evaluations at rungs, in the same unit.
    """

    rungs: tuple[Rung, ...]
    evaluations: tuple[tuple[float, int], ...]
    training: float
    time: float

    @classmethod
    def of(
        cls,
        given: Sequence[Rung],
        places: Sequence[int],
        chosen: Sequence[int],
        *,
        steps: Sequence[int],
        share: float,
        row_cost: float,
        affordable: Callable[[float, int], int],
    ) -> Self:
        """Return the plan with the rungs ``chosen`` out of ``given``.

        Args:
            steps: Steps of every job that reaches the first rung; remaining jobs have the same mix of steps.
            affordable: Function that returns how many rows can be evaluated in a given time, but at least a given
                number of rows.
        """
        evaluations: list[tuple[float, int]] = []
        at, evaluated = [0] * len(steps), [0] * len(steps)
        before, num_left, training, evaluating = 0.0, len(steps), 0.0, 0.0
        for index in chosen:
            rung, part = given[index], num_left / len(steps)
            trained = rung.progress - before
            least = (
                min(LEAST_ROWS_OF_FEW, math.floor(FRACTION_FOR_FEW * trained / row_cost)) if num_left <= FEW_JOBS else 0
            )
            rows = affordable(share * trained, max(least, LEAST_ROWS_OF_MANY))
            reached = [rung_step(rung, total) for total in steps]
            # A job that is at the same step as at the rung before is evaluated only once.
            known = [rows_then * (one == other) for rows_then, one, other in zip(evaluated, reached, at, strict=True)]
            training += part * sum((one - other) / total for one, other, total in zip(reached, at, steps, strict=True))
            evaluating += part * row_cost * sum(max(rows - rows_then, 0) for rows_then in known)
            evaluations.append((rung.progress, rows))
            at, evaluated = reached, [max(rows, rows_then) for rows_then in known]
            before, num_left = rung.progress, places[index]
        training += num_left * (1.0 - statistics.fmean(map(truediv, at, steps)))
        keeps = (
            math.prod(rung.keep for rung in given[first:last])
            for first, last in itertools.pairwise((0, *(index + 1 for index in chosen)))
        )
        return cls(
            rungs=tuple(replace(given[index], keep=keep) for index, keep in zip(chosen, keeps, strict=True)),
            evaluations=tuple(evaluations),
            training=training,
            time=training + evaluating,
        )


def _as_settings(rungs: Sequence[Rung], num_jobs: int) -> dict[str, Any]:
    """Return the keys of early exit that produce ``rungs``."""
    if not rungs:
        return {"select": False}
    finish = rungs[-1].progress if rungs[-1].max_kept is not None and len(rungs) > 1 else 1.0
    kept = [rung for rung in rungs if rung.progress < finish]
    return {
        "rungs": tuple((rung.progress, rung.keep if rung.max_kept is None else 1 / num_jobs) for rung in kept),
        "min_kept": tuple(rung.min_kept for rung in kept),
        "finish_from": finish,
    }
