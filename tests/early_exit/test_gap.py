from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alto.early_exit import OverfittingGap
from alto.errors import SpecError
from alto.records import ExitReason


def exit_step(rule, points):
    verdicts = (rule.judge(points[:count]) for count in range(len(points) + 1))
    return next((verdict.step for verdict in verdicts if verdict is not None), None)


@pytest.mark.parametrize(
    ("case", "train", "validation", "settings", "step"),
    [
        ("no gap", [2, 2, 2], [2, 2, 2], {}, None),
        ("gap from the start", [1, 1, 1], [2, 2, 2], {}, 20),
        ("gap though validation falls", [2, 1.5, 1], [2, 1.8, 1.6], {}, 30),
        ("gap of tau exactly is none", [2, 2, 2], [3, 3, 3], {"tau_gap": 0.5}, None),
        ("counter is reset", [1, 1, 1, 1, 1], [2, 1, 2, 1, 2], {}, None),
        ("reset, then twice", [1, 1, 1, 1], [2, 1, 2, 2], {}, 40),
        ("patience 1", [1], [2], {"overfitting_patience": 1}, 10),
        ("patience 3", [1] * 4, [2] * 4, {"overfitting_patience": 3}, 30),
        ("validation below training", [2, 2], [1, 1], {}, None),
        ("training at zero, validation too", [0.0] * 3, [0.0] * 3, {}, None),
        ("both near zero", [1e-12] * 3, [5e-5] * 3, {}, None),
        ("training at zero, validation not", [0.0] * 3, [0.5] * 3, {}, 20),
        ("NaN is no gap", [1, math.nan, 1], [2, 2, math.nan], {}, None),
        ("no history", [], [], {}, None),
    ],
)
def test_trace_in_exit_step_out(history, case, train, validation, settings, step) -> None:
    assert exit_step(OverfittingGap(**settings), history(validation, train)) == step


def test_evidence(history) -> None:
    verdict = OverfittingGap().judge(history([3.0, 3.0], [2.0, 2.0]))
    assert verdict is not None
    assert verdict.reason is ExitReason.OVERFITTING
    assert verdict.evidence == {"gap": 0.5, "tau_gap": 0.1, "validation_loss": 3.0, "train_ema": 2.0, "in_a_row": 2}


@given(st.floats(0, 1e-3), st.floats(0, 10))
def test_a_training_loss_near_zero_cannot_blow_the_gap_up(history, train, validation) -> None:
    verdict = OverfittingGap(overfitting_patience=1).judge(history([validation], [train]))
    assert verdict is None or verdict.evidence["gap"] <= validation / 1e-3


@given(st.lists(st.tuples(st.floats(0.01, 10), st.floats(0.01, 10)), min_size=1, max_size=8), st.integers(-3, 3))
def test_scale_does_not_matter(history, pairs, exponent) -> None:
    scale = 2.0**exponent
    train, validation = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    scaled = history([loss * scale for loss in validation], [loss * scale for loss in train])
    assert exit_step(OverfittingGap(), scaled) == exit_step(OverfittingGap(), history(validation, train))


@pytest.mark.parametrize("settings", [{"overfitting_patience": 0}, {"tau_gap": 0.0}, {"tau_gap": math.inf}])
def test_arguments_are_checked(settings) -> None:
    with pytest.raises(SpecError, match=f"^{next(iter(settings))} .* should be "):
        OverfittingGap(**settings)
