"""The policy of a task; and jobs that join later, which are ranked among all jobs ever ranked at a rung."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alto.early_exit import Collapse, Divergence, OverfittingGap, OverfittingUpturn, Policy, Selection, policy_from
from alto.errors import RunError
from alto.records import Candidate, ExitReason, Rung
from alto.spec.early_exit import EarlyExit


def test_paper_is_algorithm_1() -> None:
    assert policy_from(EarlyExit(policy="paper")) == Policy(
        rules=(
            Divergence(window=2, divergence_patience=2, tau_slope=0.001),
            OverfittingGap(overfitting_patience=2, tau_gap=0.1),
        ),
        rungs=(Rung(progress=0.05, keep=0.25),),
        equal_shares=False,
    )


def test_alto_is_the_default() -> None:
    assert policy_from(EarlyExit()) == Policy(
        rules=(
            Divergence(window=2, divergence_patience=2, tau_slope=0.001),
            OverfittingUpturn(overfitting_patience=2),
            Collapse(collapse_patience=20),
        ),
        rungs=(
            Rung(progress=0.01, keep=1 / 6, min_kept=8),
            *(Rung(progress=at, keep=0.5, min_kept=kept) for at, kept in ((0.025, 8), (0.05, 5), (0.1, 3))),
            Rung(progress=0.25, keep=0.5, min_kept=2, ends_clear_losers=True),
            Rung(progress=0.6, keep=1.0, max_kept=1),
        ),
        equal_shares=True,
    )


def test_every_setting_arrives() -> None:
    settings = {
        "window": 3,
        "divergence_patience": 4,
        "tau_slope": 0.5,
        "overfitting_patience": 5,
        "rungs": [(0.5, 0.1)],
    }
    alto = policy_from(EarlyExit(**settings, tau_upturn=0.2, tau_noise=7, collapse_patience=9))
    paper = policy_from(EarlyExit(**settings, policy="paper", tau_gap=0.3))
    divergence, rungs = Divergence(window=3, divergence_patience=4, tau_slope=0.5), (Rung(progress=0.5, keep=0.1),)
    assert alto == Policy(
        rules=(
            divergence,
            OverfittingUpturn(overfitting_patience=5, tau_upturn=0.2, tau_noise=7),
            Collapse(collapse_patience=9),
        ),
        rungs=rungs,
    )
    assert paper == Policy(
        rules=(divergence, OverfittingGap(overfitting_patience=5, tau_gap=0.3)), rungs=rungs, equal_shares=False
    )


@pytest.mark.parametrize(
    ("switched_off", "rules", "rungs"),
    [
        ("detect_divergence", [OverfittingUpturn, Collapse], 6),
        ("detect_overfitting", [Divergence, Collapse], 6),
        ("detect_collapse", [Divergence, OverfittingUpturn], 6),
        ("select", [Divergence, OverfittingUpturn, Collapse], 0),
        ("enabled", [], 0),
    ],
)
def test_a_switch_per_pattern(switched_off, rules, rungs) -> None:
    policy = policy_from(EarlyExit(**{switched_off: False}))
    assert [type(rule) for rule in policy.rules] == rules
    assert len(policy.rungs) == rungs


def test_divergence_is_looked_at_before_overfitting(history) -> None:
    points = history([2.0, 3.0, 4.0], [1.0, 1.1, 1.2])
    assert OverfittingGap().judge(points) is not None
    assert policy_from(EarlyExit(policy="paper")).judge(points).reason is ExitReason.DIVERGING


def test_overfitting_is_looked_at_too(history) -> None:
    points = history([2.0, 2.0, 2.0], [1.0, 1.0, 1.0])
    assert policy_from(EarlyExit(policy="paper")).judge(points).reason is ExitReason.OVERFITTING


@pytest.mark.parametrize("settings", [EarlyExit(), EarlyExit(policy="paper"), EarlyExit(enabled=False)])
def test_a_non_finite_loss_ends_a_job_under_every_policy(history, settings) -> None:
    policy = policy_from(settings)
    assert policy.judge(history([math.nan])).reason is ExitReason.DIVERGING
    assert policy.judge(history([2.0, math.inf], [2.0, 2.0])).step == 20
    assert policy.judge(history([2.0])) is None
    assert policy.judge([]) is None


def test_a_disabled_policy_never_ends_a_job_otherwise(history) -> None:
    assert policy_from(EarlyExit(enabled=False)).judge(history([1.0, 10.0, 100.0, 1000.0])) is None


def test_select_ranks_at_the_rung_asked_for() -> None:
    candidates = [Candidate(job=f"{number}", step=1, validation_loss=float(number)) for number in range(10)]
    policy = policy_from(EarlyExit(rungs=((0.025, 0.5), (0.05, 0.2))))
    assert len(policy.select(0, candidates).kept) == 5
    assert len(policy.select(1, candidates).kept) == 1, "half of the jobs, then a fifth of these"
    assert len(policy.select(1, candidates, 40).kept) == 4, "a share of the 40 jobs ranked at the first rung"


def test_places_of_the_paper_are_a_share_of_those_ranked_at_the_rung() -> None:
    candidates = [Candidate(job=f"{number}", step=1, validation_loss=float(number)) for number in range(10)]
    policy = policy_from(EarlyExit(policy="paper", rungs=((0.025, 0.5), (0.05, 0.2))))
    assert len(policy.select(1, candidates, 40).kept) == 2


@pytest.mark.parametrize(
    ("num_configurations", "ending"),
    [
        (1, []),
        (2, [0.6]),
        (3, [0.25, 0.6]),
        (6, [0.05, 0.1, 0.25, 0.6]),
        (8, [0.05, 0.1, 0.25, 0.6]),
        (9, [0.01, 0.05, 0.1, 0.25, 0.6]),
        (96, [0.01, 0.025, 0.05, 0.1, 0.25, 0.6]),
    ],
)
def test_rungs_with_a_place_for_every_job_end_none(num_configurations: int, ending: list[float]) -> None:
    rungs = policy_from(EarlyExit()).ending_rungs(num_configurations)
    assert [rung.progress for rung in rungs] == ending


def test_the_paper_counts_places_among_those_that_are_left() -> None:
    paper = policy_from(EarlyExit(policy="paper", rungs=[(0.05, 0.5), (0.1, 0.5), (0.2, 0.5)]))
    assert [rung.progress for rung in paper.ending_rungs(3)] == [0.05, 0.1]
    assert paper.ending_rungs(1) == ()


RUNGS = (Rung(progress=0.2, keep=0.5), Rung(progress=0.6, keep=0.5))
STEPS = 10


def selection(jobs: Mapping[str, float], rungs: tuple[Rung, ...] = RUNGS) -> Selection:
    return Selection(Policy(rungs=rungs), ema_alpha=1.0, total_steps=dict.fromkeys(jobs, STEPS))


def train(found: Selection, job: str, loss: float, until: int) -> None:
    """Train ``job`` at a constant loss with an evaluation after every step, as long as it may train."""
    while found.is_training(job) and not found.rungs.is_waiting(job) and (step := len(found.history(job)) + 1) <= until:
        found.observe_losses(job, step, [loss])
        found.observe(job, step, loss)


def reason(found: Selection, job: str) -> tuple[str, int] | None:
    decision = found.decision_on(job)
    return None if decision is None else (decision.reason, decision.step)


FIELD = {"a": 1.0, "b": 2.0, "c": 3.0, "d": 4.0}


def after_first_rung() -> Selection:
    found = selection(FIELD)
    for job, loss in FIELD.items():
        train(found, job, loss, STEPS)
    assert found.rungs.is_ready()
    assert set(found.select().kept) == {"a", "b"}
    return found


@pytest.mark.parametrize(
    ("loss", "ended"),
    [(0.5, None), (1.5, None), (2.5, None), (3.5, ("underperforming", 2)), (9.0, ("underperforming", 2))],
)
def test_a_late_job_is_ranked_alone_at_the_rung_it_missed(loss: float, ended: tuple[str, int] | None) -> None:
    """The first three of five jobs ever ranked continue: ``ceil(0.5 * 5)``."""
    found = after_first_rung()
    found.add("late", STEPS, catches_up=True)
    train(found, "late", loss, 3)
    assert reason(found, "late") == ended
    assert found.training == (("a", "b") if ended else ("a", "b", "late"))
    if ended:
        assert found.decision_on("late").evidence["progress"] == 0.2, "it took its place at that rung"


def test_late_jobs_are_ranked_among_each_other_too() -> None:
    found = after_first_rung()
    for job, loss in {"first": 0.5, "second": 0.6, "third": 2.5}.items():
        found.add(job, STEPS, catches_up=True)
        train(found, job, loss, 3)
    # Four of seven jobs ever ranked continue: ceil(0.5 * 7).
    assert [reason(found, job) for job in ("first", "second", "third")] == [None, None, ("underperforming", 2)]
    assert found.decision_on("third").evidence["rank"] == 5


def test_late_jobs_that_ended_at_a_rung_count_as_ranked_at_the_next() -> None:
    found = after_first_rung()
    for number in range(4):
        found.add(f"late-{number}", STEPS, catches_up=True)
        train(found, f"late-{number}", 9.0, STEPS)
    for job in ("a", "b"):
        train(found, job, FIELD[job], STEPS)
    # Two of eight jobs ever ranked continue: ceil(0.25 * 8).
    assert found.select().kept == ("a", "b")


def test_no_rung_waits_for_a_late_job_until_it_has_caught_up() -> None:
    found = after_first_rung()
    found.add("late", STEPS, catches_up=True)
    train(found, "late", 1.5, 1)
    for job in ("a", "b"):
        train(found, job, FIELD[job], STEPS)
    assert found.rungs.is_ready(), "it has not reached the first rung yet"
    assert found.select().kept == ("a",), "values at other shares of the steps are not compared"
    train(found, "late", 1.5, STEPS)
    # At the second rung two of five continue: ceil(0.25 * 5).
    assert reason(found, "late") is None
    assert len(found.history("late")) == STEPS
    assert found.winner().job == "a"


def test_a_job_that_caught_up_is_waited_for() -> None:
    found = after_first_rung()
    found.add("late", STEPS, catches_up=True)
    for job in ("a", "b"):
        train(found, job, FIELD[job], STEPS)
    assert found.rungs.is_ready()
    train(found, "late", 1.5, 5)
    assert found.rungs.is_ready(), "it has not reached the rung yet"
    train(found, "late", 1.5, 6)
    assert found.rungs.is_waiting("late")
    assert found.rungs.is_ready()
    assert found.select().kept == ("a", "late")


def test_before_the_first_rung_the_others_do_not_wait_either() -> None:
    found = selection({"a": 1.0, "b": 2.0})
    train(found, "a", 1.0, STEPS)
    found.add("late", STEPS, catches_up=True)
    train(found, "b", 2.0, STEPS)
    assert found.rungs.is_ready()
    assert found.select().kept == ("a",)
    train(found, "late", 0.5, 3)
    assert found.is_training("late")


def test_alone_in_the_field_it_holds_the_next_rung() -> None:
    found = after_first_rung()
    found.add("late", STEPS, catches_up=True)
    for job in ("a", "b"):
        found.observe_losses(job, 3, [float("nan")])
    train(found, "late", 1.0, STEPS)
    assert found.rungs.is_waiting("late")
    assert found.rungs.is_ready()
    assert found.select().kept == ("late",)


def test_a_job_of_a_user_is_waited_for_as_before() -> None:
    found = after_first_rung()
    found.add("clone", STEPS)
    for job in ("a", "b"):
        train(found, job, FIELD[job], STEPS)
    assert not found.rungs.is_ready()


@given(
    st.lists(st.floats(0.1, 10, allow_nan=False), min_size=4, max_size=10, unique=True),
    st.floats(0.1, 10, allow_nan=False),
    st.floats(0.1, 10, allow_nan=False),
)
def test_a_better_late_job_is_never_ended_before_a_worse_one(losses: list[float], one: float, other: float) -> None:
    better, worse = min(one, other), max(one, other)

    def outcome(loss: float) -> int:
        jobs = {f"job-{index}": value for index, value in enumerate(losses)}
        found = selection(jobs)
        for job, value in jobs.items():
            train(found, job, value, STEPS)
        found.select()
        found.add("late", STEPS, catches_up=True)
        train(found, "late", loss, 5)
        return len(found.history("late"))

    assert outcome(better) >= outcome(worse)


def test_a_fork_continues_with_what_was_observed_of_its_origin() -> None:
    found = after_first_rung()
    found.fork("copy", "a")
    assert [point.step for point in found.history("copy")] == [1, 2]
    assert {point.job for point in found.history("copy")} == {"copy"}
    assert found.best("copy") is None, "that adapter is its origin's"
    with pytest.raises(RunError, match="step 3 of copy"):
        found.observe_losses("copy", 1, [1.0])
    for job, loss in (("a", 1.0), ("b", 2.0), ("copy", 0.5)):
        train(found, job, loss, STEPS)
    assert found.rungs.is_waiting("copy")
    assert found.select().kept[0] == "copy"
    assert found.winner().job == "copy"
    assert found.history("a")[-1].validation_loss == 1.0, "its origin is unchanged"


def test_what_its_origin_has_reached_does_not_hold_a_fork_back() -> None:
    """A fork's best evaluation is its own, even if its origin had a better score."""
    found = selection({"a": 1.0}, rungs=())
    found.observe_losses("a", 1, [1.0])
    found.observe("a", 1, 1.0, score=0.9)
    found.fork("copy", "a")
    for step, (loss, score) in enumerate([(2.0, 0.5), (1.9, 0.6), (1.8, 0.7)], start=2):
        found.observe_losses("copy", step, [loss])
        found.observe("copy", step, loss, score=score)
    assert (found.best("copy").step, found.best("copy").score) == (4, 0.7)


def test_evaluations_of_its_origin_end_no_fork() -> None:
    """Two evaluations in a row end a job; one of the origin and one of the copy do not."""
    policy = Policy(rules=(OverfittingGap(tau_gap=0.5, overfitting_patience=2),))
    found = Selection(policy, ema_alpha=1.0, total_steps={"a": STEPS})
    found.observe_losses("a", 1, [1.0])
    assert found.observe("a", 1, 2.0) is None
    found.fork("copy", "a")
    found.observe_losses("copy", 2, [1.0])
    assert found.observe("copy", 2, 2.0) is None
    found.observe_losses("copy", 3, [1.0])
    assert found.observe("copy", 3, 2.0).reason is ExitReason.OVERFITTING


def test_only_a_job_that_trains_can_be_continued() -> None:
    found = after_first_rung()
    with pytest.raises(RunError, match="d to train, found that it has ended"):
        found.fork("copy", "d")
    assert found.decision_on("d").reason is ExitReason.UNDERPERFORMING
