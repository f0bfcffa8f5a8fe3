"""Pattern *underperforming*: at a rung the jobs are ranked and only the best continue."""

from __future__ import annotations

import math
from collections.abc import Collection

from alto.early_exit.noise import ordered
from alto.records import ExitDecision, ExitReason, RungResult, Standing

__all__ = ["select"]


def select(places: int, standings: Collection[Standing], *, is_finish: bool = False) -> RungResult:
    """Keep the best ``places`` of ``standings``, independent of their order; at least one.

    With ``is_finish`` a job that has ended takes no place of one that trains: the best of these continues, too.

    Jobs are ordered by :func:`alto.early_exit.noise.ordered`: by the score of the task's metric, and within noise by
    the validation loss. Ties rank by job id. A loss that is not finite ranks last and is never kept, even if places
    stay empty. A job that has ended may take a place but gets no verdict.

    The evidence of a verdict is its job's ``rank`` (1 is best), ``num_competing``, ``num_kept``, its
    ``validation_loss`` and, unless no job was kept, ``cutoff_loss``: the loss of the last job kept; where scores differ
    also its ``score`` and the ``cutoff_score``.
    """
    ranked = ordered(standings)
    num_finite = sum(math.isfinite(standing.validation_loss) for standing in ranked)
    num_kept = min(max(1, places), num_finite)
    kept = ranked[:num_kept]
    if is_finish and not any(standing.is_training for standing in kept):
        finite = ranked[:num_finite]
        kept += [standing for standing in finite if standing.is_training][:1]
    kept_jobs = {standing.job for standing in kept}
    has_scores = len({standing.score for standing in ranked}) > 1
    shared = {"num_competing": float(len(ranked)), "num_kept": float(len(kept))}
    if kept:
        shared["cutoff_loss"] = kept[-1].validation_loss
        if has_scores:
            shared["cutoff_score"] = kept[-1].score
    dropped = tuple(
        ExitDecision(
            job=standing.job,
            step=standing.step,
            reason=ExitReason.UNDERPERFORMING,
            evidence={
                "rank": float(rank),
                "validation_loss": standing.validation_loss,
                **({"score": standing.score} if has_scores else {}),
                **shared,
            },
        )
        for rank, standing in enumerate(ranked, start=1)
        if standing.is_training and standing.job not in kept_jobs
    )
    return RungResult(kept=tuple(standing.job for standing in kept), dropped=dropped)
