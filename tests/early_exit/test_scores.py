"""Scores of answers: their means, intervals, and the job that they choose."""

from __future__ import annotations

import math
import random

import pytest

from alto.early_exit import Policy, Selection, choose, interval_of, scores_of
from alto.records import FinalistScore, Judgement, LossPoint, Rung, RungResult

ROWS = 40


def point(job: str, loss: float, **changes: object) -> LossPoint:
    return LossPoint(job=job, step=9, total_steps=9, train_ema=loss, validation_loss=loss, **changes)  # type: ignore[arg-type]


def right(count: int, of: int = ROWS) -> tuple[float, ...]:
    return (1.0,) * count + (0.0,) * (of - count)


def winner_of(rows: dict[str, tuple[float, ...]], losses: dict[str, float], scorer: str) -> tuple[str, list[str]]:
    scores = {score.job: score for score in scores_of(Judgement(scorer=scorer, rows=rows))}
    winner, tied = choose([point(job, loss) for job, loss in losses.items()], scores, scorer=scorer)
    return winner.job, [other.job for other in tied]


def test_a_clear_lead_wins_against_the_loss() -> None:
    assert winner_of({"a": right(10), "b": right(35)}, {"a": 1.0, "b": 2.0}, "exact_match") == ("b", [])


def test_within_noise_the_loss_decides_and_the_others_are_named() -> None:
    rows = {"a": right(30), "b": right(31), "c": right(5)}
    losses = {"a": 1.0, "b": 2.0, "c": 0.5}
    assert winner_of(rows, losses, "exact_match") == ("a", ["b"])


def test_the_number_of_right_answers_alone_decides_for_eval_accuracy() -> None:
    rows = {"a": right(30), "b": right(31), "c": right(31)}
    losses = {"a": 1.0, "b": 2.0, "c": 1.5}
    assert winner_of(rows, losses, "eval_accuracy") == ("c", [])


def test_scores_of_any_size_are_compared_row_by_row() -> None:
    """A small lead on every row counts; rows that differ much among themselves do not hide it."""
    drawn = random.Random(0)
    base = tuple(drawn.uniform(-1e6, 1e6) for _ in range(ROWS))
    ahead = tuple(value + 1 + 0.01 * drawn.random() for value in base)
    losses = {"a": 1.0, "b": 2.0}
    assert winner_of({"a": base, "b": ahead}, losses, "python") == ("b", [])
    assert winner_of({"a": tuple(reversed(base)), "b": ahead}, losses, "python") == ("a", ["b"])


def test_the_order_in_which_they_are_given_does_not_matter() -> None:
    rows = {f"job-{n}": right(20 + n % 5) for n in range(8)}
    losses = {job: 1 + 0.1 * (index * 3 % 8) for index, job in enumerate(rows)}
    first = winner_of(rows, losses, "exact_match")
    turned = winner_of(dict(reversed(rows.items())), dict(reversed(losses.items())), "exact_match")
    assert (first[0], sorted(first[1])) == (turned[0], sorted(turned[1]))


@pytest.mark.parametrize(
    ("rows", "interval"),
    [
        (right(5, 10), (0.2366, 0.7634)),  # Wilson's score interval, as in Newcombe (1998)
        (right(10, 10), (0.7225, 1.0)),
        (right(0, 10), (0.0, 0.2775)),
        ((1.0,), (0.2065, 1.0)),
        ((1.0, 2.0, 3.0, 4.0, 5.0), (1.0368, 4.9632)),  # Student's: 3 ± 2.776 · 1.5811 / √5
        ((0.5, 0.5), (0.5, 0.5)),
    ],
)
def test_intervals(rows: tuple[float, ...], interval: tuple[float, float]) -> None:
    assert interval_of(rows) == pytest.approx(interval, abs=0.001, rel=0.035)


@pytest.mark.parametrize("rows", [(0.3,), (1e308, -1e308, 1e308)])
def test_where_no_interval_can_be_estimated_there_is_none(rows: tuple[float, ...]) -> None:
    assert interval_of(rows) is None


def test_scores_count_right_answers_only_where_the_scorer_does() -> None:
    (counted,) = scores_of(Judgement(scorer="multiple_choice", rows={"a": right(3, 4)}))
    assert (counted.num_correct, counted.num_questions, counted.score, counted.exact_match) == (3, 4, 0.75, 0.75)
    (scored,) = scores_of(Judgement(scorer="http", rows={"a": (1.0, 0.5)}))
    assert (scored.num_correct, scored.num_questions, scored.score) == (None, 2, 0.75)
    assert math.isnan(scored.exact_match)
    assert scores_of(Judgement(scorer="http", failure="no connection")) == ()


def test_a_score_of_version_0_1_has_its_share_as_its_score() -> None:
    assert FinalistScore(job="a", num_correct=1, num_questions=4).score == 0.25


def scored_at_first_rung(rows: dict[str, tuple[float, ...]], losses: dict[str, float]) -> tuple[Selection, RungResult]:
    """A selection whose first rung, at half of the steps, ranks by ``rows``; one at 0.8 follows."""
    rungs = (Rung(progress=0.5, keep=0.5), Rung(progress=0.8, keep=0.5))
    selection = Selection(Policy(rungs=rungs), ema_alpha=1.0, total_steps=dict.fromkeys(losses, 10))
    evaluated(selection, losses, 5)
    selection.observe_scores(scores_of(Judgement(scorer="exact_match", rows=rows)))
    return selection, selection.select()


def evaluated(selection: Selection, losses: dict[str, float], step: int) -> None:
    for job, loss in losses.items():
        done = selection.history(job)[-1].step if selection.history(job) else 0
        selection.observe_losses(job, done + 1, [loss] * (step - done))
        selection.observe(job, step, loss)


def test_scores_at_a_rung_decide_that_rung_alone() -> None:
    losses = {"a": 1.0, "b": 2.0, "c": 3.0, "d": 4.0}
    selection, result = scored_at_first_rung({"a": right(1), "b": right(2), "c": right(20), "d": right(38)}, losses)
    assert result.kept == ("d", "c")
    evaluated(selection, {"c": 3.0, "d": 4.0}, 8)
    assert selection.select().kept == ("c",), "at the next one the loss decides again"


def test_at_a_rung_the_loss_decides_within_noise() -> None:
    _, result = scored_at_first_rung({"a": right(30), "b": right(31)}, {"a": 1.0, "b": 2.0})
    assert result.kept == ("a",)
    _, result = scored_at_first_rung({"a": right(10), "b": right(31)}, {"a": 1.0, "b": 2.0})
    assert result.kept == ("b",)
