"""Pattern *underperforming*: at a rung the configurations are ranked and only the best continue."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from alto.early_exit.repetitions import ranked_configurations
from alto.records import ExitDecision, ExitReason, RungResult, Standing

__all__ = ["select"]


def select(
    places: int,
    standings: Collection[Standing],
    *,
    is_finish: bool = False,
    configuration_of: Mapping[str, str] | None = None,
    failed: Collection[str] = (),
) -> RungResult:
    """Keep the best ``places`` configurations of ``standings``, independent of their order; at least one.

    With ``is_finish`` a configuration whose jobs have ended takes no place of one that trains: the best of these
    continues, too.

    Configurations are ordered by :func:`alto.early_exit.repetitions.ranked_configurations`, where only jobs that repeat
    one are not each a configuration of their own: by the score of the task's metric, and within noise by the
    validation loss. Ties rank by id. A loss that is not finite ranks last and is never kept, even if places stay empty.
    All jobs of a configuration are kept or none. A job that has ended may take a place but gets no verdict.

    The evidence of a verdict is the ``rank`` of its job's configuration (1 is best), ``num_competing``, ``num_kept``,
    its ``validation_loss`` and, unless nothing was kept, ``cutoff_loss``: the loss of the last configuration kept;
    where scores differ also its ``score`` and the ``cutoff_score``; where a configuration is repeated its
    ``mean_loss``.

    Args:
        places: Configurations that continue.
        standings: Jobs that compete.
        is_finish: Whether the rung ends all but one.
        configuration_of, failed: As of ``ranked_configurations``.
    """
    ranked = ranked_configurations(standings, configuration_of or {}, failed)
    finite = [group for group in ranked if math.isfinite(group.mean.validation_loss)]
    kept = finite[: max(1, places)]
    if is_finish and not any(group.mean.is_training for group in kept):
        kept += [group for group in finite if group.mean.is_training][:1]
    has_scores = len({group.mean.score for group in ranked}) > 1
    shared = {"num_competing": float(len(ranked)), "num_kept": float(len(kept))}
    if kept:
        shared["cutoff_loss"] = kept[-1].mean.validation_loss
        if has_scores:
            shared["cutoff_score"] = kept[-1].mean.score
    kept_jobs = {member.job for group in kept for member in group.members}
    dropped = tuple(
        ExitDecision(
            job=standing.job,
            step=standing.step,
            reason=ExitReason.UNDERPERFORMING,
            evidence={
                "rank": float(rank),
                "validation_loss": standing.validation_loss,
                **({"score": standing.score} if has_scores else {}),
                **({"mean_loss": group.mean.validation_loss} if len(group.members) > 1 else {}),
                **shared,
            },
        )
        for rank, group in enumerate(ranked, start=1)
        for standing in group.members
        if standing.is_training and standing.job not in kept_jobs
    )
    return RungResult(kept=tuple(member.job for group in kept for member in group.members), dropped=dropped)
