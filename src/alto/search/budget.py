"""Reserves enough of the budget, which many jobs spend, to train the leading job to its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeSpent:
    """The time that a task has taken, as the first rank has read it from its clock.

    Attributes:
        spent_s: Seconds, including the time before an interruption.
        slowdown: Seconds that the latest turns took, divided by the predicted seconds.
        turn_s: Duration of the longest of the latest turns; the clock is read only once per turn.
    """

    spent_s: float = 0.0
    slowdown: float = 1.0
    turn_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """A job's cost until its end when it trains alone, as shares of the remaining budget.

    Attributes:
        share: The expected cost; above 1 the job cannot be finished.
        reserved: The expected cost with a margin for what one turn of all jobs may still spend.
    """

    share: float
    reserved: float


def beyond_budget(ranking: Sequence[str], needs: Mapping[str, Need]) -> tuple[str, ...]:
    """Return the jobs of ``ranking``, best first, that have to end now, so that the best job reaches its end.

    A job that can no longer be finished ends, unless no job can be finished. Once the leading job needs the whole
    remaining budget, every other job ends.
    """
    able = [job for job in ranking if needs[job].share <= 1.0]
    leader = next(iter(able or ranking), None)
    if leader is None:
        return ()
    kept = set(able) if able and needs[leader].reserved < 1.0 else {leader}
    return tuple(job for job in ranking if job not in kept)
