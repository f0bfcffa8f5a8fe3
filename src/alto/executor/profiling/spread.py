"""How far repeats of one step lie apart."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

__all__ = ["spread_of"]


def spread_of(durations_s: Sequence[float]) -> float:
    """How much longer the median of ``durations_s``, all above 0, is than their fastest tenth, relative to that.

    Programs that use the machine make steps longer and never shorter, some more than others.
    """
    fastest = sorted(durations_s)[len(durations_s) // 10]
    return statistics.median(durations_s) / fastest - 1.0
