"""The early-exit rules on one job's curve: a trace in, an exit step out; smoothing, and refused settings."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alto.early_exit import Collapse, Divergence, Ema, OverfittingGap, OverfittingUpturn, judge_step_loss
from alto.early_exit.patterns import judge_point, slope, validation_noise
from alto.errors import SpecError
from alto.records import ExitReason, LossPoint

INF, NAN = math.inf, math.nan
PLATEAU = [2.0, 2.0, 2.0, 2.0]

losses = st.lists(st.floats(0.01, 100), min_size=1, max_size=12)
small = st.lists(st.floats(0.01, 10), min_size=1, max_size=12)


def exit_step(rule, points):
    """Return the first step at which the rule ends the job, given one more point at a time, as in a run."""
    verdicts = (rule.judge(points[:count]) for count in range(len(points) + 1))
    return next((verdict.step for verdict in verdicts if verdict is not None), None)


@pytest.mark.parametrize(
    ("rule", "case", "train", "validation", "settings", "step"),
    [
        (Divergence, "falls", [4, 3, 2, 1], [4, 3, 2, 1], {}, None),
        (Divergence, "both rise from the start", [1, 2, 3, 4], [1, 2, 3, 4], {}, 30),
        (Divergence, "both rise later", [3, 2, 3, 4, 5], [3, 2, 3, 4, 5], {}, 40),
        (Divergence, "only validation rises", [4, 3, 2, 1], [1, 2, 3, 4], {}, None),
        (Divergence, "only training rises", [1, 2, 3, 4], [4, 3, 2, 1], {}, None),
        (Divergence, "a plateau", [2.7] * 6, [2.7] * 6, {}, None),
        (Divergence, "a plateau, odd window", [2.7] * 6, [2.7] * 6, {"window": 3}, None),
        (Divergence, "rises by less than tau", [1, 1.0009, 1.0018, 1.0027], [1, 2, 3, 4], {}, None),
        (Divergence, "rises by tau exactly", [0, 0.25, 0.5, 0.75], [0, 0.25, 0.5, 0.75], {"tau_slope": 0.25}, 30),
        (Divergence, "counter is reset", [1, 2, 1, 2, 1, 2], [1, 2, 1, 2, 1, 2], {}, None),
        (Divergence, "reset, then twice", [1, 2, 1, 2, 3], [1, 2, 1, 2, 3], {}, 50),
        (Divergence, "patience 1", [3, 2, 3], [3, 2, 3], {"divergence_patience": 1}, 30),
        (Divergence, "patience 3", [1, 2, 3, 4, 5], [1, 2, 3, 4, 5], {"divergence_patience": 3}, 40),
        (Divergence, "window longer than history", [1, 2, 3], [1, 2, 3], {"window": 4}, None),
        (Divergence, "window 3 looks past a dip", [1, 3, 2, 5, 4], [1, 3, 2, 5, 4], {"window": 3}, 40),
        (Divergence, "window 2 does not", [1, 3, 2, 5, 4], [1, 3, 2, 5, 4], {}, None),
        (Divergence, "no history", [], [], {}, None),
        (Divergence, "NaN has no slope", [1, NAN, 3, NAN], [1, 2, 3, 4], {}, None),
        (Divergence, "NaN first", [NAN, 1, 2, 3], [NAN, 1, 2, 3], {}, 40),
        (Divergence, "infinities have no slope", [INF, INF, INF], [INF, INF, INF], {}, None),
        (OverfittingGap, "no gap", [2, 2, 2], [2, 2, 2], {}, None),
        (OverfittingGap, "gap from the start", [1, 1, 1], [2, 2, 2], {}, 20),
        (OverfittingGap, "gap though validation falls", [2, 1.5, 1], [2, 1.8, 1.6], {}, 30),
        (OverfittingGap, "gap of tau exactly is none", [2, 2, 2], [3, 3, 3], {"tau_gap": 0.5}, None),
        (OverfittingGap, "counter is reset", [1, 1, 1, 1, 1], [2, 1, 2, 1, 2], {}, None),
        (OverfittingGap, "reset, then twice", [1, 1, 1, 1], [2, 1, 2, 2], {}, 40),
        (OverfittingGap, "patience 1", [1], [2], {"overfitting_patience": 1}, 10),
        (OverfittingGap, "patience 3", [1] * 4, [2] * 4, {"overfitting_patience": 3}, 30),
        (OverfittingGap, "validation below training", [2, 2], [1, 1], {}, None),
        (OverfittingGap, "training at zero, validation too", [0.0] * 3, [0.0] * 3, {}, None),
        (OverfittingGap, "both near zero", [1e-12] * 3, [5e-5] * 3, {}, None),
        (OverfittingGap, "training at zero, validation not", [0.0] * 3, [0.5] * 3, {}, 20),
        (OverfittingGap, "NaN is no gap", [1, NAN, 1], [2, 2, NAN], {}, None),
        (OverfittingGap, "no history", [], [], {}, None),
        (OverfittingUpturn, "falls", None, [4, 3, 2, 1, 0.5], {}, None),
        (OverfittingUpturn, "a plateau", None, PLATEAU + [2.0] * 5, {}, None),
        (OverfittingUpturn, "rises in a straight line off a plateau", None, [*PLATEAU, 2.1, 2.2], {}, 60),
        (OverfittingUpturn, "falls in a straight line, then rises", None, [5, 4, 3, 2, 1, 2, 3], {}, 70),
        (OverfittingUpturn, "rises by less than the floor", None, [*PLATEAU, 2.001, 2.0015, 2.0019], {}, None),
        (
            OverfittingUpturn,
            "the floor is relative to the best",
            None,
            [*PLATEAU, 2.1, 2.1],
            {"tau_upturn": 0.06},
            None,
        ),
        (
            OverfittingUpturn,
            "counter is reset by one good evaluation",
            None,
            [*PLATEAU, 2.1, 2.0, 2.1, 2.0, 2.1],
            {},
            None,
        ),
        (OverfittingUpturn, "reset, then twice", None, [*PLATEAU, *PLATEAU, 2.1, 2.0, 2.1, 2.1], {}, 120),
        (OverfittingUpturn, "patience 1", None, [*PLATEAU, 2.1], {"overfitting_patience": 1}, 50),
        (OverfittingUpturn, "patience 3", None, [*PLATEAU, 2.1, 2.2, 2.3, 2.4], {"overfitting_patience": 3}, 70),
        (OverfittingUpturn, "too short to know the noise", None, [2, 2, 3], {"overfitting_patience": 1}, None),
        (
            OverfittingUpturn,
            "the fourth evaluation is the first judged",
            None,
            [2, 2, 2, 3],
            {"overfitting_patience": 1},
            40,
        ),
        (OverfittingUpturn, "jitter larger than the rise", None, [2, 2.2, 2, 2.2, 2, 2.2, 2.2, 2.2, 2.2], {}, None),
        (
            OverfittingUpturn,
            "the same rise, jitter ignored",
            None,
            [2, 2.2, 2, 2.2, 2, 2.2, 2.2],
            {"tau_noise": 0.0},
            70,
        ),
        (OverfittingUpturn, "near zero a doubling is nothing", None, [1e-9] * 4 + [2e-9, 2e-9], {}, None),
        (OverfittingUpturn, "near zero", None, [1e-9] * 4 + [2e-6, 2e-6], {}, 60),
        (OverfittingUpturn, "NaN is no rise", None, [*PLATEAU, NAN, 3], {}, None),
        (OverfittingUpturn, "NaN first does not hide the best", None, [NAN, *PLATEAU, 3, 3], {}, 70),
        (OverfittingUpturn, "no history", None, [], {}, None),
    ],
)
def test_trace_in_exit_step_out(history, rule, case, train, validation, settings, step) -> None:
    assert exit_step(rule(**settings), history(validation, train)) == step


@pytest.mark.parametrize(
    ("rule", "validation", "train", "reason", "evidence"),
    [
        (
            Divergence,
            [1, 2, 4],
            [1, 1.5, 2.5],
            ExitReason.DIVERGING,
            {"train_slope": 1.0, "validation_slope": 2.0, "tau_slope": 0.001, "in_a_row": 2},
        ),
        (
            OverfittingGap,
            [3.0, 3.0],
            [2.0, 2.0],
            ExitReason.OVERFITTING,
            {"gap": 0.5, "tau_gap": 0.1, "validation_loss": 3.0, "train_ema": 2.0, "in_a_row": 2},
        ),
        (
            OverfittingUpturn,
            [4.0, 3.0, 2.0, 1.0, 2.0, 3.0],
            None,
            ExitReason.OVERFITTING,
            {
                "rise": 2.0,
                "margin": 0.001,
                "noise": 0.0,
                "validation_loss": 3.0,
                "best_validation_loss": 1.0,
                "in_a_row": 2,
            },
        ),
    ],
)
def test_evidence(history, rule, validation, train, reason, evidence) -> None:
    verdict = rule().judge(history(validation, train))
    assert verdict is not None
    assert verdict.reason is reason
    assert verdict.evidence == evidence


@pytest.mark.parametrize(
    ("rule", "settings"),
    [
        (Divergence, {"window": 1}),
        (Divergence, {"divergence_patience": 0}),
        (Divergence, {"tau_slope": 0.0}),
        (Divergence, {"tau_slope": NAN}),
        (OverfittingGap, {"overfitting_patience": 0}),
        (OverfittingGap, {"tau_gap": 0.0}),
        (OverfittingGap, {"tau_gap": INF}),
        (OverfittingUpturn, {"overfitting_patience": 0}),
        (OverfittingUpturn, {"tau_upturn": -0.1}),
        (OverfittingUpturn, {"tau_noise": NAN}),
    ],
)
def test_arguments_are_checked(rule, settings) -> None:
    with pytest.raises(SpecError, match=f"^{next(iter(settings))} .* should be "):
        rule(**settings)


@pytest.mark.parametrize("rule", [OverfittingGap, OverfittingUpturn])
@given(st.lists(st.tuples(st.floats(0.01, 10), st.floats(0.01, 10)), min_size=1, max_size=12), st.integers(-3, 3))
def test_scale_does_not_matter(history, rule, pairs, exponent) -> None:
    scale = 2.0**exponent
    train, validation = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    scaled = history([loss * scale for loss in validation], [loss * scale for loss in train])
    assert exit_step(rule(), scaled) == exit_step(rule(), history(validation, train))


def test_slope_by_hand() -> None:
    assert slope([1.0, 3.0]) == 2.0
    assert slope([1.0, 2.0, 6.0]) == 2.5
    assert slope([0.1] * 7) == 0.0


@given(losses, st.integers(2, 4), st.integers(1, 3))
def test_same_records_same_verdict_and_no_record_is_changed(history, values, window, patience) -> None:
    points, rule = history(values), Divergence(window=window, divergence_patience=patience)
    before = list(points)
    assert (
        rule.judge(points)
        == rule.judge(tuple(points))
        == Divergence(window=window, divergence_patience=patience).judge(points)
    )
    assert points == before


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=12), st.integers(0, 1000))
def test_only_rises_count_not_the_level(history, values, shift) -> None:
    shifted = [value + shift for value in values]
    assert exit_step(Divergence(), history(values)) == exit_step(Divergence(), history(shifted))


@given(losses)
def test_what_came_before_the_window_does_not_matter(history, values) -> None:
    rising = [1.0, 2.0, 3.0]
    assert Divergence().judge(history(values + rising)) is not None


@given(st.floats(0, 1e-3), st.floats(0, 10))
def test_a_training_loss_near_zero_cannot_blow_the_gap_up(history, train, validation) -> None:
    verdict = OverfittingGap(overfitting_patience=1).judge(history([validation], [train]))
    assert verdict is None or verdict.evidence["gap"] <= validation / 1e-3


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


@given(small, st.lists(st.floats(0.01, 10), min_size=12, max_size=12))
def test_pure_and_blind_to_training_loss(history, values, train) -> None:
    points = history(values)
    other = history(values, train[: len(values)])
    verdict, again = OverfittingUpturn().judge(points), OverfittingUpturn().judge(other)
    assert verdict == again == OverfittingUpturn().judge(tuple(points))


@given(small)
def test_never_ends_a_job_at_its_best(history, values) -> None:
    verdict = OverfittingUpturn(overfitting_patience=1, tau_noise=0.0, tau_upturn=0.0).judge(history(values))
    assert verdict is None or values[-1] > min(values)


def averages(values: list[float], alpha: float) -> list[float]:
    ema = Ema(alpha)
    return [ema.update(loss) for loss in values]


def test_the_formula_by_hand() -> None:
    assert averages([4.0, 2.0, 0.0], 0.5) == [4.0, 3.0, 1.5]
    assert averages([4.0, 2.0, 0.0], 1.0) == [4.0, 2.0, 0.0]
    assert averages([], 0.5) == []


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32), max_size=50), st.floats(0.001, 1.0))
def test_every_loss_counts(values: list[float], alpha: float) -> None:
    ema, expected = Ema(alpha), None
    for loss in values:
        expected = loss if expected is None else alpha * loss + (1.0 - alpha) * expected
        assert ema.update(loss) == expected
    assert ema.count == len(values)


def test_nan_stays() -> None:
    assert [math.isnan(value) for value in averages([1.0, math.nan, 1.0], 0.5)] == [False, True, True]


@pytest.mark.parametrize("alpha", [0.0, -0.1, 1.1, math.nan])
def test_alpha_is_checked(alpha: float) -> None:
    with pytest.raises(SpecError, match="ema_alpha: expected a weight in"):
        Ema(alpha)


@pytest.mark.parametrize("loss", [NAN, INF, -INF])
def test_a_step_loss_that_is_not_finite_is_diverging(loss) -> None:
    verdict = judge_step_loss("a", 7, loss)
    assert verdict is not None
    assert (verdict.job, verdict.step, verdict.reason) == ("a", 7, ExitReason.DIVERGING)
    assert verdict.evidence["train_loss"] == pytest.approx(loss, nan_ok=True)


@pytest.mark.parametrize("loss", [0.0, -1.0, 1e308])
def test_a_finite_step_loss_is_no_verdict(loss) -> None:
    assert judge_step_loss("a", 7, loss) is None


@pytest.mark.parametrize(("ema", "validation"), [(NAN, 1.0), (1.0, NAN), (INF, 1.0), (1.0, INF)])
def test_an_evaluation_with_either_loss_not_finite_is_diverging(history, ema, validation) -> None:
    verdict = judge_point(history([validation], [ema])[0])
    assert verdict is not None
    assert verdict.reason is ExitReason.DIVERGING
    assert verdict.evidence == pytest.approx({"validation_loss": validation, "train_ema": ema}, nan_ok=True)


def test_a_finite_evaluation_is_no_verdict(history) -> None:
    assert judge_point(history([2.0], [1.0])[0]) is None


LEARNING = {"reward": 0.3, "equal_groups": 0.5, "entropy": 0.7, "truncated": 0.2, "completion_tokens": 9.0}


def rewarded(*parts: tuple[int, dict[str, float]]) -> list[LossPoint]:
    """Return evaluations, one after each part: a number of steps, and what differs from :data:`LEARNING` in them."""
    points, step = [], 0
    for count, changes in parts:
        step += count
        metrics = {name: (value,) * count for name, value in (LEARNING | changes).items()}
        point = LossPoint(
            job="a", step=step, total_steps=1000, train_ema=0.0, validation_loss=0.0, step_metrics=metrics
        )
        points.append(point)
    return points


EQUAL, CERTAIN, ENDLESS = {"equal_groups": 1.0}, {"entropy": 1e-4}, {"truncated": 1.0, "reward": 0.1}


@pytest.mark.parametrize(
    ("parts", "step"),
    [
        ([(5, {}), (5, {}), (50, {})], None),
        ([(4, EQUAL)], 4),
        ([(3, EQUAL), (1, EQUAL)], 4),
        ([(3, EQUAL), (1, {}), (3, EQUAL)], None),
        ([(3, EQUAL), (5, {}), (3, EQUAL), (2, EQUAL)], 13),
        ([(3, CERTAIN)], None),
        ([(8, {}), (4, CERTAIN)], 12),
        ([(2, CERTAIN), (1, {}), (2, CERTAIN)], None),
        ([(4, {}), (4, ENDLESS)], 8),
        ([(8, ENDLESS)], None),  # as long as it was at the start
        ([(4, {}), (4, ENDLESS | {"reward": 0.9})], None),  # long answers earn more
        ([(4, {"truncated": 0.9}), (4, ENDLESS)], None),
    ],
)
def test_a_job_that_learns_from_rewards_collapses(parts: list[tuple[int, dict[str, float]]], step: int | None) -> None:
    assert exit_step(Collapse(collapse_patience=4), rewarded(*parts)) == step


def test_a_collapse_says_what_was_seen() -> None:
    verdict = Collapse(collapse_patience=4).judge(rewarded((4, {}), (4, ENDLESS)))
    assert verdict is not None
    assert verdict.reason is ExitReason.COLLAPSED
    assert verdict.evidence == pytest.approx({"truncated": 1.0, "reward": 0.1, "first_reward": 0.3, "in_a_row": 4})


def test_a_job_that_does_not_sample_never_collapses(history) -> None:
    assert Collapse(collapse_patience=2).judge(history([1.0, 1.0, 1.0])) is None
