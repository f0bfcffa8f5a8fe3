from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alto.export.figures import choose_view, loss_figure, occupancy_figure
from alto.export.tables import job_table
from alto.runs import RunHistory

SANE = {f"job-{index}": [3.0, 2.5 + 0.01 * index, 2.0 + 0.02 * index] for index in range(10)}


def test_view_holds_all_of_sane_curves():
    view = choose_view(SANE)
    assert view.low < 2.0
    assert 3.0 < view.high < 3.2
    assert (view.num_above, view.note) == (0, "")


@pytest.mark.parametrize("num_diverged", [1, 10, 25])
def test_diverged_curves_do_not_flatten_the_others(num_diverged):
    diverged = {f"bad-{index}": [3.0, 1e3, 1e6] for index in range(num_diverged)}
    view = choose_view({**SANE, **diverged})
    assert view.high < 7.0
    assert view.num_above == num_diverged
    assert "1e6" in view.note
    assert "Double-click" in view.note


def test_curves_that_never_were_sane_do_not_set_the_scale():
    view = choose_view({**SANE, **{f"bad-{index}": [1e6, 1e6] for index in range(20)}})
    assert view.high < 7.0


def test_not_finite_losses_are_counted_and_left_out():
    view = choose_view({**SANE, "nan": [3.0, math.nan], "inf": [math.inf]})
    assert view.high < 3.2
    assert view.num_not_finite == 2
    assert "2 jobs reached a loss that is not finite" in view.note


def test_no_finite_loss_no_view():
    assert choose_view({"a": [math.nan], "b": []}) is None


@given(
    st.dictionaries(
        st.text(max_size=3), st.lists(st.floats(min_value=-1e300, max_value=1e300) | st.just(math.nan), max_size=5)
    )
)
def test_a_view_is_a_range_that_holds_the_lowest_loss(curves):
    finite = [loss for curve in curves.values() for loss in curve if math.isfinite(loss)]
    view = choose_view(curves)
    if view is None:
        assert not finite
    else:
        assert math.isfinite(view.low)
        assert math.isfinite(view.high)
        assert view.low <= min(finite) <= view.high


def test_best_is_drawn_last_and_outcomes_share_a_legend_entry(small_run):
    history = RunHistory.of(small_run)
    figure = loss_figure(history, job_table(history).rows, lambda point: point.validation_loss)
    roles = [trace["meta"]["role"] for trace in figure.traces]
    assert roles == ["rung", "underperforming", "diverging", "overfitting", "best"]
    assert figure.traces[0]["x"] == [0.1, 0.1, 0.1]
    assert "10 %: 2 kept" in figure.traces[0]["text"][1]
    assert figure.traces[-1]["x"] == [0.1, 1.0]
    assert figure.traces[-1]["y"] == [2.1, 1.9]
    assert figure.traces[2]["y"] == [None]


def test_an_open_stay_lasts_until_now(small_run):
    history = RunHistory.of(small_run[:4])
    bars, unit = occupancy_figure(history, job_table(history).rows)
    assert unit == "seconds"
    assert [bar["y"] for bar in bars] == [["slot 0", "slot 1"]]
    assert bars[0]["base"] == [1.0, 2.0]
    assert bars[0]["x"] == [2.0, 1.0]
