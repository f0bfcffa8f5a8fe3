"""Corrects the measured durations of a task with the durations of the steps that it has trained.

A machine that is busy during the measurement makes every duration longer. The durations that a run has observed replace
them in the cache, for later runs and plans. All durations are corrected by one factor, so that jobs are packed as
before.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Self

from alto.executor import cache
from alto.executor.job_state import JobState
from alto.executor.profiling.measure import Measured
from alto.executor.profiling.meter import spread_of
from alto.records import TaskPlan, Throughput

_EVERY = 8
"""Number of steps from which one is noted; counting the tokens of every step would take time too."""

_LEAST, _MOST = 8, 512
"""Smallest number of noted steps for a correction, and number of latest steps that it uses."""

_CLOSE = 0.1
"""Relative difference below which durations are not corrected, because the throughput model is no more exact."""


class StepTimes:
    """Durations of steps, each relative to the duration that was measured beforehand.

    Args:
        expected: The measured throughput; without it (None), no step is noted.
        name: Name of the measurement in the cache.
    """

    def __init__(self, expected: Throughput | None, name: str) -> None:
        self._expected = expected
        self._name = name
        self._num_steps = 0
        self._ratios: deque[float] = deque(maxlen=_MOST)

    @classmethod
    def of(cls, forecast: TaskPlan | None) -> Self:
        """Return empty step times for a run that begins with ``forecast``."""
        return cls(None, "") if forecast is None else cls(forecast.throughput, forecast.profile)

    def note(self, jobs: Sequence[JobState], duration_s: float) -> None:
        """Note a step that ``jobs`` have just taken in ``duration_s`` seconds; their step counts do not include it
        yet."""
        self._num_steps += 1
        if self._expected is None or self._num_steps % _EVERY:
            return
        expected_s = self._expected.duration_s(len(jobs), sum(job.next_step_tokens for job in jobs))
        self._ratios.append(duration_s / expected_s)

    def refine(self) -> None:
        """Correct the measurement in the cache if steps were faster than measured, or slower than measured on a busy
        machine. Nothing is changed if few steps were noted, if they agree with the measurement, or if it was measured
        again meanwhile."""
        if self._expected is None or len(self._ratios) < _LEAST:
            return
        factor, spread = statistics.median(self._ratios), spread_of(self._ratios)
        if abs(factor - 1.0) < _CLOSE or (factor > 1.0 and not self._expected.is_unsteady):
            return
        expected = self._expected

        def corrected(values: Any) -> Any:
            measured = Measured.from_dict(values)
            if measured.durations != expected.points:
                return None
            durations = tuple(
                replace(point, duration_s=point.duration_s * factor, spread=spread) for point in measured.durations
            )
            eval_token_s = measured.eval_token_s * factor
            return replace(measured, durations=durations, eval_token_s=eval_token_s).to_dict()

        cache.revise("profiles", self._name, corrected)
