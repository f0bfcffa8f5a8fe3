"""Makes a schedule and its status from placements and a bound."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal

from alto.records import Placement, Schedule

__all__ = ["makespan_of", "schedule_from"]


def makespan_of(placements: Iterable[Placement]) -> float:
    """Return the end of the last placement; 0 if there is none."""
    return max((placement.end_s for placement in placements), default=0.0)


def schedule_from(
    method: str,
    placements: tuple[Placement, ...],
    *,
    bound_s: float,
    status: Literal["optimal", "feasible", "heuristic"],
) -> Schedule:
    """Make a schedule that is ``optimal`` if it ends at the bound; otherwise it has ``status``.

    Bound and makespan may be sums of the same times in different orders, so they count as equal if only rounding
    differs.

    Args:
        method: Method that made the schedule.
        placements: The placements.
        bound_s: Lower bound of the makespan, in seconds.
        status: Status if the makespan is above the bound.
    """
    makespan_s = makespan_of(placements)
    if math.isclose(makespan_s, bound_s, rel_tol=1e-9):
        bound_s, status = makespan_s, "optimal"
    return Schedule(method=method, status=status, placements=placements, bound_s=bound_s)
