"""The spread of the durations of repeated steps."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

__all__ = ["spread_of"]


def spread_of(durations_s: Sequence[float]) -> float:
    """Return how much longer the median of ``durations_s``, all above 0, is than their fastest tenth, as a share of the
    latter.

    Other programs on the machine make steps longer and never shorter, some more than others.
    """
    fastest = sorted(durations_s)[len(durations_s) // 10]
    return statistics.median(durations_s) / fastest - 1.0
