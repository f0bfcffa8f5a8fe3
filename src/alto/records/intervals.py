"""The quantile for 95 % confidence intervals of means."""

from __future__ import annotations

import statistics

__all__ = ["student_quantile"]

_NORMAL = statistics.NormalDist().inv_cdf(0.975)
_STUDENT = {1: 12.706, 2: 4.303, 3: 3.182}
"""The 97.5 % quantiles of Student's t distribution for which the expansion below is off by more than 2 %."""


def student_quantile(degrees: int) -> float:
    """Return the 97.5 % quantile of Student's t distribution with ``degrees`` degrees of freedom.

    Above three degrees it is computed by the first terms of the Cornish-Fisher expansion, within 2 %.
    """
    if degrees in _STUDENT:
        return _STUDENT[degrees]
    z = _NORMAL
    first = (z**3 + z) / (4 * degrees)
    second = (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)
    return z + first + second
