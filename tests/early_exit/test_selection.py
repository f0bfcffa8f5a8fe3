from __future__ import annotations

import copy
import math

import pytest

from alto.early_exit import Policy, Selection, policy_from
from alto.errors import RunError
from alto.records import Candidate, ExitDecision, ExitReason, Rung
from alto.spec.early_exit import EarlyExit

HALF_THEN_HALF = Policy(rungs=(Rung(progress=0.1, keep=0.5), Rung(progress=0.5, keep=0.5)))


def selection_of(jobs: dict[str, int], policy: Policy = HALF_THEN_HALF) -> Selection:
    return Selection(policy, ema_alpha=1.0, total_steps=jobs)


def train_to(
    selection: Selection, job: str, step: int, validation_loss: float, *, train_loss: float = 1.0
) -> ExitDecision | None:
    done = selection.history(job)[-1].step if selection.history(job) else 0
    verdict = selection.observe_losses(job, done + 1, [train_loss] * (step - done))
    return verdict or selection.observe(job, step, validation_loss)


def exits(selection: Selection) -> dict[str, tuple[str, int]]:
    decisions = [selection.decision_on(job) for job in selection.jobs]
    return {decision.job: (decision.reason.value, decision.step) for decision in decisions if decision}


def test_a_race_from_start_to_end() -> None:
    selection = selection_of({"a": 10, "b": 20, "c": 10, "d": 10})
    assert [selection.rungs.next_stop(job) for job in selection.jobs] == [1, 2, 1, 1]
    for job, loss in {"a": 3.0, "b": 1.0, "c": 4.0}.items():
        train_to(selection, job, selection.rungs.next_stop(job), loss)
        assert selection.rungs.is_waiting(job)
    assert not selection.rungs.is_ready()
    train_to(selection, "d", 1, 2.0)
    assert selection.rungs.is_ready()
    assert selection.select().kept == ("b", "d")
    assert selection.training == ("b", "d")
    assert [selection.rungs.next_stop(job) for job in selection.training] == [10, 5]
    train_to(selection, "b", 10, 0.9)
    train_to(selection, "d", 5, 0.8)
    assert selection.select().kept == ("d",)
    assert selection.rungs.next is None
    assert selection.rungs.next_stop("d") == 10
    train_to(selection, "d", 10, 0.85)
    assert selection.training == ()
    assert exits(selection) == {"a": ("underperforming", 1), "c": ("underperforming", 1), "b": ("underperforming", 10)}
    assert (selection.winner().job, selection.winner().step, selection.winner().validation_loss) == ("d", 5, 0.8)


def test_the_smoothed_loss_of_a_point_is_that_of_all_its_steps() -> None:
    selection = Selection(Policy(), ema_alpha=0.5, total_steps={"a": 10})
    selection.observe_losses("a", 1, [4.0, 2.0])
    selection.observe_losses("a", 3, [0.0])
    selection.observe("a", 3, 5.0)
    assert selection.history("a")[0].train_ema == 1.5


def test_a_step_loss_that_is_not_finite_ends_the_job_at_its_step() -> None:
    selection = selection_of({"a": 10})
    verdict = selection.observe_losses("a", 1, [1.0, math.nan, 1.0])
    assert (verdict.step, verdict.reason) == (2, ExitReason.DIVERGING)
    assert selection.training == ()
    assert selection.winner() is None


def test_a_diverged_job_is_not_ranked_at_the_rung() -> None:
    selection = selection_of({"a": 20, "b": 20, "c": 20})
    train_to(selection, "a", 1, 0.1)
    selection.observe_losses("a", 2, [math.nan])
    train_to(selection, "b", 2, 2.0)
    train_to(selection, "c", 2, 3.0)
    assert [candidate.job for candidate in selection.rungs.candidates()] == ["b", "c"]
    assert selection.select().kept == ("b",)
    assert selection.winner().job == "a"


@pytest.mark.parametrize(
    ("reason", "kept"),
    [
        (ExitReason.OVERFITTING, ("a", "b")),
        ("plateau", ("a", "b")),
        (ExitReason.DIVERGING, ("b",)),
        (ExitReason.STOPPED, ("b",)),
        (ExitReason.FAILED, ("b",)),
    ],
)
def test_a_job_that_a_rule_of_a_user_ends_competes_as_one_that_overfit(reason: str, kept: tuple[str, ...]) -> None:
    selection = selection_of({"a": 20, "b": 20, "c": 20})
    train_to(selection, "a", 1, 0.1)
    selection.end(ExitDecision(job="a", step=1, reason=reason))
    train_to(selection, "b", 2, 2.0)
    train_to(selection, "c", 2, 3.0)
    assert selection.select().kept == kept


