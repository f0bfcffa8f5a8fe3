"""Sets when jobs are evaluated, and on how many validation rows, for a stated share of the time of training."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import truediv
from typing import Any, Self

from alto.records import Rung
from alto.spec.early_exit import EarlyExit
from alto.spec.rungs import places_at, rung_step

__all__ = [
    "FEW_JOBS",
    "LEAST_PAIRS",
    "LEAST_ROWS",
    "LEAST_ROWS_OF_FEW",
    "LEAST_ROWS_OF_MANY",
    "MOST_MEASURED",
    "SHARE_AT_END",
    "budgeted",
]

# Source of the numbers below: replay on the recorded sweeps (benchmarks/policies/times.py).

SHARE_AT_END = 0.4
"""Part of the evaluation share that is kept for measuring the best adapters in the end."""

MOST_MEASURED = 2
"""Most jobs whose best adapters are measured in the end."""

FEW_JOBS, SHARE_OF_FEW = 8, 0.4
"""At a rung that more jobs reach, the worst of them are far behind, and fewer rows tell them. Up to so many jobs are
told apart on more rows, as far as this share of the time that they have trained pays for that."""

LEAST_ROWS_OF_MANY, LEAST_ROWS_OF_FEW, LEAST_ROWS, LEAST_PAIRS = 6, 16, 12, 32
"""Fewest validation rows at a rung that many or few jobs reach, where jobs are compared on the same rows, and after the
rungs; fewest pairs anywhere, as losses of pairs tell less."""


def budgeted(
    settings: EarlyExit,
    *,
    steps: Sequence[int],
    num_rows: int,
    row_cost: float,
    every: float,
    are_pairs: bool = False,
    drops_rungs: bool = True,
) -> EarlyExit:
    """Return ``settings`` with the evaluations that its ``evaluation_share`` pays for.

    At a rung a job is evaluated for a share of the time that it has trained since the rung before. After the last rung
    it is evaluated as often as the share pays for the fewest rows. In the end, the best jobs are measured for a share
    of the whole time of training; one of them on all rows where the whole share would pay for that. The fewest rows
    that tell jobs apart are evaluated even beyond the share.

    Args:
        settings: Early exit with explicit rungs.
        steps: Steps of every job that reaches the first rung.
        num_rows: Validation rows.
        row_cost: Time to evaluate one row over the time to train one job to its end.
        every: Smallest share of a job's steps between two evaluations after the last rung.
        are_pairs: Whether rows are pairs of replies.
        drops_rungs: Keep those rungs alone with which training and evaluations take the least time.
    """
    total_share = settings.evaluation_share
    assert total_share != "all", "there is a share to keep to"
    share_at_end = SHARE_AT_END * total_share
    share = total_share - share_at_end

    def affordable(time: float, least: int) -> int:
        """Rows that can be evaluated in ``time``; at least ``least``, at most all."""
        return min(max(math.floor(time / row_cost + 1e-9), LEAST_PAIRS if are_pairs else least), num_rows)

    given = settings.selection_rungs if settings.select else ()
    places = [places_at(given, index, len(steps)) for index in range(len(given))]
    # Places are counted over all rungs, so that a rung keeps as many jobs whichever are left out before it.
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
    count = max(1, math.floor((1.0 - before) / max(every, least_time / share) + 1e-9))
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
    """Some of the rungs of a task, with evaluations.

    Attributes:
        rungs: The rungs, each with the share of jobs that it keeps of those that the one before has kept.
        evaluations: Progress and rows of each.
        training: Time of training, over the time to train one job to its end.
        time: Time of training and of evaluations at rungs.
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
        """The rungs with the numbers ``chosen`` of those that are ``given``.

        Args:
            given: All rungs.
            places: Jobs that continue from each.
            chosen: Numbers of rungs, rising.
            steps: Steps of every job that reaches the first rung; those that are left have the same mix of steps.
            share: Time of an evaluation, over the time that a job has trained since the one before.
            row_cost: Time to evaluate one row.
            affordable: Rows that can be evaluated in a time; at least so many.
        """
        evaluations: list[tuple[float, int]] = []
        at, evaluated = [0] * len(steps), [0] * len(steps)
        before, num_left, training, evaluating = 0.0, len(steps), 0.0, 0.0
        for index in chosen:
            rung, part = given[index], num_left / len(steps)
            trained = rung.progress - before
            least = min(LEAST_ROWS_OF_FEW, math.floor(SHARE_OF_FEW * trained / row_cost)) if num_left <= FEW_JOBS else 0
            rows = affordable(share * trained, max(least, LEAST_ROWS_OF_MANY))
            reached = [rung_step(rung, total) for total in steps]
            # A job that stands at the same step as at the rung before is evaluated there once.
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
    """The keys of early exit that make ``rungs``."""
    if not rungs:
        return {"select": False}
    finish = rungs[-1].progress if rungs[-1].max_kept is not None and len(rungs) > 1 else 1.0
    kept = [rung for rung in rungs if rung.progress < finish]
    return {
        "rungs": tuple((rung.progress, rung.keep if rung.max_kept is None else 1 / num_jobs) for rung in kept),
        "min_kept": tuple(rung.min_kept for rung in kept),
        "finish_from": finish,
    }
