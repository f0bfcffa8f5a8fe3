from __future__ import annotations

import io

import pytest
from journals import entries
from rich.cells import cell_len
from rich.console import Console

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
def test_what_does_not_fit_is_left_out_and_said(small_run, width, dropped):
    lines = lines_of(small_run, width=width)
    assert all(cell_len(line) <= width for line in lines)
    hidden = lines[-1].removeprefix("hidden columns: ").removesuffix(" (widen the terminal)")
    assert set(hidden.split(", ")) == set(dropped.split(", "))
    assert {"job", "stage", "done", "best"} <= set(headings(lines))


def test_losses_are_never_cut(small_run):
    for width in range(44, 160):
        rows = lines_of(small_run, width=width)[2:6]
        assert not any("…" in row.split("twice")[0].split("rank")[0].split("smoothed")[0] for row in rows if "★" in row)


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