def test_a_job_that_overfit_competes_with_its_best_and_is_applied_before_the_rung() -> None:
    settings = EarlyExit(policy="paper", rungs=[(0.2, 0.5), (0.5, 0.5)])
    selection = selection_of({"a": 10, "b": 10, "c": 10, "d": 10}, policy_from(settings))
    train_to(selection, "a", 1, 1.2, train_loss=0.5)
    verdict = train_to(selection, "a", 2, 1.5, train_loss=0.5)
    assert verdict.reason is ExitReason.OVERFITTING
    for job, loss in {"b": 1.1, "c": 1.3, "d": 1.4}.items():
        train_to(selection, job, 2, loss, train_loss=loss)
    assert selection.rungs.candidates()[0] == Candidate(job="a", step=2, validation_loss=1.2, is_training=False)
    assert selection.select().kept == ("b", "a")
    train_to(selection, "b", 5, 1.0, train_loss=1.0)
    assert [candidate.job for candidate in selection.rungs.candidates()] == ["a", "b"]
    assert selection.select().kept == ("b",)


def test_an_ended_job_that_was_not_kept_competes_no_more() -> None:
    settings = EarlyExit(policy="paper", rungs=[(0.2, 0.5), (0.5, 0.5)], overfitting_patience=1)
    selection = selection_of({"a": 10, "b": 10, "c": 10, "d": 10}, policy_from(settings))
    train_to(selection, "a", 1, 9.0)
    for job, loss in {"b": 1.0, "c": 1.05, "d": 1.08}.items():
        train_to(selection, job, 2, loss)
    assert selection.select().kept == ("b", "c")
    train_to(selection, "b", 5, 1.0)
    train_to(selection, "c", 5, 1.0)
    assert [candidate.job for candidate in selection.rungs.candidates()] == ["b", "c"]
    assert exits(selection)["a"] == ("overfitting", 1)


def test_short_jobs_reach_two_rungs_at_one_step() -> None:
    selection = selection_of(
        {"a": 1, "b": 2, "c": 2, "d": 2, "e": 2}, policy_from(EarlyExit(rungs=((0.025, 0.5), (0.05, 0.2))))
    )
    for job, loss in {"a": 0.5, "b": 1.0, "c": 2.0, "d": 3.0, "e": 4.0}.items():
        train_to(selection, job, 1, loss)
    assert selection.select().kept == ("a", "b", "c")
    assert selection.rungs.is_ready()
    assert selection.select().kept == ("a",)
    assert selection.training == ()
    assert selection.decision_on("a") is None
    assert exits(selection)["b"] == ("underperforming", 1)


def test_a_job_at_its_last_step_has_finished_unless_its_loss_is_not_finite() -> None:
    selection = selection_of({"a": 3, "b": 3}, policy_from(EarlyExit(select=False)))
    for step, loss in enumerate([1.0, 2.0, 3.0], start=1):
        assert train_to(selection, "a", step, loss, train_loss=loss) is None
    assert train_to(selection, "b", 3, math.nan).reason is ExitReason.DIVERGING
    assert selection.training == ()
    assert selection.decision_on("a") is None
    assert selection.best("b") is None


def test_no_rung_is_decided_when_no_job_trains() -> None:
    selection = selection_of({"a": 10, "b": 10})
    for job in selection.jobs:
        selection.observe_losses(job, 1, [math.inf])
    assert not selection.rungs.is_ready()
    assert selection.winner() is None


@pytest.mark.parametrize("reason", [ExitReason.STOPPED, ExitReason.FAILED, ExitReason.BUDGET])
@pytest.mark.parametrize("step", [0, 1])
def test_a_job_ended_from_outside_no_longer_competes_or_blocks_others(reason, step) -> None:
    """This holds for a job with an evaluation before the rung too."""
    selection = selection_of({"a": 10, "b": 20})
    train_to(selection, "a", 1, 1.0)
    if step:
        train_to(selection, "b", step, 0.5)
    selection.end(ExitDecision(job="b", step=step, reason=reason))
    assert selection.rungs.is_ready()
    assert [candidate.job for candidate in selection.rungs.candidates()] == ["a"]


