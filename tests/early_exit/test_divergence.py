from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alto.early_exit import Divergence
from alto.early_exit.patterns import slope
from alto.errors import SpecError
from alto.records import ExitReason

INF, NAN = math.inf, math.nan


def exit_step(rule, points):
    """First step at which the rule ends the job, as a run would see it: one more point at a time."""
    verdicts = (rule.judge(points[:count]) for count in range(len(points) + 1))
    return next((verdict.step for verdict in verdicts if verdict is not None), None)


@pytest.mark.parametrize(
    ("case", "train", "validation", "settings", "step"),
    [
        ("falls", [4, 3, 2, 1], [4, 3, 2, 1], {}, None),
        ("both rise from the start", [1, 2, 3, 4], [1, 2, 3, 4], {}, 30),
        ("both rise later", [3, 2, 3, 4, 5], [3, 2, 3, 4, 5], {}, 40),
        ("only validation rises", [4, 3, 2, 1], [1, 2, 3, 4], {}, None),
        ("only training rises", [1, 2, 3, 4], [4, 3, 2, 1], {}, None),
        ("a plateau", [2.7] * 6, [2.7] * 6, {}, None),
        ("a plateau, odd window", [2.7] * 6, [2.7] * 6, {"window": 3}, None),
        ("rises by less than tau", [1, 1.0009, 1.0018, 1.0027], [1, 2, 3, 4], {}, None),
        ("rises by tau exactly", [0, 0.25, 0.5, 0.75], [0, 0.25, 0.5, 0.75], {"tau_slope": 0.25}, 30),
        ("counter is reset", [1, 2, 1, 2, 1, 2], [1, 2, 1, 2, 1, 2], {}, None),
        ("reset, then twice", [1, 2, 1, 2, 3], [1, 2, 1, 2, 3], {}, 50),
        ("patience 1", [3, 2, 3], [3, 2, 3], {"divergence_patience": 1}, 30),
        ("patience 3", [1, 2, 3, 4, 5], [1, 2, 3, 4, 5], {"divergence_patience": 3}, 40),
        ("window longer than history", [1, 2, 3], [1, 2, 3], {"window": 4}, None),
        ("window 3 looks past a dip", [1, 3, 2, 5, 4], [1, 3, 2, 5, 4], {"window": 3}, 40),
        ("window 2 does not", [1, 3, 2, 5, 4], [1, 3, 2, 5, 4], {}, None),
        ("no history", [], [], {}, None),
        ("NaN has no slope", [1, NAN, 3, NAN], [1, 2, 3, 4], {}, None),
        ("NaN first", [NAN, 1, 2, 3], [NAN, 1, 2, 3], {}, 40),
        ("infinities have no slope", [INF, INF, INF], [INF, INF, INF], {}, None),
    ],
)
def test_trace_in_exit_step_out(history, case, train, validation, settings, step) -> None:
    assert exit_step(Divergence(**settings), history(validation, train)) == step


def test_evidence(history) -> None:
    verdict = Divergence().judge(history([1, 2, 4], [1, 1.5, 2.5]))
    assert verdict is not None
    assert verdict.reason is ExitReason.DIVERGING
    assert verdict.evidence == {"train_slope": 1.0, "validation_slope": 2.0, "tau_slope": 0.001, "in_a_row": 2}


def test_slope_by_hand() -> None:
    assert slope([1.0, 3.0]) == 2.0
    assert slope([1.0, 2.0, 6.0]) == 2.5
    assert slope([0.1] * 7) == 0.0


losses = st.lists(st.floats(0.01, 100), min_size=1, max_size=12)


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


@pytest.mark.parametrize(
    "settings", [{"window": 1}, {"divergence_patience": 0}, {"tau_slope": 0.0}, {"tau_slope": NAN}]
)
def test_arguments_are_checked(settings) -> None:
    with pytest.raises(SpecError, match=f"^{next(iter(settings))} .* should be "):
        Divergence(**settings)
