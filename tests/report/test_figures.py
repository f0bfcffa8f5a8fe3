from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from journals import Journal, entries

from alto.report.figures import VALIDATION_LOSS, choose_view, curve_figure, occupancy_figure
from alto.report.importance import first_equal_fraction
from alto.runs import RunHistory
from alto.views.tables import job_table

SANE = {f"job-{index}": [3.0, 2.5 + 0.01 * index, 2.0 + 0.02 * index] for index in range(10)}


def test_view_holds_all_of_sane_curves():
    view = choose_view(SANE)
    assert view.low < 2.0
    assert 3.0 < view.high < 3.2
    assert (view.num_outside, view.note) == (0, "")


@pytest.mark.parametrize("num_diverged", [1, 10, 25])
def test_diverged_curves_do_not_flatten_the_others(num_diverged):
    diverged = {f"bad-{index}": [3.0, 1e3, 1e6] for index in range(num_diverged)}
    view = choose_view({**SANE, **diverged})
    assert view.high < 7.0
    assert view.num_outside == num_diverged
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


def test_where_more_is_better_the_view_is_cut_at_the_bottom():
    margins = {name: [-loss for loss in curve] for name, curve in {**SANE, "bad": [3.0, 1e3, 1e6]}.items()}
    view, upside_down = choose_view(margins, more_is_better=True), choose_view({**SANE, "bad": [3.0, 1e3, 1e6]})
    assert (view.low, view.high) == (-upside_down.high, -upside_down.low)
    assert (view.num_outside, view.worst) == (1, -1e6)
    assert "1 job leaves this view at the bottom (lowest value -1e6)" in view.note


def test_shares_that_all_are_alike_have_a_view():
    view = choose_view({"a": [0.5, 0.5], "b": [0.5]}, more_is_better=True)
    assert view.low < 0.5 < view.high


def test_the_curve_of_the_job_that_was_chosen_is_in_view_whatever_its_loss():
    curves = {**SANE, "chosen": [30.0, 20.0, 25.0]}
    assert choose_view(curves).high < 20.0
    # From its lowest point to its median.
    assert 25.0 < choose_view(curves, best="chosen").high < 30.0


# Losses of `make preferences`: DPO at high learning rates is low at the first evaluation, and overfits after it.
PREFERENCES = {
    "job-010": [0.18, 0.199, 0.197, 0.946, 2.083],
    "job-004": [0.229, 0.212, 0.247, 0.29, 1.851],
    "job-008": [0.217, 0.208, 0.211, 0.329, 0.345],
    "job-009": [0.187, 0.19, 0.202, 0.432, 0.53],
    **{f"first-{loss}": [loss] for loss in (0.42, 0.577, 0.235, 0.326, 0.381, 0.233, 1.25, 3.119)},
}


def test_curves_that_rise_from_their_first_point_are_in_view():
    view = choose_view(PREFERENCES, best="job-010")
    assert 0.946 < view.high < 1.25
    assert view.num_outside == 4


def test_the_lowest_points_of_half_of_the_jobs_are_in_view():
    curves = {"flat": [2.0, 2.0], **{f"job-{index}": [3.0 + index, 3.0 + index] for index in range(3)}}
    assert 3.0 < choose_view(curves).high < 4.0


def test_the_best_curve_is_in_view_down_from_its_median():
    curves = {"best": [0.5, 0.15, 3.0, 3.0, 3.0], **{f"job-{index}": [0.2, 0.1, 0.1] for index in range(11)}}
    assert choose_view(curves).high < 3.0
    assert choose_view(curves, best="best").high > 3.0


def test_jobs_that_all_diverge_after_their_lowest_point_do_not_flatten_it():
    assert choose_view({f"job-{index}": [3.0, 2.0, 1e6, 1e6] for index in range(8)}).high < 7.0


def test_nothing_is_cut_off_of_shares():
    view = choose_view(
        {**{f"{job}": [0.7, 0.71] for job in range(9)}, "bad": [0.1]}, more_is_better=True, is_bounded=True
    )
    assert view.low < 0.1 < 0.71 < view.high
    assert view.note == ""


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
    history = RunHistory.of(entries(small_run))
    figure = curve_figure(history, job_table(history).rows, VALIDATION_LOSS)
    roles = [trace["meta"]["role"] for trace in figure.traces]
    assert roles == ["underperforming", "diverging", "overfitting", "best"]
    assert figure.rungs == [(0.1, "10 %: 2 kept", "10 %: 2 kept")]
    assert figure.traces[-1]["x"] == [0.1, 1.0]
    assert figure.traces[-1]["y"] == [2.1, 1.9]
    assert figure.traces[1]["y"] == [None]