def test_leaders_are_the_best_of_each_job_best_first() -> None:
    selection = selection_of({"a": 4, "b": 4, "c": 4, "d": 4}, Policy())
    for job, losses in {"a": (3.0, 2.0), "b": (1.0, 5.0), "c": (2.0,)}.items():
        for step, loss in enumerate(losses, start=1):
            train_to(selection, job, step, loss)
    leaders = [(point.job, point.step) for point in selection.leaders(2)]
    assert leaders == [("b", 1), ("a", 2)]
    assert [point.job for point in selection.leaders(9)] == ["b", "a", "c"]
    assert selection.winner() == selection.leaders(1)[0]


def test_winner_ties_go_to_the_lower_job_id_and_the_earlier_step() -> None:
    selection = selection_of({"b": 4, "a": 4}, Policy())
    for job in selection.jobs:
        for step in (1, 2):
            train_to(selection, job, step, 1.0)
    assert (selection.winner().job, selection.winner().step) == ("a", 1)


def test_a_copy_goes_its_own_way() -> None:
    selection = selection_of({"a": 10})
    twin = copy.deepcopy(selection)
    train_to(twin, "a", 1, 1.0)
    assert selection.history("a") == ()
    assert len(twin.history("a")) == 1


@pytest.mark.parametrize(
    ("case", "misuse", "message"),
    [
        (
            "a step is missing",
            lambda selection: selection.observe_losses("c", 2, [1.0]),
            "expected step 1 of c, found step 2",
        ),
        ("past the rung after", lambda selection: selection.observe_losses("a", 2, [1.0] * 5), "to wait for its rung"),
        ("evaluated before its losses", lambda selection: selection.observe("a", 2, 1.0), "after the 1 steps"),
        ("evaluated twice", lambda selection: selection.observe("a", 1, 1.0), "an evaluation of a after step 1"),
        ("a rung too early", lambda selection: selection.select(), "found that some do not"),
        ("trained after its end", lambda selection: selection.observe_losses("b", 2, [1.0]), "found that it has ended"),
        ("evaluated after its end", lambda selection: selection.observe("b", 1, 1.0), "found that it has ended"),
    ],
)
def test_what_cannot_have_happened_is_refused(case, misuse, message) -> None:
    selection = selection_of({"a": 10, "b": 10, "c": 10})
    train_to(selection, "a", 1, 1.0)
    selection.observe_losses("b", 1, [math.nan])
    with pytest.raises(RunError, match=message):
        misuse(selection)


def test_a_job_added_later_takes_part_in_the_rungs_that_are_left() -> None:
    selection = selection_of({"a": 10, "b": 10})
    train_to(selection, "a", 1, 1.0)
    train_to(selection, "b", 1, 2.0)
    selection.select()
    selection.add("c", 20)
    assert selection.training == ("a", "c")
    assert (selection.rungs.next_stop("a"), selection.rungs.next_stop("c")) == (5, 10)
    train_to(selection, "a", 5, 0.9)
    assert not selection.rungs.is_ready()
    train_to(selection, "c", 10, 0.8)
    assert selection.select().kept == ("c",)
    with pytest.raises(RunError, match="found that c already exists"):
        selection.add("c", 20)


def test_a_reopened_job_trains_on_and_competes_again() -> None:
    selection = selection_of({"a": 10, "b": 10})
    train_to(selection, "a", 1, 1.0)
    train_to(selection, "b", 1, 2.0)
    selection.select()
    selection.reopen("b")
    assert selection.decision_on("b") is None
    train_to(selection, "a", 5, 0.9)
    assert not selection.rungs.is_ready()
    train_to(selection, "b", 5, 0.7)
    assert selection.select().kept == ("b",)
    assert exits(selection) == {"a": ("underperforming", 5)}


def test_a_reopened_job_is_judged_by_what_it_does_from_then_on() -> None:
    policy = policy_from(EarlyExit(policy="paper", select=False, overfitting_patience=2))
    selection = selection_of({"a": 10}, policy)
    train_to(selection, "a", 1, 2.0)
    assert train_to(selection, "a", 2, 2.0) is not None
    selection.reopen("a")
    assert train_to(selection, "a", 3, 2.0) is None
    assert train_to(selection, "a", 4, 2.0) is not None


def test_what_cannot_be_reopened() -> None:
    selection = selection_of({"a": 10, "b": 2}, Policy())
    with pytest.raises(RunError, match="a to have been ended early, found that it has not"):
        selection.reopen("a")
    train_to(selection, "b", 2, 1.0)
    with pytest.raises(RunError, match="b to have been ended early, found that it has not"):
        selection.reopen("b")
    selection.observe_losses("a", 1, [math.nan])
    with pytest.raises(RunError, match="a to have finite losses"):
        selection.reopen("a")
