"""Seconds as whole ticks: exact where they can be, rounded up where not."""

from __future__ import annotations

import pytest
from hypothesis import given
from schedules import nodes_of, problems, tasks_of

from alto.scheduler import SchedulingProblem
from alto.scheduler.inter_task.problem import in_ticks


@pytest.mark.parametrize(
    ("durations_s", "tick_s", "ticks"),
    [
        ((3600.0, 5400.0), 1800.0, [2, 3]),
        ((0.3, 0.4), 0.1, [3, 4]),
        ((1.0, 2.005), 0.005, [200, 401]),
        ((0.007,), 0.007, [1]),
    ],
)
def test_a_tick_is_as_long_as_all_times_allow(
    durations_s: tuple[float, ...], tick_s: float, ticks: list[float]
) -> None:
    problem = SchedulingProblem(nodes=nodes_of(1), pending=tasks_of(*((1, duration_s) for duration_s in durations_s)))
    found, found_tick_s, is_exact = in_ticks(problem)
    assert is_exact
    assert found_tick_s == pytest.approx(tick_s)
    assert [demand.duration_s for demand in found.pending] == ticks


@given(problems())
def test_no_time_becomes_shorter_and_none_longer_by_more_than_a_tick(problem: SchedulingProblem) -> None:
    found, tick_s, is_exact = in_ticks(problem)
    for before, after in zip(problem.pending, found.pending, strict=True):
        for one, other in ((before.duration_s, after.duration_s), (before.release_s, after.release_s)):
            assert other == int(other)
            assert one * (1 - 1e-9) <= other * tick_s <= one * (1 + 1e-9) + (not is_exact) * tick_s


def test_a_long_horizon_stays_within_what_a_solver_counts() -> None:
    problem = SchedulingProblem(nodes=nodes_of(1), pending=tasks_of((1, 1e12), (1, 1e-3)))
    found, _, is_exact = in_ticks(problem)
    assert not is_exact
    assert max(demand.duration_s for demand in found.pending) <= 1e8
    assert min(demand.duration_s for demand in found.pending) == 1
