"""A family of early-exit policies, and the best member of it on some recordings."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence

from alto import EarlyExit

__all__ = ["FAMILY", "SMALL_FAMILY", "WEIGHT_OF_LOSS", "best_member", "name_of"]

WEIGHT_OF_LOSS = 2.0
"""Number of shares of saved samples that one lost share of the winner's improvement outweighs."""

_LATER = (0.025, 0.05, 0.1, 0.2)
_FLOORS = ((8, 8, 5, 3, 2), (10, 8, 6, 4, 2), (6, 6, 4, 3, 2), (4, 4, 4, 4, 4), (3, 3, 3, 3, 3), (2, 2, 2, 2, 2))


def _member(first: float, keep: float, then: float, floors: Sequence[int], finish: float) -> EarlyExit:
    shares = (first, *(share for share in _LATER if share > first))
    return EarlyExit(
        rungs=tuple((share, then if index else keep) for index, share in enumerate(shares)),
        min_kept=floors[-len(shares) :],
        finish_from=finish,
    )


FAMILY: Sequence[EarlyExit] = [
    _member(*settings)
    for settings in itertools.product(
        (0.005, 0.01, 0.025), (1 / 8, 1 / 6, 1 / 4, 1 / 3), (1 / 2, 2 / 3, 3 / 4), _FLOORS, (0.3, 0.4, 0.5, 0.6)
    )
]
"""Members of the family: the first rung and its share of kept jobs, the share that each later rung keeps, the least
number kept at every rung, and the share of steps from which only the best job continues."""

SMALL_FAMILY = FAMILY[::101]


def best_member(
    family: Sequence[EarlyExit], outcomes: Sequence[Mapping[str, tuple[float, float]]], without: str
) -> int:
    """Return the number of the member with the largest savings minus losses on all recordings except one.

    Args:
        family: The policies.
        outcomes: Savings and losses of each policy, by recording.
        without: The recording that is left out.
    """

    def worth(number: int) -> float:
        others = [found for name, found in outcomes[number].items() if name != without]
        return statistics.fmean(saved - WEIGHT_OF_LOSS * max(0.0, lost) for saved, lost in others)

    return max(range(len(family)), key=worth)


def name_of(settings: EarlyExit) -> str:
    """Return a policy in one line."""
    rungs = settings.selection_rungs
    shown = ", ".join(f"{100 * rung.progress:g} % {rung.keep:.3g}" for rung in rungs if rung.max_kept is None)
    least = ", ".join(str(rung.min_kept) for rung in rungs if rung.max_kept is None)
    return f"{shown}; at least {least}; one from {100 * (settings.finish_from or 1):g} %"
