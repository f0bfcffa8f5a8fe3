"""The quantile that 95 % intervals of means are made with."""

from __future__ import annotations

import statistics

__all__ = ["student_quantile"]

_NORMAL = statistics.NormalDist().inv_cdf(0.975)
_STUDENT = {1: 12.706, 2: 4.303, 3: 3.182}
"""The 97.5 % quantiles of Student's distribution that the expansion below misses by more than 2 %."""


def student_quantile(degrees: int) -> float:
    """The 97.5 % quantile of Student's distribution; above three degrees of freedom by the first terms of Cornish and
    Fisher, within 2 %."""
    if degrees in _STUDENT:
        return _STUDENT[degrees]
    z = _NORMAL
    first = (z**3 + z) / (4 * degrees)
    second = (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)
    return z + first + second
