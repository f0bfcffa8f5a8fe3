"""Pattern *underperforming*: at a rung the jobs are ranked and only the best share goes on."""

from __future__ import annotations

import math
from collections.abc import Sequence

from alto.early_exit.progress import ceil_share
from alto.records import ExitDecision, ExitReason, Rung, Selection, Standing

__all__ = ["select"]


def select(rung: Rung, standings: Sequence[Standing]) -> Selection:
    """Keep the best ``ceil(rung.keep * len(standings))`` jobs by their score, whatever order they come in.

    Ties rank by job id. A loss that is not finite ranks last and is never kept, even if places stay empty. A job that
    has ended may take a place but gets no verdict.

    The evidence of a verdict is its job's ``rank`` (1 is best), ``num_competing``, ``num_kept``, its
    ``validation_loss`` and, unless nobody was kept, ``cutoff_loss``: the loss of the last job kept; where gains differ
    also its ``gain`` and the ``cutoff_gain``.
    """
    ranked = sorted(standings, key=_rank_key)
    num_finite = sum(math.isfinite(standing.validation_loss) for standing in ranked)
    num_kept = min(max(1, ceil_share(rung.keep, len(ranked))), num_finite)
    kept = ranked[:num_kept]
    has_gains = len({standing.gain for standing in ranked}) > 1
    shared = {"num_competing": float(len(ranked)), "num_kept": float(num_kept)}
    if kept:
        shared["cutoff_loss"] = kept[-1].validation_loss
        if has_gains:
            shared["cutoff_gain"] = kept[-1].gain
    dropped = tuple(
        ExitDecision(
            job=standing.job,
            step=standing.step,
            reason=ExitReason.UNDERPERFORMING,
            evidence={
                "rank": float(rank),
                "validation_loss": standing.validation_loss,
                **({"gain": standing.gain} if has_gains else {}),
                **shared,
            },
        )
        for rank, standing in enumerate(ranked[num_kept:], start=num_kept + 1)
        if standing.is_training
    )
    return Selection(kept=tuple(standing.job for standing in kept), dropped=dropped)


def _rank_key(standing: Standing) -> tuple[bool, tuple[float, float], str]:
    finite = math.isfinite(standing.validation_loss)
    # NaN would leave the order to chance, so every non-finite loss ranks alike behind the finite ones.
    return (not finite, standing.score if finite else (0.0, 0.0), standing.job)
