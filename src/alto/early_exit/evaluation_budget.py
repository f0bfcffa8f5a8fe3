"""Sets when jobs are evaluated, and on how many validation rows, for a stated share of the time of training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from alto.records import Rung
from alto.spec.early_exit import EarlyExit
from alto.spec.rungs import places_at

__all__ = ["LEAST_PAIRS", "LEAST_ROWS", "LEAST_RUNG_ROWS", "MOST_MEASURED", "budgeted"]

MOST_MEASURED = 3
"""Most jobs whose best adapters are measured in the end."""

LEAST_RUNG_ROWS, LEAST_ROWS, LEAST_PAIRS = 6, 12, 64
"""Fewest validation rows at a rung, where jobs are compared on the same rows, and elsewhere; fewest pairs anywhere, as
losses of pairs tell less. Source: replay on the recorded sweeps."""


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

    At a rung a job is evaluated for that share of the time that it has trained since the rung before. After the last
    rung it is evaluated as often as the share pays for the fewest rows.

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

    least_at_rung, least_rows = (LEAST_PAIRS, LEAST_PAIRS) if are_pairs else (LEAST_RUNG_ROWS, LEAST_ROWS)

    def affordable(training: float, least: int) -> int:
        """Rows that a job can be evaluated on for this time of training; at least ``least``, at most all."""
        return min(max(math.floor(share * training / row_cost), least), num_rows)

    rungs: list[Rung] = []
    evaluations: list[tuple[float, int]] = []
    before, num_left, keep, training = 0.0, num_jobs, 1.0, 0.0
    given = settings.selection_rungs if settings.select else ()
    ends = (*(rung.progress for rung in given[1:]), 1.0)
    for index, (rung, until) in enumerate(zip(given, ends, strict=False)):
        num_kept = places_at(given, index, num_jobs)
        rows = affordable(rung.progress - before, least_at_rung)
        keep *= rung.keep
        if drops_rungs and (num_left - num_kept) * (until - rung.progress) <= num_left * rows * row_cost:
            continue
        rungs.append(replace(rung, keep=keep))
        evaluations.append((rung.progress, rows))
        training += num_left * (rung.progress - before)
        before, num_left, keep = rung.progress, num_kept, 1.0
    training += num_left * (1.0 - before)
    count = max(1, math.floor((1.0 - before) / max(every, least_rows * row_cost / share) + 1e-9))
    spacing = (1.0 - before) / count
    evaluations += [(before + number * spacing, affordable(spacing, least_rows)) for number in range(1, count)]
    final_rows = affordable(training, least_rows)
    return settings.replace(
        evaluations=(*evaluations, (1.0, affordable(spacing, least_rows))),
        final_evaluations=(
            min(max(math.floor(share * training / (final_rows * row_cost)), 1), MOST_MEASURED),
            final_rows,
        ),
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
