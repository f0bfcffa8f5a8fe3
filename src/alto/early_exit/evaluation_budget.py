"""Sets when jobs are evaluated, and on how many validation rows, for a stated share of the time of training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from alto.records import Rung
from alto.spec.early_exit import EarlyExit
from alto.spec.rungs import places_at

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

FEW_JOBS = 8
"""At a rung that more jobs reach, the worst of them are far behind, and fewer rows tell them."""

LEAST_ROWS_OF_MANY, LEAST_ROWS_OF_FEW, LEAST_ROWS, LEAST_PAIRS = 6, 16, 12, 32
"""Fewest validation rows at a rung that many or few jobs reach, where jobs are compared on the same rows, and after the
rungs; fewest pairs anywhere, as losses of pairs tell less."""


def budgeted(
    settings: EarlyExit,
    *,
    num_jobs: int,
    num_rows: int,
    row_cost: float,
    every: float,
    are_pairs: bool = False,
    drops_rungs: bool = True,
) -> EarlyExit:
    """Return ``settings`` with the evaluations that its ``evaluation_share`` pays for.

    At a rung a job is evaluated for a share of the time that it has trained since the rung before. After the last rung
    it is evaluated as often as the share pays for the fewest rows. In the end, the best jobs are measured for a share
    of the whole time of training. The fewest rows that tell jobs apart are evaluated even beyond the share.

    Args:
        settings: Early exit with explicit rungs.
        num_jobs: Jobs that reach the first rung.
        num_rows: Validation rows.
        row_cost: Time to evaluate one row over the time to train one job to its end.
        every: Smallest share of a job's steps between two evaluations after the last rung.
        are_pairs: Whether rows are pairs of replies.
        drops_rungs: Leave out a rung whose evaluations take longer than the jobs that it ends would train until the
            next.
    """
    share = settings.evaluation_share
    assert share != "all", "there is a share to keep to"
    share_at_end = SHARE_AT_END * share
    share -= share_at_end

    def affordable(time: float, least: int) -> int:
        """Rows that can be evaluated in ``time``; at least ``least``, at most all."""
        return min(max(math.floor(time / row_cost), LEAST_PAIRS if are_pairs else least), num_rows)

    rungs: list[Rung] = []
    evaluations: list[tuple[float, int]] = []
    before, num_left, keep, training = 0.0, num_jobs, 1.0, 0.0
    given = settings.selection_rungs if settings.select else ()
    ends = (*(rung.progress for rung in given[1:]), 1.0)
    for index, (rung, until) in enumerate(zip(given, ends, strict=False)):
        num_kept = places_at(given, index, num_jobs)
        least = LEAST_ROWS_OF_MANY if num_left > FEW_JOBS else LEAST_ROWS_OF_FEW
        rows = affordable(share * (rung.progress - before), least)
        keep *= rung.keep
        if drops_rungs and (num_left - num_kept) * (until - rung.progress) <= num_left * rows * row_cost:
            continue
        rungs.append(replace(rung, keep=keep))
        evaluations.append((rung.progress, rows))
        training += num_left * (rung.progress - before)
        before, num_left, keep = rung.progress, num_kept, 1.0
    training += num_left * (1.0 - before)
    least_time = affordable(0.0, LEAST_ROWS) * row_cost
    count = max(1, math.floor((1.0 - before) / max(every, least_time / share) + 1e-9))
    spacing = (1.0 - before) / count
    rows = affordable(share * spacing, LEAST_ROWS)
    evaluations += [(before + number * spacing, rows) for number in range(1, count)]
    final_rows = affordable(share_at_end * training, LEAST_ROWS)
    final_jobs = math.floor(share_at_end * training / (final_rows * row_cost))
    return settings.replace(
        evaluations=(*evaluations, (1.0, rows)),
        final_evaluations=(min(max(final_jobs, 1), MOST_MEASURED), final_rows),
        **(_as_settings(rungs, num_jobs) if drops_rungs else {}),
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
