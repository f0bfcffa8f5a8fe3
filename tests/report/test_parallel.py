from __future__ import annotations

import math

import pytest
from journals import entries

from alto.report.run_drawings import parallel_figure, result_axis, setting_axis
from alto.runs import RunHistory


def test_few_values_are_bands_in_their_order():
    axis = setting_axis("lr", {"a": 1e-2, "b": 1e-5, "c": 1e-4, "d": 1e-5})
    assert [text for _, text in axis.ticks] == ["1e-5", "1e-4", "0.01"]
    assert [at for at, _ in axis.ticks] == pytest.approx([1 / 6, 3 / 6, 5 / 6])
    # Lines of one value are spread by loss, the better below.
    assert 0 < axis.positions["b"] < 1 / 6 < axis.positions["d"] < 1 / 3
    assert axis.positions["a"] == pytest.approx(5 / 6)


def test_categories_and_missing_values_have_bands_too():
    axis = setting_axis("targets", {"a": ["q", "v"], "b": None, "c": "all-linear", "d": True, "e": 3})
    assert [text for _, text in axis.ticks] == ["–", "3", "all-linear", "q, v", "yes"]


def test_values_that_differ_by_rounding_share_a_band():
    assert len(setting_axis("lr", {"a": 0.003, "b": 0.0029999999999999996}).ticks) == 1


def test_many_numbers_over_decades_are_logarithmic():
    values = {f"job-{index}": 10.0 ** (-5 + 3 * index / 29) for index in range(30)}
    axis = setting_axis("lr", values)
    assert [text for _, text in axis.ticks if text.startswith("1e")] == ["1e-5", "1e-4", "1e-3"]
    assert axis.positions["job-0"] == 0
    assert axis.positions["job-29"] == 1
    assert next(at for at, text in axis.ticks if text == "1e-4") == pytest.approx(1 / 3)


def test_many_numbers_of_one_size_are_linear():
    axis = setting_axis("dropout", {f"job-{index}": 0.1 + 0.01 * index for index in range(30)})
    assert [text for _, text in axis.ticks] == ["0.1", "0.15", "0.2", "0.25", "0.3", "0.35"]


def test_names_of_many_categories_are_thinned():
    axis = setting_axis("name", {f"job-{index}": f"value-{index:02d}" for index in range(30)})
    assert len(axis.ticks) == 10
    assert len(set(axis.positions.values())) == 30


def test_losses_that_are_not_finite_lie_above_the_axis():
    axis = result_axis("loss", {"a": 2.0, "b": 2.5, "c": math.inf})
    assert axis.positions["a"] == 0
    assert axis.positions["b"] == 1
    assert axis.positions["c"] > 1
    assert axis.ticks[-1][1] == "none finite"


@pytest.mark.parametrize("losses", [{"a": 2.0}, {"a": math.inf}, {"a": 0.0, "b": 1e-9}, {"a": 2.0, "b": 2.0}])
def test_an_axis_of_results_is_always_a_range(losses):
    axis = result_axis("loss", losses)
    assert set(axis.positions) == set(losses)
    assert all(math.isfinite(at) for at in axis.positions.values())


def test_the_best_job_is_drawn_last_and_constant_settings_are_no_axis(small_run):
    figure = parallel_figure(RunHistory.of(entries(small_run)))
    assert [axis["name"] for axis in figure["axes"]] == ["lr", "r", "best validation loss"]
    assert [trace["meta"]["role"] for trace in figure["traces"]] == ["not-finite", "fifth-3", "fifth-1", "best"]
    assert "best validation loss 1.9000" in figure["traces"][-1]["text"]
    assert all(len(trace["y"]) == 3 for trace in figure["traces"])


def test_sixty_jobs_make_five_groups_with_one_legend_entry_each(sweep):
    traces = parallel_figure(RunHistory.of(entries(sweep)))["traces"]
    assert len(traces) == 60
    shown = [trace["name"] for trace in traces if trace["showlegend"]]
    assert shown == ["last fifth", "fourth fifth", "third fifth", "second fifth", "best fifth", "best: job-59"]


def test_nothing_to_compare_no_figure(small_run):
    assert parallel_figure(RunHistory.of(entries([]))) is None
    assert parallel_figure(RunHistory.of(entries(small_run[:6]))) is None


def test_the_last_axis_is_what_the_task_chooses_by(preference_run):
    figure = parallel_figure(RunHistory.of(entries(preference_run)))
    assert [axis["name"] for axis in figure["axes"]] == ["lr", "best reward accuracy"]
    heights = {trace["text"][3]: trace["y"][-1] for trace in figure["traces"]}
    assert heights == {"a": 0.0, "b": 1.0, "c": 1.0}
    assert "<br>reward accuracy 75 %<br>reward margin 0.4000" in figure["traces"][-1]["text"]
    preference_run[0]["metric"] = "loss"
    assert parallel_figure(RunHistory.of(entries(preference_run)))["axes"][-1]["name"] == "best validation loss"
