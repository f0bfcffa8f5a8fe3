"""Points of selection: the step at which a job reaches one, and how many jobs continue from it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from alto.records import Rung

__all__ = ["ceil_share", "places_at", "rung_step"]

# A product this close to a whole number, relative to it, counts as that number: 0.07 * 100 is 7.000000000000001 in
# float64.
ROUNDING = 1e-9


def ceil_share(share: float, total: int) -> int:
    """``ceil(share * total)`` of the numbers as they were written, undisturbed by float rounding of the product."""
    product = share * total
    nearest = round(product)
    return nearest if abs(product - nearest) <= ROUNDING * max(1, nearest) else math.ceil(product)


def rung_step(rung: Rung, total_steps: int) -> int:
    """The step (1-based count of steps done) at which a job of ``total_steps`` steps reaches ``rung``."""
    return max(1, ceil_share(rung.progress, total_steps))


def places_at(rungs: Sequence[Rung], index: int, num_jobs: int) -> int:
    """How many of ``num_jobs`` jobs continue from rung number ``index`` (from 0): the shares of all rungs up to it are
    multiplied and only their product is rounded.

    ``max(ceil(keep_0 * … * keep_index * num_jobs), min(min_kept, num_jobs))``, and at most ``max_kept``.
    """
    rung = rungs[index]
    share = math.prod(earlier.keep for earlier in rungs[: index + 1])
    places = max(ceil_share(share, num_jobs), min(rung.min_kept, num_jobs))
    return places if rung.max_kept is None else min(places, rung.max_kept)
