"""Drawings of a run: the grid of its jobs, its parallel coordinates, and the lanes of its schedule."""

from __future__ import annotations

import io
import math

import pytest
from journals import entries
from rich.cells import cell_len
from rich.console import Console

from alto.records import Gpu, Node, Placement
from alto.report.gantt import gantt_figure
from alto.report.run_drawings import parallel_figure, result_axis, setting_axis
from alto.runs import RunHistory
from alto.views.tables import job_table
from alto.views.terminal import JobGrid


def lines_of(events, *, width, max_rows=None) -> list[str]:
    table = job_table(RunHistory.of(entries(events)))
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(
        JobGrid(
            settings=table.columns,
            metrics=table.metrics,
            rows=table.rows,
            notes=[row.explanation for row in table.rows],
            note_name="why",
            max_rows=max_rows,
        )
    )
    return console.file.getvalue().splitlines()


def headings(lines) -> list[str]:
    return lines[0].replace("best val", "best").split()


def test_a_wide_terminal_shows_everything(small_run):
    lines = lines_of(small_run, width=160)
    assert headings(lines) == ["job", "lr", "r", "stage", "done", "train", "val", "best", "why"]
    assert "validation 2.5000 was 25 % above train 2.0000 twice in a row (allowed: 10 %)" in lines[3]
    assert "hidden columns" not in lines[-1]


def test_preferences_have_two_columns_of_their_own(preference_run):
    lines = lines_of(preference_run, width=120)
    assert headings(lines) == ["job", "lr", "stage", "done", "train", "val", "best", "accuracy", "margin"]
    assert lines[2].split()[-3:] == ["75", "%", "0.4000"]


def test_where_there_is_no_room_for_both_the_metric_that_is_chosen_by_stays_longest(preference_run):
    assert lines_of(preference_run, width=58)[-1] == "hidden columns: train, val (widen the terminal)"
    assert lines_of(preference_run, width=51)[-1] == "hidden columns: train, val, margin"
    assert lines_of(preference_run, width=46)[-1] == "hidden columns: lr, train, val, margin"


@pytest.mark.parametrize(
    ("width", "dropped"),
    [
        (80, "why"),
        (70, "why"),
        (62, "why, train"),
        (52, "why, train, val"),
        (46, "r, why, train, val"),
    ],
)
def test_what_does_not_fit_is_left_out_with_a_note(small_run, width, dropped):
    lines = lines_of(small_run, width=width)
    assert all(cell_len(line) <= width for line in lines)
    hidden = lines[-1].removeprefix("hidden columns: ").removesuffix(" (widen the terminal)")
    assert set(hidden.split(", ")) == set(dropped.split(", "))
    assert {"job", "stage", "done", "best"} <= set(headings(lines))


def test_losses_are_never_cut(small_run):
    for width in range(44, 160):
        rows = lines_of(small_run, width=width)[2:6]
        assert not any(
            "…" in row.split("twice")[0].split("rank")[0].split("smoothed")[0].split("chosen")[0]
            for row in rows
            if "★" in row
        )


def test_hidden_rows_are_counted_by_outcome(small_run):
    assert lines_of(small_run, width=160, max_rows=1)[-1] == (
        "… and 3 more (1 overfitting, 1 underperforming, 1 diverging)"
    )


def test_long_names_are_cut_not_wrapped(small_run):
    for event in small_run:
        for key in ("job", "best_job"):
            if key in event:
                event[key] += "-" + "数" * 40
    for job in small_run[0]["jobs"]:
        job["job"] += "-" + "数" * 40
    lines = lines_of(small_run, width=100)
    assert len(lines) == 7
    assert all(cell_len(line) <= 100 for line in lines)


def test_few_values_are_bands_in_their_order():
    axis = setting_axis("lr", {"a": 1e-2, "b": 1e-5, "c": 1e-4, "d": 1e-5})
    assert [text for _, text in axis.ticks] == ["1e-5", "1e-4", "0.01"]
    assert [at for at, _ in axis.ticks] == pytest.approx([1 / 6, 3 / 6, 5 / 6])
    # Lines with one value are spread by loss, better ones below.
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


def test_losses_that_are_not_finite_are_above_the_axis():
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


NODES = (Node(name="n", gpus=(0, 1)),)


def placed(task: str, start_s: float, duration_s: float, *gpus: int) -> Placement:
    own = tuple(Gpu("n", index) for index in gpus)
    return Placement(task=task, gpus=own, start_s=start_s, duration_s=duration_s)


def lane_of(figure: dict[str, object], task: str) -> list[str]:
    return [
        lane
        for trace in figure["traces"]  # type: ignore[attr-defined]
        for lane, text in zip(trace["y"], trace["text"], strict=True)
        if text == task
    ]


def test_one_after_the_other_is_one_lane() -> None:
    figure = gantt_figure([], [placed("a", 0, 5, 0), placed("b", 5, 5, 0), placed("c", 9.9996, 1, 0)], NODES)
    assert figure["lanes"] == ["n:0", "n:1"]


def test_tasks_that_share_a_gpu_have_lanes_of_it() -> None:
    shared = [placed("a", 0, 5, 0), placed("b", 1, 9, 0), placed("c", 2, 1, 0), placed("d", 6, 2, 0, 1)]
    figure = gantt_figure([], shared, NODES)
    assert figure["lanes"] == ["n:0", "n:0 (2)", "n:0 (3)", "n:1"]
    assert [lane_of(figure, task) for task in "abcd"] == [["n:0"], ["n:0 (2)"], ["n:0 (3)"], ["n:0", "n:1"]]


def test_where_a_lane_is_a_node_all_are_in_it() -> None:
    many = (Node(name="n", gpus=tuple(range(100))),)
    assert gantt_figure([], [placed("a", 0, 5, 0), placed("b", 1, 9, 0)], many)["lanes"] == ["n"]


def test_a_gpu_with_several_lanes_is_explained() -> None:
    shared = gantt_figure([], [placed("a", 0, 5, 0), placed("b", 1, 9, 0)], NODES)
    assert shared["note"] == "Tasks that run in the same place at the same time have separate rows: n:0, n:0 (2)."
    assert gantt_figure([], [placed("a", 0, 5, 0), placed("b", 5, 9, 0)], NODES)["note"] == ""
