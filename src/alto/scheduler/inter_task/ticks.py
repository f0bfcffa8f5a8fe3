"""Seconds as whole ticks, for solvers that count in integers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from alto.scheduler.inter_task.problem import SchedulingProblem

__all__ = ["in_ticks"]

_EXACT_S = (1.0, 0.1, 0.01, 0.001)
_MAX_TICKS = 10**8
"""Ticks of the whole horizon; multiplied by the GPUs of a large cluster this is far below the 64-bit limit."""


def in_ticks(problem: SchedulingProblem) -> tuple[SchedulingProblem, float, bool]:
    """Return the problem in ticks, the seconds per tick, and whether the conversion is exact.

    The conversion is exact if every time is a whole number of seconds, tenths, hundredths or thousandths, and the
    horizon has less than 10^8 of these units. A tick is then the greatest common divisor of all times. Otherwise a tick
    is 10^-8 of the horizon, and times are rounded up: a schedule in ticks is also valid in seconds, and the least
    makespan of ``n`` tasks in ticks is at most ``n + 1`` ticks above the least in seconds.
    """
    times = [demand.duration_s for demand in problem.pending] + [demand.release_s for demand in problem.pending]
    times += [task.remaining_s for task in problem.running]
    # At worst all tasks run one after the other, after the last release and the last running task.
    horizon_s = max(times, default=0.0) + sum(demand.duration_s for demand in problem.pending)
    for unit_s in _EXACT_S:
        if horizon_s / unit_s < _MAX_TICKS and all(_is_whole(time / unit_s) for time in times):
            return _exact(problem, times, unit_s)
    tick_s = horizon_s / _MAX_TICKS
    return _with_times(problem, lambda time_s: float(math.ceil(time_s / tick_s))), tick_s, False


def _exact(problem: SchedulingProblem, times: Sequence[float], unit_s: float) -> tuple[SchedulingProblem, float, bool]:
    units = math.gcd(*(round(time / unit_s) for time in times)) or 1
    return _with_times(problem, lambda time_s: float(round(time_s / unit_s) // units)), unit_s * units, True


def _with_times(problem: SchedulingProblem, ticks: Callable[[float], float]) -> SchedulingProblem:
    return replace(
        problem,
        pending=tuple(
            replace(demand, duration_s=ticks(demand.duration_s), release_s=ticks(demand.release_s))
            for demand in problem.pending
        ),
        running=tuple(replace(task, remaining_s=ticks(task.remaining_s)) for task in problem.running),
    )


def _is_whole(number: float) -> bool:
    return number == 0 or (round(number) > 0 and math.isclose(number, round(number), rel_tol=1e-12))
