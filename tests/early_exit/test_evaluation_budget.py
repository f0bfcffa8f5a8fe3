"""Evaluations cost the stated share of training, and rungs that cost more than they save are dropped."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alto.early_exit import budgeted
from alto.early_exit.evaluation_budget import (
    FEW_JOBS,
    FRACTION_AT_END,
    LEAST_LATE,
    LEAST_PAIRS,
    LEAST_ROWS,
    LEAST_ROWS_OF_FEW,
    LEAST_ROWS_OF_MANY,
    MOST_MEASURED,
)
from alto.spec import EarlyExit
from alto.spec.early_exit import places_at


def spent(settings: EarlyExit, num_jobs: int, row_cost: float) -> tuple[float, float]:
    """Return the time of training and of evaluations, relative to training one job."""
    assert settings.evaluations is not None
    rungs = settings.selection_rungs if settings.select else ()
    ends = (*(rung.progress for rung in rungs), 1.0)
    counts = (num_jobs, *(places_at(rungs, index, num_jobs) for index in range(len(rungs))))
    training = sum(count * (end - start) for count, start, end in zip(counts, (0.0, *ends), ends, strict=False))
    evaluating = sum(
        rows * row_cost * next(count for count, end in zip(counts, ends, strict=True) if progress <= end + 1e-9)
        for progress, rows in settings.evaluations
    )
    return training, evaluating


@given(
    num_jobs=st.sampled_from([2, 8, 12, 24, 60, 200]),
    num_rows=st.sampled_from([32, 64, 500, 5000, 100_000]),
    cost_of_all=st.floats(0.01, 20),
    share=st.sampled_from([0.05, 0.2, 1.0]),
    preset=st.sampled_from(["default", "cautious", "greedy", "preferences"]),
)
def test_evaluations_take_the_share_of_training_that_they_may(
    num_jobs: int, num_rows: int, cost_of_all: float, share: float, preset: str
) -> None:
    settings = EarlyExit(preset=preset, evaluation_share=share).resolved()
    row_cost = cost_of_all / num_rows
    found = budgeted(settings, steps=[100_000] * num_jobs, num_rows=num_rows, row_cost=row_cost, every=0.05)
    training, evaluating = spent(found, num_jobs, row_cost)
    rungs = found.selection_rungs if found.select else ()
    arrivals = (num_jobs, *(places_at(rungs, index, num_jobs) for index in range(len(rungs))))
    at_rungs = sum(count * (LEAST_ROWS_OF_MANY if count > FEW_JOBS else LEAST_ROWS_OF_FEW) for count in arrivals[:-1])
    least = row_cost * (at_rungs + LEAST_LATE * LEAST_ROWS * arrivals[-1])
    assert evaluating <= (1 - FRACTION_AT_END) * share * training + least
    assert found.final_evaluations is not None
    count, rows = found.final_evaluations
    paid = FRACTION_AT_END * share * training / row_cost
    if num_rows * row_cost <= share * training * (1 - 1e-6):
        assert rows == num_rows, "a job is evaluated on all rows if its share of all evaluations pays for it"
    elif num_rows * row_cost > share * training * (1 + 1e-6):
        assert rows == pytest.approx(min(max(paid, LEAST_ROWS), num_rows), abs=1)
    assert count == min(max(1, int(paid / rows + 1e-9)), MOST_MEASURED)
    assert found.evaluations is not None
    assert found.evaluations[-1][0] == 1.0
    assert all(later > earlier for (earlier, _), (later, _) in itertools.pairwise(found.evaluations))
    assert {rung.progress for rung in rungs} <= {progress for progress, _ in found.evaluations}


@pytest.mark.parametrize(("row_cost", "count"), [(0.0035, 4), (0.005, 3), (0.01, 1), (10.0, 1)])
def test_the_last_job_is_evaluated_a_few_times_unless_that_takes_half_of_its_time(row_cost: float, count: int) -> None:
    found = budgeted(EarlyExit().resolved(), steps=[64] * 12, num_rows=32, row_cost=row_cost, every=0.05)
    assert found.evaluations is not None
    before = found.selection_rungs[-1].progress if found.select else 0.0
    late = [(progress, rows) for progress, rows in found.evaluations if progress > before]
    assert len(late) == count
    assert {rows for _, rows in late[:-1]} <= {LEAST_ROWS}


def test_where_all_rows_cost_little_all_are_evaluated_as_often_as_the_task_asks_for() -> None:
    settings = EarlyExit().resolved()
    found = budgeted(settings, steps=[100_000] * 200, num_rows=10, row_cost=1e-6, every=0.05)
    assert found.selection_rungs == settings.selection_rungs
    rungs = (0.01, 0.025, 0.05, 0.1, 0.25, 0.6)
    assert found.evaluations is not None
    assert [progress for progress, _ in found.evaluations] == pytest.approx(
        [*rungs, *(0.6 + 0.05 * number for number in range(1, 8)), 1.0]
    )
    assert {rows for _, rows in found.evaluations} == {10}
    assert found.final_evaluations == (MOST_MEASURED, 10)


def test_a_rung_that_costs_more_than_it_saves_is_left_out_and_the_next_keeps_as_many_as_before() -> None:
    settings = EarlyExit().resolved()
    found = budgeted(settings, steps=[100_000] * 12, num_rows=32, row_cost=0.4 / 128, every=0.05)
    kept = [rung.progress for rung in found.selection_rungs]
    assert kept == [0.01, 0.05, 0.1, 0.25, 0.6], "the rung at 2.5 % ends none of the 8 jobs that reach it"
    usual = {
        rung.progress: places_at(settings.selection_rungs, index, 12)
        for index, rung in enumerate(settings.selection_rungs)
    }
    found_places = {
        rung.progress: places_at(found.selection_rungs, index, 12) for index, rung in enumerate(found.selection_rungs)
    }
    assert found_places == {progress: usual[progress] for progress in kept}
    dear = budgeted(settings, steps=[100_000] * 12, num_rows=32, row_cost=0.01, every=0.05)
    assert [rung.progress for rung in dear.selection_rungs] == [0.05, 0.1, 0.25, 0.6]
    own = budgeted(settings, steps=[100_000] * 12, num_rows=32, row_cost=0.4 / 128, every=0.05, drops_rungs=False)
    assert own.selection_rungs == settings.selection_rungs


def test_a_rung_that_few_jobs_reach_compares_them_on_more_rows() -> None:
    costs = {"num_rows": 64, "every": 0.05, "drops_rungs": False}
    settings = EarlyExit().resolved()
    rungs = [rung.progress for rung in settings.selection_rungs]

    def rows_at_rungs(num_jobs: int, row_cost: float = 0.4 / 128, **changes: bool) -> list[int]:
        found = budgeted(settings, steps=[100_000] * num_jobs, row_cost=row_cost, **costs, **changes).evaluations
        assert found is not None
        return [dict(found)[progress] for progress in rungs]

    assert rows_at_rungs(60) == [6, 6, 6, 6, 16, 16], "60, 10, 8, 5, 3 and 2 jobs reach them"
    assert rows_at_rungs(60, row_cost=0.4 / 1000) == [6, 6, 16, 16, 45, 64]
    assert rows_at_rungs(8, row_cost=0.4 / 1000) == [10, 15, 16, 16, 45, 64]
    assert rows_at_rungs(60, least_rows=LEAST_PAIRS) == [32] * 6


def test_the_choice_of_rungs_with_the_least_time_is_kept() -> None:
    """Brute force finds the same choice, without evaluations that jobs at the same step share."""
    settings, row_cost, steps = EarlyExit().resolved(), 0.4 / 128, [1000, 2000, 4000, 500] * 4
    found = budgeted(settings, steps=steps, num_rows=32, row_cost=row_cost, every=0.05)
    kept = [rung.progress for rung in found.selection_rungs]
    progress = [rung.progress for rung in settings.selection_rungs]
    places = dict(zip(progress, (places_at(settings.selection_rungs, at, 16) for at in range(6)), strict=True))

    def time(chosen: tuple[float, ...]) -> float:
        total, left, before = 0.0, 16, 0.0
        for at in chosen:
            trained = at - before
            least = max(6, min(16, int(0.4 * trained / row_cost))) if left <= 8 else 6
            rows = min(max(int(0.12 * trained / row_cost), least), 32)
            total += left * (at - before + rows * row_cost)
            left, before = places[at], at
        return total + left * (1 - before)

    choices = [choice for count in range(7) for choice in itertools.combinations(progress, count)]
    assert time(tuple(kept)) == pytest.approx(min(map(time, choices)), rel=0.01)
    assert len(kept) < 6


def test_jobs_at_the_same_step_at_two_rungs_are_evaluated_once() -> None:
    settings = EarlyExit().resolved()
    found = budgeted(settings, steps=[16] * 12, num_rows=32, row_cost=0.003, every=0.05)
    at = [rung.progress for rung in found.selection_rungs]
    assert {0.01, 0.025, 0.05} & set(at)
    assert 0.1 in at
    assert places_at(found.selection_rungs, at.index(0.1) - 1, 12) == 5, "after the first of 16 steps, 6 %"


def test_where_no_rung_pays_none_is_left_and_the_settings_stay_valid() -> None:
    found = budgeted(EarlyExit().resolved(), steps=[100_000] * 2, num_rows=32, row_cost=10.0, every=0.05)
    assert not found.select
    assert found.evaluations == ((1.0, LEAST_ROWS),)
    assert EarlyExit.of_run(found.model_dump(mode="json")) == found