def test_a_rung_is_drawn_where_a_job_could_be():
    """Jobs of 12 steps have no step at 1 %, and none at 20 %."""
    journal = Journal()
    early_exit = {"policy": "alto", "rungs": [[0.01, 0.5], [0.2, 0.5], [0.25, 1]], "equal_shares": True}
    configs = {job: {"learning_rate": 1e-4} for job in "ab"}
    journal.start(configs, early_exit=early_exit)
    for job in journal.events[0]["jobs"]:
        job["total_steps"] = 12
    journal.add("eval", job="a", step=1, total_steps=12, train_ema=2.0, validation_loss=2.0)
    journal.add("eval", job="b", step=1, total_steps=12, train_ema=2.0, validation_loss=1.0)
    journal.add("warmup_ended", rung=0, progress=0.01, kept=["b"], dropped=["a"])
    history = RunHistory.of(entries(journal.events))
    figure = curve_figure(history, job_table(history).rows, VALIDATION_LOSS)
    assert [round(12 * place, 9) for place, *_ in figure.rungs] == [1, 3, 3]
    assert [label for _, label, _ in figure.rungs] == [
        "after 8.3 %, rung at 1 %: 1 kept", "after 25 %, rung at 20 % keep 50 %", "25 % keep 100 %"
    ]  # fmt: skip
    assert [short for *_, short in figure.rungs] == ["1 %: 1 kept", "20 % keep 50 %", "25 % keep 100 %"]
    assert first_equal_fraction(history) == 1 / 12


def test_an_open_stay_lasts_until_now(small_run):
    history = RunHistory.of(entries(small_run[:4]))
    figure = occupancy_figure(history, job_table(history).rows)
    assert (figure["xTitle"], figure["gaps"]) == ("seconds since the start", [])
    assert [bar["y"] for bar in figure["traces"]] == [["slot 0", "slot 1"]]
    assert figure["traces"][0]["base"] == [1.0, 2.0]
    assert figure["traces"][0]["x"] == [2.0, 1.0]


def test_time_without_a_process_is_cut_out_and_marked(interrupted_run):
    history = RunHistory.of(entries(interrupted_run))
    figure = occupancy_figure(history, job_table(history).rows)
    assert figure["xTitle"] == "seconds since the start, interruptions cut out"
    assert figure["gaps"] == [(8.0, "interrupted for 1 h 00 min")]
    stays = sorted(
        (slot, start, length)
        for bar in figure["traces"]
        for slot, start, length in zip(bar["y"], bar["base"], bar["x"], strict=True)
    )
    # Job a from second 1 to 7 and the clone from 11 in slot 0; job b until the interruption and after it in slot 1.
    assert stays == [("slot 0", 1.0, 6.0), ("slot 0", 11.0, 3.0), ("slot 1", 2.0, 6.0), ("slot 1", 9.0, 5.0)]


def test_a_clock_set_back_makes_no_negative_bar(small_run):
    for event in small_run[9:]:
        event["time"] -= 7200
    history = RunHistory.of(entries(small_run))
    figure = occupancy_figure(history, job_table(history).rows)
    numbers = [number for bar in figure["traces"] for number in (*bar["x"], *bar["base"])]
    assert len(numbers) == 8
    assert min(numbers) >= 0


def test_lanes_are_named_by_rank_where_there_are_several(ranked_run):
    history = RunHistory.of(entries(ranked_run))
    figure = occupancy_figure(history, job_table(history).rows)
    assert figure["lanes"] == ["rank 0, slot 0", "rank 0, slot 1", "rank 1, slot 0", "rank 1, slot 1"]
    of_job: dict[str, list[str]] = {}
    for bar in figure["traces"]:
        for job, lane in zip(bar["text"], bar["y"], strict=True):
            of_job.setdefault(job, []).append(lane)
    assert of_job == {
        "a": ["rank 0, slot 0"],
        "b": ["rank 0, slot 1", "rank 1, slot 1"],
        "c": ["rank 1, slot 0", "rank 0, slot 0", "rank 1, slot 0"],
    }
    assert all("in rank" not in hover for bar in figure["traces"] for hover in bar["customdata"])
