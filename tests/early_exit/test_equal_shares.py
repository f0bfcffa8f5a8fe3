"""Jobs are ranked by their values after exactly the rung's share of their steps."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from journals import entries

from alto.early_exit import Policy, Selection, audit, point_at_fraction, selection_of
from alto.early_exit.noise import is_within_noise
from alto.errors import RunError
from alto.records import ExitDecision, ExitReason, LossPoint, Rung, StartValue
from alto.spec.early_exit import EarlyExit
from alto.spec.scoring import LEAST_SCORE

NAN = math.nan
START = StartValue(validation_loss=4.0, score=0.5)


def points(*evaluations: tuple[int, float, float]) -> list[LossPoint]:
    return [
        LossPoint(job="a", step=step, total_steps=100, train_ema=1.0, validation_loss=loss, score=score)
        for step, loss, score in evaluations
    ]


@pytest.mark.parametrize(
    ("case", "evaluations", "progress", "total_steps", "start", "expected"),
    [
        ("at the rung", [(5, 2.0, 0.7)], 0.05, 100, START, (2.0, 0.7)),
        ("between the base and the first step", [(1, 2.0, 0.7)], 0.025, 10, START, (3.5, 0.55)),
        ("twice on the way to it", [(1, 2.0, 0.7)], 0.05, 10, START, (3.0, 0.6)),
        ("halfway between two, in the logarithm", [(4, 3.0, 0.2), (9, 1.0, 0.4)], 0.06, 100, START, (2.0, 0.3)),
        ("logarithmic, not linear", [(1, 3.0, 0.0), (100, 1.0, 0.0)], 0.1, 100, None, (2.0, 0.0)),
        ("with no base", [(1, 2.0, 0.7)], 0.025, 10, None, (2.0, 0.7)),
        ("a base that is not finite", [(1, 2.0, 0.7)], 0.025, 10, StartValue(validation_loss=NAN), (2.0, 0.7)),
        ("an evaluation before that is not finite", [(1, NAN, 0.7), (4, 2.0, 0.7)], 0.02, 100, START, (2.0, 0.7)),
        ("later evaluations do not count", [(5, 2.0, 0.7), (9, 0.1, 0.9)], 0.05, 100, START, (2.0, 0.7)),
        ("not there yet", [(4, 2.0, 0.7)], 0.05, 100, START, None),
        ("never evaluated", [], 0.05, 100, START, None),
        ("a product that float rounds up", [(7, 2.0, 0.0)], 0.07, 100, START, (2.0, 0.0)),
    ],
)
def test_the_value_at_a_share(case, evaluations, progress, total_steps, start, expected) -> None:
    found = point_at_fraction(points(*evaluations), Rung(progress=progress, keep=0.5), total_steps, start)
    if expected is None:
        assert found is None
        return
    assert (found.validation_loss, found.score) == pytest.approx(expected)


def test_validation_rows_are_interpolated_as_their_mean_is() -> None:
    """Both have 36 of 48 rows right; one job is seen at the rung, the other at 2.7 times its share, starting at half
    right."""
    rows = tuple(float(row < 36) for row in range(48))
    start = StartValue(validation_loss=4.0, score=0.5, score_rows=(0.5,) * 48)
    (exact,) = points((3, 1.0, 0.75))
    (late,) = points((1, 0.9, 0.75))
    exact, late = replace(exact, score_rows=rows), replace(late, score_rows=rows)
    there = point_at_fraction([exact], Rung(progress=0.03, keep=0.5), 100, start)
    before = point_at_fraction([late], Rung(progress=0.025, keep=0.5), 15, start)
    assert (there.score, there.score_rows) == (0.75, rows)
    assert before.score == pytest.approx(0.5 + 0.375 * 0.25)
    assert sum(before.score_rows) / 48 == pytest.approx(before.score)
    assert not is_within_noise(there, before)


def test_a_side_without_rows_makes_the_rows_unknown() -> None:
    (late,) = points((1, 0.9, 0.75))
    found = point_at_fraction([replace(late, score_rows=(1.0, 0.5))], Rung(progress=0.025, keep=0.5), 10, START)
    assert (found.score, found.score_rows) == (pytest.approx(0.5625), ())


def test_a_score_that_was_not_finite_is_not_interpolated() -> None:
    start = StartValue(validation_loss=4.0, score=LEAST_SCORE)
    found = point_at_fraction(points((1, 2.0, 0.7)), Rung(progress=0.025, keep=0.5), 10, start)
    assert (found.validation_loss, found.score) == (3.5, 0.7)


def test_a_job_that_finishes_at_its_first_step_is_compared_at_the_share_too() -> None:
    """3.0 after its only step is 3.975 after 2.5 % of it, worse than the 3.9 of a job evaluated there."""
    rungs = (Rung(progress=0.025, keep=0.5),)
    selection = Selection(Policy(rungs=rungs), ema_alpha=1.0, total_steps={"long": 40, "short": 1})
    for job, loss in (("long", 3.9), ("short", 3.0)):
        selection.observe_base(job, StartValue(validation_loss=4.0))
        selection.observe_losses(job, 1, [4.0])
        selection.observe(job, 1, loss)
    assert selection.select().kept == ("long",)
    assert selection.training == ("long",)


def test_at_the_finish_a_job_that_has_ended_takes_no_place_of_one_that_trains() -> None:
    rungs = (Rung(progress=0.4, keep=1.0, max_kept=1),)
    selection = Selection(Policy(rungs=rungs), ema_alpha=1.0, total_steps=dict.fromkeys("abc", 10))
    for job, loss in (("a", 0.5), ("b", 0.51), ("c", 0.6)):
        selection.observe_losses(job, 1, [1.0] * 2)
        selection.observe(job, 2, loss)
    selection.end(ExitDecision(job="a", step=2, reason=ExitReason.OVERFITTING, evidence={}))
    for job, loss in (("b", 0.51), ("c", 0.6)):
        selection.observe_losses(job, 3, [1.0] * 2)
        selection.observe(job, 4, loss)
    rung_result = selection.select()
    assert rung_result.kept == ("a", "b")
    assert [decision.job for decision in rung_result.dropped] == ["c"]
    assert rung_result.dropped[0].evidence["rank"] == 3
    assert selection.training == ("b",)


def trained_to_first_step(*, equal_shares: bool) -> Selection:
    """Train two jobs to their first step: the one with the larger batch reaches twice the rung's share, and learns less
    per sample."""
    selection = Selection(
        Policy(rungs=(Rung(progress=0.05, keep=0.5),), equal_shares=equal_shares),
        ema_alpha=1.0,
        total_steps={"large-batch": 10, "small-batch": 40},
    )
    for job in selection.jobs:
        selection.observe_base(job, StartValue(validation_loss=4.0))
    selection.observe_losses("large-batch", 1, [4.0])
    selection.observe("large-batch", 1, 3.0)  # at 10 %: 0.5 at 5 %
    selection.observe_losses("small-batch", 1, [4.0] * 2)
    selection.observe("small-batch", 2, 3.3)  # at 5 %: 0.7
    return selection


def test_a_large_batch_is_not_favoured() -> None:
    assert trained_to_first_step(equal_shares=True).select().kept == ("small-batch",)
    assert trained_to_first_step(equal_shares=False).select().kept == ("large-batch",)


def test_the_evidence_of_a_verdict_is_the_value_at_the_share() -> None:
    (verdict,) = trained_to_first_step(equal_shares=True).select().dropped
    assert (verdict.job, verdict.step) == ("large-batch", 1)
    assert verdict.evidence["validation_loss"] == pytest.approx(3.5)
    assert verdict.evidence["cutoff_loss"] == pytest.approx(3.3)


def test_the_base_is_evaluated_before_a_job() -> None:
    selection = trained_to_first_step(equal_shares=True)
    with pytest.raises(RunError, match="the evaluation of the base before all evaluations of large-batch"):
        selection.observe_base("large-batch", START)


@pytest.mark.parametrize(("equal_shares", "num_kept"), [(True, 3), (False, 2)])
def test_places_are_counted_from_all_jobs_that_were_ranked(equal_shares: bool, num_kept: int) -> None:
    """Half of ten jobs continue, then three fifths of these: 3 of 10, though two of the five have diverged in
    between."""
    rungs = (Rung(progress=0.1, keep=0.5), Rung(progress=0.2, keep=0.6))
    selection = Selection(
        Policy(rungs=rungs, equal_shares=equal_shares), ema_alpha=1.0, total_steps=dict.fromkeys("abcdefghij", 10)
    )
    for loss, job in enumerate(selection.jobs):
        selection.observe_losses(job, 1, [1.0])
        selection.observe(job, 1, float(loss))
    assert selection.select().kept == tuple("abcde")
    for job in "ab":
        selection.observe_losses(job, 2, [NAN])
    for loss, job in enumerate(selection.training):
        selection.observe_losses(job, 2, [1.0])
        selection.observe(job, 2, float(loss))
    assert len(selection.select().kept) == num_kept


def journal(**settings: object) -> list[dict]:
    """Return an executor's journal of the two jobs above; ``settings`` are those of early exit."""
    jobs = [
        {"job": job, "config": {"per_device_train_batch_size": size}, "total_steps": steps, "samples_budgeted": 80}
        for job, size, steps in (("large-batch", 8, 10), ("small-batch", 2, 40))
    ]
    return [
        {"event": "task_started", "task": "t", "early_exit": settings, "jobs": jobs},
        {"event": "base_evaluated", "values": [{"jobs": [job["job"] for job in jobs], "validation_loss": 4.0}]},
        {"event": "train", "job": "large-batch", "first_step": 1, "losses": [4.0]},
        {"event": "eval", "job": "large-batch", "step": 1, "validation_loss": 3.0},
        {"event": "train", "job": "small-batch", "first_step": 1, "losses": [4.0, 4.0]},
        {"event": "eval", "job": "small-batch", "step": 2, "validation_loss": 3.3},
        {"event": "warmup_ended", "rung": 0, "progress": 0.05},
    ]


def test_a_journal_says_what_the_base_gave() -> None:
    settings = EarlyExit(rungs=[(0.05, 0.5)]).resolved().model_dump(mode="json")
    selection = selection_of(entries(journal(**settings)))
    assert selection.training == ("small-batch",)
    exited = {"event": "job_exited", "job": "large-batch", "step": 1, "reason": "underperforming"}
    assert audit(entries([*journal(**settings), exited])) == ()


def test_a_journal_of_version_0_1_is_decided_as_it_was() -> None:
    of_0_1 = {"enabled": True, "policy": "alto", "select": True, "rungs": [[0.05, 0.5]], "window": 2}
    events = [event for event in journal(**of_0_1) if event["event"] != "base_evaluated"]
    assert selection_of(entries(events)).training == ("large-batch",)
