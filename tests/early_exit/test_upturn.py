from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alto.early_exit import OverfittingGap, OverfittingUpturn
from alto.early_exit.patterns import validation_noise
from alto.errors import SpecError
from alto.records import ExitReason

PLATEAU = [2.0, 2.0, 2.0, 2.0]


def exit_step(rule, points):
    verdicts = (rule.judge(points[:count]) for count in range(len(points) + 1))
    return next((verdict.step for verdict in verdicts if verdict is not None), None)


@pytest.mark.parametrize(
    ("case", "validation", "settings", "step"),
    [
        ("falls", [4, 3, 2, 1, 0.5], {}, None),
        ("a plateau", PLATEAU + [2.0] * 5, {}, None),
        ("rises in a straight line off a plateau", [*PLATEAU, 2.1, 2.2], {}, 60),
        ("falls in a straight line, then rises", [5, 4, 3, 2, 1, 2, 3], {}, 70),
        ("rises by less than the floor", [*PLATEAU, 2.001, 2.0015, 2.0019], {}, None),
        ("the floor is relative to the best", [*PLATEAU, 2.1, 2.1], {"tau_upturn": 0.06}, None),
        ("counter is reset by one good evaluation", [*PLATEAU, 2.1, 2.0, 2.1, 2.0, 2.1], {}, None),
        ("reset, then twice", [*PLATEAU, *PLATEAU, 2.1, 2.0, 2.1, 2.1], {}, 120),
        ("patience 1", [*PLATEAU, 2.1], {"overfitting_patience": 1}, 50),
        ("patience 3", [*PLATEAU, 2.1, 2.2, 2.3, 2.4], {"overfitting_patience": 3}, 70),
        ("too short to know the noise", [2, 2, 3], {"overfitting_patience": 1}, None),
        ("the fourth evaluation is the first judged", [2, 2, 2, 3], {"overfitting_patience": 1}, 40),
        ("jitter larger than the rise", [2, 2.2, 2, 2.2, 2, 2.2, 2.2, 2.2, 2.2], {}, None),
        ("the same rise, jitter ignored", [2, 2.2, 2, 2.2, 2, 2.2, 2.2], {"tau_noise": 0.0}, 70),
        ("near zero a doubling is nothing", [1e-9] * 4 + [2e-9, 2e-9], {}, None),
        ("near zero", [1e-9] * 4 + [2e-6, 2e-6], {}, 60),
        ("NaN is no rise", [*PLATEAU, math.nan, 3], {}, None),
        ("NaN first does not hide the best", [math.nan, *PLATEAU, 3, 3], {}, 70),
        ("no history", [], {}, None),
    ],
)
def test_trace_in_exit_step_out(history, case, validation, settings, step) -> None:
    assert exit_step(OverfittingUpturn(**settings), history(validation)) == step


def test_evidence(history) -> None:
    verdict = OverfittingUpturn().judge(history([4.0, 3.0, 2.0, 1.0, 2.0, 3.0]))
    assert verdict is not None
    assert verdict.reason is ExitReason.OVERFITTING
    assert verdict.evidence == {
        "rise": 2.0,
        "margin": 0.001,
        "noise": 0.0,
        "validation_loss": 3.0,
        "best_validation_loss": 1.0,
        "in_a_row": 2,
    }


def test_the_paper_s_gap_test_stops_a_job_that_still_improves_and_this_one_does_not(history) -> None:
    validation = [2.0 - 0.02 * index for index in range(20)]
    points = history(validation, [loss - 0.3 for loss in validation])
    assert exit_step(OverfittingGap(), points) == 20
    assert exit_step(OverfittingUpturn(), points) is None


def test_a_smooth_minimum_is_found_soon_after_it(history) -> None:
    validation = [2.0 + 0.5 * (index / 20 - 0.5) ** 2 for index in range(21)]
    assert 110 < exit_step(OverfittingUpturn(), history(validation)) <= 170


def test_noise_by_hand(history) -> None:
    assert validation_noise(history([1.0, 2.0])) is None
    even = validation_noise(history([0.0, 1.0, 0.0]))
    assert even == pytest.approx(1.0 / math.sqrt(1.5) / 0.6745)
    uneven = validation_noise(history([0.0, 1.0, 0.0], steps=[10, 20, 50]))
    assert uneven == pytest.approx(1.0 / math.sqrt(1.0 + 0.25**2 + 0.75**2) / 0.6745)


def test_a_straight_line_has_no_noise_however_uneven_its_steps(history) -> None:
    steps = [1, 2, 10, 11, 50]
    assert validation_noise(history([100.0 - step for step in steps], steps=steps)) == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("seed", range(20))
def test_noise_is_estimated_around_a_trend_with_uneven_steps(history, seed) -> None:
    draw = random.Random(seed)
    steps = sorted(draw.sample(range(1, 5000), 400))
    points = history([5.0 - 0.0005 * step + draw.gauss(0.0, 0.01) for step in steps], steps=steps)
    assert validation_noise(points) == pytest.approx(0.01, rel=0.2)


def test_the_noise_margin_lets_most_noisy_plateaus_train_on(history) -> None:
    draw = random.Random(0)
    plateaus = [history([2.0 + draw.gauss(0.0, 0.02) for _ in range(20)]) for _ in range(200)]
    with_margin = sum(exit_step(OverfittingUpturn(), points) is not None for points in plateaus)
    without = sum(exit_step(OverfittingUpturn(tau_noise=0.0), points) is not None for points in plateaus)
    assert with_margin <= 80
    assert without >= 190


@given(st.lists(st.floats(0.01, 10), min_size=1, max_size=12), st.integers(-3, 3))
def test_scale_does_not_matter(history, values, exponent) -> None:
    scaled = [value * 2.0**exponent for value in values]
    assert exit_step(OverfittingUpturn(), history(scaled)) == exit_step(OverfittingUpturn(), history(values))


@given(st.lists(st.floats(0.01, 10), min_size=1, max_size=12), st.lists(st.floats(0.01, 10), min_size=12, max_size=12))
def test_pure_and_blind_to_training_loss(history, values, train) -> None:
    points = history(values)
    other = history(values, train[: len(values)])
    verdict, again = OverfittingUpturn().judge(points), OverfittingUpturn().judge(other)
    assert verdict == again == OverfittingUpturn().judge(tuple(points))


@given(st.lists(st.floats(0.01, 10), min_size=1, max_size=12))
def test_never_ends_a_job_at_its_best(history, values) -> None:
    verdict = OverfittingUpturn(overfitting_patience=1, tau_noise=0.0, tau_upturn=0.0).judge(history(values))
    assert verdict is None or values[-1] > min(values)


@pytest.mark.parametrize("settings", [{"overfitting_patience": 0}, {"tau_upturn": -0.1}, {"tau_noise": math.nan}])
def test_arguments_are_checked(settings) -> None:
    with pytest.raises(SpecError, match=f"^{next(iter(settings))} .* should be "):
        OverfittingUpturn(**settings)
