"""Jobs that train past a rung before its selection: every decision is the same as if they had waited."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alto.early_exit import OverfittingUpturn, Policy, Selection
from alto.records import ExitDecision, ExitReason, Rung, RungResult, StartValue

TOTAL_STEPS = 12
Traces = dict[str, list[tuple[float, float]]]
Failures = dict[str, tuple[int, str]]


@st.composite
def selections(draw: st.DrawFn) -> tuple[Policy, Traces, Failures]:
    """Draw a policy whose rungs may coincide, and jobs that fall, turn up, tie, break or fail at any step."""
    progress = sorted(draw(st.lists(st.sampled_from([1 / 12, 2 / 12, 4 / 12, 6 / 12, 1.0]), min_size=1, max_size=3)))
    shares, least = st.sampled_from([0.2, 0.5, 0.75, 1.0]), draw(st.sampled_from([1, 2, 4]))
    rungs = tuple(
        Rung(progress=at, keep=draw(shares), min_kept=least, ends_clear_losers=draw(st.booleans())) for at in progress
    )
    if draw(st.booleans()):
        rungs = (*rungs[:-1], Rung(progress=progress[-1], keep=1.0, max_kept=1))
    rules = (OverfittingUpturn(overfitting_patience=1, tau_noise=0.0),) if draw(st.booleans()) else ()
    loss = st.integers(1, 6).map(float) | st.sampled_from([math.nan, math.inf])
    step = st.tuples(st.sampled_from([1.0] * 15 + [math.nan]), loss | st.integers(1, 6).map(float))
    trace = st.lists(step, min_size=TOTAL_STEPS, max_size=TOTAL_STEPS)
    traces = {f"job-{index}": draw(trace) for index in range(draw(st.integers(1, 7)))}
    steps_after_rungs = [min(TOTAL_STEPS, round(at * TOTAL_STEPS) + 1) for at in progress]
    failing_step = st.sampled_from(steps_after_rungs) | st.integers(1, TOTAL_STEPS)
    failure = st.tuples(failing_step, st.sampled_from(["training", "evaluation"]))
    failures = draw(st.dictionaries(st.sampled_from(sorted(traces)), failure))
    return Policy(rules=rules, rungs=rungs, equal_shares=draw(st.booleans())), traces, failures


def fail(selection: Selection, job: str, num_steps: int) -> None:
    selection.end(ExitDecision(job=job, step=num_steps, reason=ExitReason.FAILED))


def run(
    policy: Policy, traces: Traces, failures: Failures, shuffler: random.Random, *, ahead: bool
) -> tuple[Selection, list[RungResult]]:
    """Train one step of any job at a time, with an evaluation; with ``ahead``, jobs certain to be kept may train on."""
    totals, weights = dict.fromkeys(traces, TOTAL_STEPS), (1.0,) * 3
    selection = Selection(policy, ema_alpha=1.0, total_steps=totals, row_weights=weights)
    for job in traces:
        selection.observe_base(job, StartValue(validation_loss=7.0, loss_rows=(6.3, 7.0, 7.7)))
    selections = []
    while True:
        while selection.rungs.is_ready():
            selections.append(selection.select())
        if not selection.training:
            return selection, selections
        certain = selection.rungs.certain_to_be_kept() if ahead else frozenset()
        job = shuffler.choice(
            [job for job in selection.training if not selection.rungs.is_waiting(job) or job in certain]
        )
        step = selection.history(job)[-1].step + 1 if selection.history(job) else 1
        train_loss, validation_loss = traces[job][step - 1]
        if failures.get(job) == (step, "training"):
            fail(selection, job, step - 1)
        elif selection.observe_losses(job, step, [train_loss]) is None:
            if failures.get(job) == (step, "evaluation"):
                fail(selection, job, step)
            else:
                rows = [share * validation_loss for share in (0.9, 1.0, 1.1)]
                selection.observe(job, step, validation_loss, loss_rows=rows)


@given(selections(), st.randoms(use_true_random=False))
def test_running_ahead_changes_no_decision(case: tuple[Policy, Traces, Failures], shuffler: random.Random) -> None:
    policy, traces, failures = case
    selection, selections = run(policy, traces, failures, shuffler, ahead=False)
    ahead, selections_ahead = run(policy, traces, failures, shuffler, ahead=True)
    assert selections_ahead == selections
    for job in traces:
        assert repr(ahead.decision_on(job)) == repr(selection.decision_on(job))  # repr, because nan is not nan
        assert repr(ahead.history(job)) == repr(selection.history(job))
    assert ahead.winner() == selection.winner()


HALF_THEN_HALF = Policy(rungs=(Rung(progress=0.25, keep=0.5), Rung(progress=0.5, keep=0.5)))


def waiting(losses: dict[str, float], policy: Policy = HALF_THEN_HALF) -> Selection:
    """Return a selection of jobs of twelve steps; those with a loss have reached the first rung at step 3."""
    selection = Selection(policy, ema_alpha=1.0, total_steps=dict.fromkeys("abcdef", 12))
    for job, loss in losses.items():
        selection.observe_losses(job, 1, [1.0] * 3)
        selection.observe(job, 3, loss)
    return selection


@pytest.mark.parametrize(
    ("losses", "certain"),
    [
        ({}, ""),
        ({"a": 1.0, "b": 2.0, "c": 3.0}, ""),  # three jobs and three places are left
        ({"a": 1.0, "b": 2.0, "c": 3.0, "d": 0.5}, "d"),
        ({"a": 1.0, "b": 1.0, "c": 3.0, "d": 4.0, "e": 5.0}, "ab"),  # ties rank by id
        ({"a": 1.0, "b": 2.0, "c": 3.0, "d": math.nan}, "a"),  # one job less competes for three of five places
    ],
)
def test_a_place_is_certain_if_all_who_are_to_come_could_be_better(losses: dict[str, float], certain: str) -> None:
    assert waiting(losses).rungs.certain_to_be_kept() == set(certain)


def run_ahead(selection: Selection, job: str, losses: dict[int, float]) -> ExitDecision | None:
    verdict = None
    for step, loss in losses.items():
        selection.observe_losses(job, step, [1.0])
        verdict = selection.observe(job, step, loss)
    return verdict


def test_a_job_runs_ahead_to_the_next_rung_and_waits_there() -> None:
    selection = waiting({"a": 1.0, "b": 2.0, "c": 3.0, "d": 4.0, "e": 5.0})
    assert "a" in selection.rungs.certain_to_be_kept()
    assert selection.rungs.furthest_stop("a") == 6
    run_ahead(selection, "a", {4: 0.9, 5: 0.8, 6: 0.7})
    assert selection.rungs.certain_to_be_kept() == {"b"}
    selection.observe_losses("f", 1, [math.nan])
    assert selection.select().kept == ("a", "b", "c")
    assert selection.rungs.is_waiting("a")
    assert selection.rungs.candidates()[0].validation_loss == 0.7


def test_the_rung_ranks_by_the_value_there_and_counts_who_broke_after_it() -> None:
    selection = waiting({"a": 1.0, "b": 2.0, "c": 3.0, "d": 4.0, "e": 5.0})
    assert run_ahead(selection, "a", {4: 99.0}) is None
    assert selection.observe_losses("b", 4, [math.nan]).reason is ExitReason.DIVERGING
    selection.observe_losses("f", 1, [1.0] * 3)
    selection.observe("f", 3, 1.5)
    assert selection.select().kept == ("a", "f", "b")


def test_a_job_that_fails_in_the_step_after_the_rung_is_ranked_there() -> None:
    """It has as many steps as at the rung, and was evaluated there; had it waited, it would have been kept."""
    selection = waiting({"a": 1.0, "b": 2.0, "c": 3.0, "d": 4.0, "e": 5.0})
    fail(selection, "a", 3)
    fail(selection, "f", 2)
    assert selection.select().kept == ("a", "b", "c")


def test_a_job_that_cannot_be_evaluated_at_the_rung_is_not_ranked_there() -> None:
    selection = waiting({"a": 1.0, "b": 2.0, "c": 3.0, "d": 4.0, "e": 5.0})
    selection.observe_losses("f", 1, [1.0] * 3)
    fail(selection, "f", 3)
    assert selection.select().kept == ("a", "b", "c")


def test_a_job_that_a_user_stops_while_it_runs_ahead_is_no_longer_ranked() -> None:
    selection = waiting({"a": 1.0, "b": 2.0, "c": 3.0, "d": 4.0, "e": 5.0})
    run_ahead(selection, "a", {4: 0.9})
    selection.end(ExitDecision(job="a", step=4, reason=ExitReason.STOPPED))
    assert "a" not in {candidate.job for candidate in selection.rungs.candidates()}


def test_a_rung_is_held_though_those_who_passed_it_have_all_ended() -> None:
    selection = waiting({"a": 1.0, "b": 2.0, "c": 3.0, "d": 4.0, "e": 5.0}, Policy(rungs=HALF_THEN_HALF.rungs[:1]))
    run_ahead(selection, "a", dict.fromkeys(range(4, 13), 1.0))
    for job in "bcde":
        selection.end(ExitDecision(job=job, step=3, reason=ExitReason.STOPPED))
    selection.observe_losses("f", 1, [math.nan])
    assert selection.training == ()
    assert selection.rungs.is_ready()
    assert selection.select().kept == ("a",)
    assert not selection.rungs.is_ready()


def test_at_the_finish_no_job_is_certain_of_the_place_while_others_are_to_come() -> None:
    selection = Selection(
        Policy(rungs=(Rung(progress=0.5, keep=1.0, max_kept=1),)), ema_alpha=1.0, total_steps=dict.fromkeys("ab", 10)
    )
    selection.observe_losses("a", 1, [1.0] * 5)
    selection.observe("a", 5, 0.1)
    assert selection.rungs.certain_to_be_kept() == frozenset()
    selection.observe_losses("b", 1, [1.0] * 5)
    selection.observe("b", 5, 0.2)
    assert selection.select().kept == ("a",)


@pytest.mark.parametrize("ends_clear_losers", [False, True])
def test_no_job_is_certain_where_one_to_come_may_make_it_a_clear_loser(ends_clear_losers: bool) -> None:
    rung = Rung(progress=0.25, keep=0.5, min_kept=2, ends_clear_losers=ends_clear_losers)
    selection = Selection(
        Policy(rungs=(rung, Rung(progress=0.5, keep=1.0))),
        ema_alpha=1.0,
        total_steps={"a": 8, "b": 8},
        row_weights=(1.0,) * 3,
    )
    for job, losses in {"a": (6.0, 5.0), "b": (4.0, 3.0)}.items():
        selection.observe_base(job, StartValue(validation_loss=7.0, loss_rows=(6.3, 7.0, 7.7)))
        for step, loss in enumerate(losses, start=1):
            selection.observe_losses(job, step, [1.0])
            selection.observe(job, step, loss, loss_rows=[0.9 * loss, loss, 1.1 * loss])
        if job == "a":
            assert selection.rungs.certain_to_be_kept() == (frozenset() if ends_clear_losers else {"a"})
    assert selection.select().kept == (("b",) if ends_clear_losers else ("b", "a"))
