"""Pattern *underperforming*: at a rung the configurations are ranked and only the best continue."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping

from alto.early_exit.repetitions import Repeated, ranked_configurations
from alto.records import ExitDecision, ExitReason, RungResult, Standing

__all__ = ["select"]

CLEAR_ERRORS, CLEAR_SHARE = 3.0, 0.05
"""Number of standard errors, and share of the first one's improvement, by which a clear loser is behind."""


def select(
    places: int,
    standings: Collection[Standing],
    *,
    is_finish: bool = False,
    ends_clear_losers: bool = False,
    configuration_of: Mapping[str, str] | None = None,
    failed: Collection[str] = (),
) -> RungResult:
    """Keep the best ``places`` configurations of ``standings``, independent of their order; at least one.

    With ``is_finish``, a configuration whose jobs have all ended takes no place from one that trains: the best that
    trains continues, too. With ``ends_clear_losers``, configurations clearly behind the first one do not continue: they
    are behind by more than three standard errors of the difference on the rows that both have, and by more than a
    twentieth of the first one's improvement over its loss before the first step. Source: replay on the recorded sweeps.

    Configurations are ordered by :func:`alto.early_exit.repetitions.ranked_configurations`, in which a job that repeats
    no other is a configuration of its own: by the score of the task's metric, and within noise by the validation loss.
    Ties rank by id. A loss that is not finite ranks last and is never kept, even if places stay empty. All jobs of a
    configuration are kept or none. A job that has ended may take a place but gets no verdict.

    The evidence of a verdict is the ``rank`` of its job's configuration (1 is best), ``num_competing``, ``num_kept``,
    its ``validation_loss`` and, unless nothing was kept, ``cutoff_loss``: the loss of the last configuration kept. If
    scores differ, it also has ``score`` and ``cutoff_score``; if a configuration is repeated, ``mean_loss``.

    Args:
        places: Number of configurations that continue.
        is_finish: Whether the rung ends all but one.
        ends_clear_losers: Whether jobs clearly behind the best one end.
        configuration_of, failed: See ``ranked_configurations``.
    """
    ranked = ranked_configurations(standings, configuration_of or {}, failed)
    finite = [group for group in ranked if math.isfinite(group.mean.validation_loss)]
    kept = finite[: max(1, places)]
    if ends_clear_losers:
        kept = [group for group in kept if group is kept[0] or not _is_clearly_behind(group, kept[0])]
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


def _is_clearly_behind(one: Repeated[Standing], first: Repeated[Standing]) -> bool:
    """Return whether a configuration is clearly behind the first; False if unknown, or if one of both is repeated."""
    if len(one.members) > 1 or len(first.members) > 1 or first.mean.start_loss is None:
        return False
    differences = [a - b for a, b in zip(one.mean.loss_rows, first.mean.loss_rows, strict=False)]
    if len(differences) < 2 or not all(map(math.isfinite, differences)):
        return False
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    behind = one.mean.validation_loss - first.mean.validation_loss
    gained = first.mean.start_loss - first.mean.validation_loss
    return behind > CLEAR_ERRORS * error and behind > CLEAR_SHARE * gained > 0
