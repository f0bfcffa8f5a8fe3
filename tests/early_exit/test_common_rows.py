"""Evaluations on different numbers of rows are compared on the rows that both have."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alto.early_exit import Selection, evaluation_order, mean_loss, policy_from
from alto.early_exit.noise import on_one_scale, on_scale_of
from alto.records import LossPoint, StartValue
from alto.spec import EarlyExit

WEIGHTS = (1.0, 3.0, 2.0, 1.0, 5.0, 2.0)


def point(job: str, rows: list[float], step: int = 5) -> LossPoint:
    loss = mean_loss(rows, WEIGHTS)
    return LossPoint(job=job, step=step, total_steps=10, train_ema=1.0, validation_loss=loss, loss_rows=tuple(rows))


def test_every_row_is_evaluated_once_in_an_order_that_the_seed_decides() -> None:
    order = evaluation_order(50, seed=3)
    assert sorted(order) == list(range(50))
    assert order == evaluation_order(50, seed=3) != evaluation_order(50, seed=4)
    assert order != tuple(range(50))


def test_two_evaluations_differ_by_their_difference_on_common_rows() -> None:
    many, few = point("a", [2.0, 9.0, 4.0, 1.0]), point("b", [1.5, 8.0])
    moved = on_scale_of(many, few, WEIGHTS)
    assert moved.validation_loss == pytest.approx(many.validation_loss - (0.5 * 1 + 1.0 * 3) / 4)
    assert few.validation_loss > many.validation_loss > moved.validation_loss, "hard rows are no fault of the job"
    assert on_scale_of(few, many, WEIGHTS).validation_loss == pytest.approx(few.validation_loss + 3.5 / 4)


@pytest.mark.parametrize(
    "few",
    [
        point("b", [1.0, 2.0, 3.0, 4.0]),
        replace(point("b", [1.0]), loss_rows=()),
        replace(point("b", [1.0]), validation_loss=math.inf),
    ],
    ids=["as many rows", "no rows", "not finite"],
)
def test_evaluations_stay_as_they_are_where_there_is_nothing_to_correct(few: LossPoint) -> None:
    many = point("a", [2.0, 9.0, 4.0, 1.0])
    assert on_scale_of(many, few, WEIGHTS) == few
    assert on_one_scale([few, many], WEIGHTS)[0] == few


@given(st.lists(st.tuples(st.integers(1, 6), st.floats(-1, 1)), min_size=2, max_size=6))
def test_jobs_that_differ_by_a_constant_are_ranked_by_it_on_any_rows(drawn: list[tuple[int, float]]) -> None:
    difficulty = [2.0, 9.0, 4.0, 1.0, 7.0, 3.0]
    points = [
        point(f"job-{index}", [loss + offset for loss in difficulty[:num_rows]])
        for index, (num_rows, offset) in enumerate(drawn)
    ]
    found = on_one_scale(points, WEIGHTS)
    for (_, one), (_, other), here, there in zip(drawn, drawn[1:], found, found[1:], strict=False):
        assert here.validation_loss - there.validation_loss == pytest.approx(one - other, abs=1e-9)


def selection(**jobs: int) -> Selection:
    settings = EarlyExit(rungs=[[0.5, 0.5]])
    return Selection(policy_from(settings), ema_alpha=0.1, total_steps=jobs, row_weights=WEIGHTS)


def test_the_best_checkpoint_and_the_winner_are_found_on_common_rows() -> None:
    found = selection(a=4, b=4)
    for job, losses in (("a", [3.0, 9.0]), ("b", [3.2, 9.5])):
        found.observe_losses(job, 1, [1.0, 1.0])
        found.observe(job, 2, mean_loss(losses, WEIGHTS), loss_rows=losses)
    assert found.select().kept == ("a",)
    found.observe_losses("a", 3, [1.0, 1.0])
    # A lower mean, of which the common rows are no better.
    found.observe("a", 4, mean_loss([3.0, 9.1, 1.0], WEIGHTS), loss_rows=[3.0, 9.1, 1.0])
    best = found.best("a")
    assert best is not None
    assert best.step == 2
    assert [point.job for point in found.leaders(2)] == ["a", "b"]
    found.observe_measured("b", 4.0, [2.0] * 6)
    winner = found.winner()
    assert winner is not None
    assert (winner.job, winner.validation_loss) == ("b", 4.0), "who was measured comes before who was not"


def test_a_rung_between_two_evaluations_takes_the_near_one_on_the_rows_of_the_other() -> None:
    found = selection(a=3, b=3)
    easy_and_hard = [1.0, 9.0]
    for job, gain in (("a", 0.5), ("b", 0.4)):
        start = StartValue(validation_loss=1.0, loss_rows=(1.0,))
        found.observe_base(job, start)
        rows = [loss - gain for loss in easy_and_hard]
        found.observe_losses(job, 1, [1.0, 1.0])
        found.observe(job, 2, mean_loss(rows, WEIGHTS), loss_rows=rows)
    standings = {one.job: one.validation_loss for one in found.rungs.standings()}
    mean = mean_loss(easy_and_hard, WEIGHTS)
    assert standings == pytest.approx({"a": mean - 0.5 * 0.75, "b": mean - 0.4 * 0.75})
