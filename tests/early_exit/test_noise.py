"""Leads within the noise of the validation rows, and evaluations on different numbers of rows."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alto.early_exit import Policy, Selection, evaluation_order, mean_loss, policy_from
from alto.early_exit.noise import is_better, is_within_noise, leading_group, on_one_scale, on_scale_of, ordered
from alto.records import LossPoint, Rung, StartValue
from alto.spec import EarlyExit


def point(
    job: str,
    loss: float,
    rows: list[float] | tuple[float, ...] = (),
    score: float | None = None,
    scale: str = "",
    start: float | None = None,
) -> LossPoint:
    mean = (sum(rows) / len(rows) if rows else 0.0) if score is None else score
    return LossPoint(
        job=job,
        step=1,
        total_steps=10,
        train_ema=1.0,
        validation_loss=loss,
        score=mean,
        score_rows=tuple(rows),
        loss_scale=scale,
        start_loss=start,
    )


def right(num_right: int, num_rows: int, first: int = 0) -> list[float]:
    """Return an accuracy per row; ``num_right`` rows from row ``first`` on are right."""
    return [float(first <= row < first + num_right) for row in range(num_rows)]


@pytest.mark.parametrize(
    ("case", "one", "other", "within"),
    [
        ("one pair of 45", right(31, 45), right(30, 45), True),
        ("one pair of 45, and many others that differ", right(20, 45), right(19, 45, 22), True),
        ("every fourth pair of 45", right(34, 45), right(23, 45), False),
        ("two pairs of 45", right(32, 45), right(30, 45), True),
        ("six pairs of 45, all one way", right(36, 45), right(30, 45), False),
        ("the same rows", right(30, 45), right(30, 45), True),
        ("as many right, of other rows", right(20, 45), right(20, 45, 25), True),
        ("the same lead on every row", [0.5] * 10, [0.4] * 10, False),
        ("one row", [1.0], [0.0], True),
    ],
)
def test_differences_within_noise(case, one, other, within) -> None:
    assert is_within_noise(point("a", 1.0, one), point("b", 1.0, other)) is within
    assert is_within_noise(point("b", 1.0, other), point("a", 1.0, one)) is within


def test_without_rows_any_lead_counts() -> None:
    assert not is_within_noise(point("a", 1.0, score=0.7), point("b", 1.0, score=0.69))
    assert is_within_noise(point("a", 1.0, score=0.7), point("b", 2.0, score=0.7))
    assert not is_within_noise(point("a", 1.0, right(31, 45)), point("b", 1.0, score=0.6))


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf")])
def test_a_row_that_is_not_finite_tells_nothing_of_noise(odd) -> None:
    broken = point("a", 1.0, [odd, 0.5, 0.5], score=0.4)
    assert not is_within_noise(broken, point("b", 1.0, [0.5, 0.5, 0.6]))
    assert not is_within_noise(broken, point("b", 1.0, [odd, 0.5, 0.6], score=0.5))


def test_rows_of_another_weight_than_the_mean_are_compared_with_their_own_mean() -> None:
    """The rows hold sums over tokens, and the score is a mean over tokens: 45 and 25 of 50 are right in every row."""
    many, few = ([50 * share + (row % 3) for row in range(100)] for share in (0.9, 0.5))
    assert not is_within_noise(point("a", 1.0, many, score=0.9), point("b", 1.0, few, score=0.5))


def test_losses_of_other_scales_decide_nothing_where_the_base_is_not_known() -> None:
    """An IPO loss begins at 25 and a sigmoid loss at 0.69: if the losses are within noise, the score decides."""
    ipo = point("ipo", 18.0, right(35, 45), scale="loss_type=ipo")
    sigmoid = point("sigmoid", 0.69, right(34, 45), scale="loss_type=sigmoid")
    assert ordered([sigmoid, ipo]) == [ipo, sigmoid]
    assert leading_group([sigmoid, ipo]) == [ipo, sigmoid]


def test_losses_of_other_scales_are_compared_as_shares_of_the_base_s() -> None:
    """25 to 20 is a fifth less, 0.69 to 0.4 more than a third; the score of the first leads within noise."""
    ipo = point("ipo", 20.0, right(35, 45), scale="loss_type=ipo", start=25.0)
    sigmoid = point("sigmoid", 0.4, right(34, 45), scale="loss_type=sigmoid", start=0.69)
    learned = point("learned", 5.0, right(34, 45), scale="loss_type=ipo", start=25.0)
    assert ordered([ipo, sigmoid, learned]) == [learned, sigmoid, ipo]


def test_a_chain_of_checkpoints_within_noise_of_the_next_does_not_lead_away_from_the_best() -> None:
    selection = Selection(Policy(), ema_alpha=1.0, total_steps={"a": 100})
    for step, num_right in enumerate((36, 33, 30, 27, 24, 21), start=1):
        selection.observe_losses("a", step, [1.0])
        selection.observe("a", step, 1.0 - step / 10, num_right / 40, right(num_right, 40))
    best = selection.best("a")
    assert is_within_noise(best, selection.history("a")[0])
    assert best.step == max(
        point.step for point in selection.history("a") if is_within_noise(point, selection.history("a")[0])
    )
    assert best.step < 6


def test_the_interval_is_student_s() -> None:
    """Five rows with differences 1, 1, 1, 1, 0: mean 0.8, error 0.2, so t is 4. With 0, 0, 1, 1, 1, t is 2.45, below
    the 2.78 of four degrees of freedom, though above the normal 1.96."""
    nothing = [0.0] * 5
    assert not is_within_noise(point("a", 1.0, [1, 1, 1, 1, 0]), point("b", 1.0, nothing))
    assert is_within_noise(point("a", 1.0, [0, 0, 1, 1, 1]), point("b", 1.0, nothing))


def test_the_interval_of_few_rows_is_wide() -> None:
    """For the differences 1, 2, 2.5 t is 4.16, below the 4.30 of two degrees of freedom; for 1, 1.5, 2 it is 5.20."""
    nothing = [0.0] * 3
    assert is_within_noise(point("a", 1.0, [1, 2, 2.5]), point("b", 1.0, nothing))
    assert not is_within_noise(point("a", 1.0, [1, 1.5, 2]), point("b", 1.0, nothing))


def test_within_noise_the_loss_decides() -> None:
    lucky, better = point("lucky", 0.9, right(31, 45)), point("better", 0.6, right(30, 45))
    clear = point("clear", 0.7, right(42, 45))
    assert ordered([lucky, better]) == [better, lucky]
    assert is_better(better, lucky)
    assert not is_better(lucky, better)
    assert ordered([lucky, clear, better]) == [clear, better, lucky]
    assert is_better(clear, better)


def test_a_job_keeps_the_checkpoint_with_the_lower_loss_unless_another_leads_by_more_than_noise() -> None:
    selection = Selection(Policy(), ema_alpha=1.0, total_steps={"a": 40})
    for step, loss, rows in ((2, 0.9, right(31, 45)), (10, 0.6, right(30, 45)), (20, 0.7, right(31, 45))):
        done = selection.history("a")[-1].step if selection.history("a") else 0
        selection.observe_losses("a", done + 1, [1.0] * (step - done))
        selection.observe("a", step, loss, sum(rows) / 45, rows)
    assert selection.best("a").step == 10
    selection.observe_losses("a", 21, [1.0] * 19)
    selection.observe("a", 39, 0.8, 43 / 45, right(43, 45))
    assert selection.best("a").step == 39


def test_the_winner_is_not_who_is_lucky_and_the_others_are_named() -> None:
    selection = Selection(Policy(), ema_alpha=1.0, total_steps=dict.fromkeys("abc", 1))
    worth = (("a", 0.9, right(31, 45)), ("b", 0.6, right(30, 45)), ("c", 0.5, right(10, 45)))
    for job, loss, rows in worth:
        selection.observe_losses(job, 1, [1.0])
        selection.observe(job, 1, loss, sum(rows) / 45, rows)
    winner = selection.winner()
    assert winner.job == "b"
    assert [tied.job for tied in selection.within_noise_of_winner()] == ["a"]


def test_a_rung_ranks_within_noise_by_the_loss() -> None:
    selection = Selection(
        Policy(rungs=(Rung(progress=0.5, keep=0.5),)), ema_alpha=1.0, total_steps=dict.fromkeys("ab", 2)
    )
    for job, loss, rows in (("a", 0.9, right(31, 45)), ("b", 0.6, right(30, 45))):
        selection.observe_losses(job, 1, [1.0])
        selection.observe(job, 1, loss, sum(rows) / 45, rows)
        assert selection.rungs.certain_to_be_kept() == frozenset()
    assert selection.select().kept == ("b",)


@given(
    st.lists(st.tuples(st.floats(0, 3), st.lists(st.sampled_from([0.0, 1.0]), min_size=6, max_size=6)), max_size=7),
    st.randoms(use_true_random=False),
)
def test_an_order_of_all_whatever_order_they_come_in(worth, draw: random.Random) -> None:
    points = [point(f"job-{number}", loss, rows) for number, (loss, rows) in enumerate(worth)]
    order = ordered(points)
    assert sorted(order, key=lambda item: item.job) == points
    assert ordered(draw.sample(points, len(points))) == order
    for before, after in itertools.pairwise(order):
        # Where the loss decides, both are within noise of the leader of their group.
        leads = [item for item in order if item.score >= after.score]
        assert after.score <= before.score or any(
            is_within_noise(before, lead) and is_within_noise(after, lead) for lead in leads
        )


WEIGHTS = (1.0, 3.0, 2.0, 1.0, 5.0, 2.0)


def point_on_rows(job: str, rows: list[float], step: int = 5) -> LossPoint:
    loss = mean_loss(rows, WEIGHTS)
    return LossPoint(job=job, step=step, total_steps=10, train_ema=1.0, validation_loss=loss, loss_rows=tuple(rows))


def test_every_row_is_evaluated_once_in_an_order_that_the_seed_decides() -> None:
    order = evaluation_order(50, seed=3)
    assert sorted(order) == list(range(50))
    assert order == evaluation_order(50, seed=3) != evaluation_order(50, seed=4)
    assert order != tuple(range(50))


def test_two_evaluations_differ_by_their_difference_on_common_rows() -> None:
    many, few = point_on_rows("a", [2.0, 9.0, 4.0, 1.0]), point_on_rows("b", [1.5, 8.0])
    moved = on_scale_of(many, few, WEIGHTS)
    assert moved.validation_loss == pytest.approx(many.validation_loss - (0.5 * 1 + 1.0 * 3) / 4)
    assert few.validation_loss > many.validation_loss > moved.validation_loss, (
        "hard rows must not count against the job"
    )
    assert on_scale_of(few, many, WEIGHTS).validation_loss == pytest.approx(few.validation_loss + 3.5 / 4)


@pytest.mark.parametrize(
    "few",
    [
        point_on_rows("b", [1.0, 2.0, 3.0, 4.0]),
        replace(point_on_rows("b", [1.0]), loss_rows=()),
        replace(point_on_rows("b", [1.0]), validation_loss=math.inf),
    ],
    ids=["as many rows", "no rows", "not finite"],
)
def test_evaluations_stay_as_they_are_where_there_is_nothing_to_correct(few: LossPoint) -> None:
    many = point_on_rows("a", [2.0, 9.0, 4.0, 1.0])
    assert on_scale_of(many, few, WEIGHTS) == few
    assert on_one_scale([few, many], WEIGHTS)[0] == few


@given(st.lists(st.tuples(st.integers(1, 6), st.floats(-1, 1)), min_size=2, max_size=6))
def test_jobs_that_differ_by_a_constant_are_ranked_by_it_on_any_rows(drawn: list[tuple[int, float]]) -> None:
    difficulty = [2.0, 9.0, 4.0, 1.0, 7.0, 3.0]
    points = [
        point_on_rows(f"job-{index}", [loss + offset for loss in difficulty[:num_rows]])
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
    # A lower mean, but not on the common rows.
    found.observe("a", 4, mean_loss([3.0, 9.1, 1.0], WEIGHTS), loss_rows=[3.0, 9.1, 1.0])
    best = found.best("a")
    assert best is not None
    assert best.step == 2
    assert [point.job for point in found.leaders(2)] == ["a", "b"]
    found.observe_measured("b", 4.0, [2.0] * 6)
    winner = found.winner()
    assert winner is not None
    assert (winner.job, winner.validation_loss) == ("b", 4.0), "jobs that were measured come first"


def test_a_rung_between_two_evaluations_takes_the_near_one_on_the_rows_of_the_other() -> None:
    found = selection(a=3, b=3)
    easy_and_hard = [1.0, 9.0]
    for job, lead in (("a", 0.5), ("b", 0.4)):
        start = StartValue(validation_loss=1.0, loss_rows=(1.0,))
        found.observe_base(job, start)
        rows = [loss - lead for loss in easy_and_hard]
        found.observe_losses(job, 1, [1.0, 1.0])
        found.observe(job, 2, mean_loss(rows, WEIGHTS), loss_rows=rows)
    candidates = {one.job: one.validation_loss for one in found.rungs.candidates()}
    mean = mean_loss(easy_and_hard, WEIGHTS)
    assert candidates == pytest.approx({"a": mean - 0.5 * 0.75, "b": mean - 0.4 * 0.75})
