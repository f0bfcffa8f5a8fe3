from __future__ import annotations

import math

import pytest

from alto.early_exit import Divergence, OverfittingGap, OverfittingUpturn, Policy, policy_from
from alto.records import ExitReason, Rung, Standing
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
        rules=(Divergence(window=2, divergence_patience=2, tau_slope=0.001), OverfittingUpturn(overfitting_patience=2)),
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
    alto = policy_from(EarlyExit(**settings, tau_upturn=0.2, tau_noise=7))
    paper = policy_from(EarlyExit(**settings, policy="paper", tau_gap=0.3))
    divergence, rungs = Divergence(window=3, divergence_patience=4, tau_slope=0.5), (Rung(progress=0.5, keep=0.1),)
    assert alto == Policy(
        rules=(divergence, OverfittingUpturn(overfitting_patience=5, tau_upturn=0.2, tau_noise=7)), rungs=rungs
    )
    assert paper == Policy(
        rules=(divergence, OverfittingGap(overfitting_patience=5, tau_gap=0.3)), rungs=rungs, equal_shares=False
    )


@pytest.mark.parametrize(
    ("switched_off", "rules", "rungs"),
    [
        ("detect_divergence", [OverfittingUpturn], 6),
        ("detect_overfitting", [Divergence], 6),
        ("select", [Divergence, OverfittingUpturn], 0),
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
    standings = [Standing(job=f"{number}", step=1, validation_loss=float(number)) for number in range(10)]
    policy = policy_from(EarlyExit(rungs=((0.025, 0.5), (0.05, 0.2))))
    assert len(policy.select(0, standings).kept) == 5
    assert len(policy.select(1, standings).kept) == 1, "half, and of those a fifth"
    assert len(policy.select(1, standings, 40).kept) == 4, "of the 40 that were ranked at the first"


def test_places_of_the_paper_are_a_share_of_those_ranked_at_the_rung() -> None:
    standings = [Standing(job=f"{number}", step=1, validation_loss=float(number)) for number in range(10)]
    policy = policy_from(EarlyExit(policy="paper", rungs=((0.025, 0.5), (0.05, 0.2))))
    assert len(policy.select(1, standings, 40).kept) == 2


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
