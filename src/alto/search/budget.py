"""Keeps what training the leading job to its end takes, of a budget that many jobs spend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Need", "TimeSpent", "beyond_budget"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeSpent:
    """The time that a task has taken, as the first rank has read it from its clock.

    Attributes:
        spent_s: Seconds, those before an interruption included.
        slowdown: Seconds that the latest turns took, over those that were predicted for them.
        turn_s: The longest of the latest turns: the clock cannot be looked at sooner.
    """

    spent_s: float = 0.0
    slowdown: float = 1.0
    turn_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """A job's cost to its end, when it trains alone, as shares of what is left of the budget.

    Attributes:
        share: The expected cost; above 1 the job cannot be finished.
        reserved: The same with a margin for what one turn of all jobs may still spend.
    """

    share: float
    reserved: float


def beyond_budget(ranking: Sequence[str], needs: Mapping[str, Need]) -> tuple[str, ...]:
    """Return the jobs that have to end now, so that the best of them comes to its end.

    A job that cannot be finished any more ends, unless that holds for all. From the moment at which the leading job
    needs all that is left, every other one ends.

    Args:
        ranking: Jobs that train, best first.
        needs: The need of each.
    """
    able = [job for job in ranking if needs[job].share <= 1.0]
    leader = next(iter(able or ranking), None)
    if leader is None:
        return ()
    kept = set(able) if able and needs[leader].reserved < 1.0 else {leader}
    return tuple(job for job in ranking if job not in kept)
